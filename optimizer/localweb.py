"""A web page for the one person at this machine: who may open it, and what a browser may do with it.

Bound to 127.0.0.1. The link printed in the terminal carries a token, which becomes a SameSite cookie; every form
carries a second secret; requests under any other host name are refused (a page elsewhere could point its own name
at 127.0.0.1). Not for: what the pages say (review/web.py, report_web.py).
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]"))
FORM_CAP_BYTES = 256 << 10
CSRF = "csrf"  # name of the form field
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # under no-referrer a browser sends our own forms with `Origin: null`
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class BadForm(ValueError):
    """A form that is too large, is not a form, or does not carry this session's secret."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The secrets of one server process: in the link, in the cookie and in every form."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class Guard:
    """ASGI middleware: host name, token or cookie, then the page; security headers on every answer.

    `csp` is the Content-Security-Policy of every page behind it.
    """

    def __init__(self, app: App, keys: Keys, csp: str) -> None:
        self.app, self.keys, self.csp = app, keys, csp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        host = headers.get("host", "")
        if hostname(host) not in HOSTS:
            await _refuse(send, 421, "This page answers to 127.0.0.1 and localhost only.")
            return
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if "token" in query and same(query["token"][-1], self.keys.token):
            await self._let_in(scope, query, send)
            return
        if not same(_cookie(headers.get("cookie", ""), cookie_name(scope)), self.keys.session):
            await _refuse(send, 403, "Open the link that the terminal shows: it carries the key to this page.")
            return
        origin = headers.get("origin")
        if scope["method"] not in ("GET", "HEAD") and origin is not None and origin != f"http://{host}":
            await _refuse(send, 403, "This form was sent from another page.")
            return
        await self.app(scope, receive, self._with_headers(send))

    async def _let_in(self, scope: Scope, query: Mapping[str, list[str]], send: Send) -> None:
        rest = urlencode([(k, v) for k, values in query.items() if k != "token" for v in values])
        place = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
        cookie = f"{cookie_name(scope)}={self.keys.session}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 303, "", {"Location": place, "Set-Cookie": cookie})

    def _with_headers(self, send: Send) -> Send:
        async def wrapped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = {"Content-Security-Policy": self.csp, **HEADERS}
                raw = [(k.lower().encode(), v.encode()) for k, v in more.items()]
                message = {**message, "headers": [*message.get("headers", ()), *raw]}
            await send(message)

        return wrapped


def hostname(host: str) -> str:
    """The name in a Host header without its port: a tunnel may use another port."""
    name = host.strip().lower()
    return name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.partition(":")[0]


def cookie_name(scope: Scope) -> str:
    """Cookies know no ports; two servers on one machine must not overwrite each other's."""
    return f"hotloop-{(scope.get('server') or ('', 0))[1] or 0}"


def same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def read_form(body: bytes, keys: Keys) -> dict[str, str]:
    """The last value of every field of a posted form. Raises BadForm."""
    if len(body) > FORM_CAP_BYTES:
        raise BadForm(f"a form of more than {FORM_CAP_BYTES} bytes")
    try:
        found = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=200)
    except ValueError as error:
        raise BadForm(f"not a form: {error}") from None
    values = {k: v[-1].replace("\r\n", "\n") for k, v in found.items()}
    if not same(values.pop(CSRF, ""), keys.csrf):
        raise BadForm("this form is not from the page that is open; reload the page and try again")
    return values


async def body(request: Any) -> bytes:
    """At most one byte more than a form may have, so that nobody fills the memory."""
    found = b""
    async for chunk in request.stream():
        found += chunk
        if len(found) > FORM_CAP_BYTES:
            break
    return found


def bind(port: int = 0) -> socket.socket:
    """A listening socket on 127.0.0.1; port 0 takes a free one. Raises OSError when the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def link(listener: socket.socket, keys: Keys, path: str = "/") -> str:
    """What to open in a browser."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}{path}?token={keys.token}"


def serve(app: App, keys: Keys, port: int, say: Callable[[str], object]) -> None:
    """Say where the page is, then serve it until Ctrl-C."""
    import uvicorn

    listener = bind(port)
    say(f"open {link(listener, keys)} (Ctrl-C ends it)")
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


def _cookie(header: str, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(header)
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


async def _refuse(send: Send, status: int, why: str) -> None:
    await _answer(send, status, why + "\n", {"Content-Type": "text/plain; charset=utf-8", **HEADERS})


async def _answer(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    body = text.encode()
    rows: Iterable[tuple[str, str]] = [*headers.items(), ("Content-Length", str(len(body)))]
    raw = [(k.lower().encode(), v.encode("latin-1", "replace")) for k, v in rows]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
