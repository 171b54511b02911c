"""`optimize report --serve`: the report of a run that is still working, drawn anew as its ledger grows.

Reads the run's folder and nothing else, so it can be started and stopped at any time without touching the loop.
Not for: the page itself (`reports.html`), who may open it (localweb.py).
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from markupsafe import Markup

from optimizer import localweb
from reports import html, live, run_data, run_traces

_SCRIPT = Path(html.__file__).resolve().parent / "templates" / "live.js"


class LivePage:
    """The page of one run; it is drawn only when the ledger or the traces have changed since the last time."""

    def __init__(self, run_dir: Path) -> None:
        self.dir, self.nonce = run_dir, secrets.token_urlsafe(12)
        self._lock = threading.Lock()  # figures are drawn one at a time
        self._drawn: tuple[str, bytes] | None = None
        self._read: tuple[str, run_traces.RunTraces] | None = None

    @property
    def csp(self) -> str:
        return (
            f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-{self.nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def tag(self) -> str:
        """Changes whenever the page would."""
        return _digest([self.dir / "ledger.jsonl", self.dir / "run.json", *self._trace_files()])

    def page(self, tag: str) -> bytes:
        """Raises run_data.RunError when there is no run yet."""
        with self._lock:
            if self._drawn is None or self._drawn[0] != tag:
                self._drawn = (tag, self._draw(tag))
            return self._drawn[1]

    def _draw(self, tag: str) -> bytes:
        run = run_data.read(self.dir)
        view = html.run_view(run, self._traces(run))
        live.adapt(view.page)
        script = Markup(_SCRIPT.read_text("utf-8"))
        said = {**live.words(run), "tag": tag, "nonce": self.nonce, "script": script}
        policy = self.csp.partition("; frame-ancestors")[0]  # which a meta element may not state
        return html.run_html(view, live=said, csp=policy)

    def _traces(self, run: run_data.Run) -> run_traces.RunTraces:
        """Traces are read again only when there are others, or other engines among the accepted ones."""
        shown = [a.number for a in run.accepted] + [len(run.kinds.get("captured", ()))]
        key = f"{_digest(self._trace_files())}{shown}"
        if self._read is None or self._read[0] != key:
            self._read = (key, run_traces.load(run))
        return self._read[1]

    def _trace_files(self) -> list[Path]:
        return sorted(p for p in self.dir.glob("traces/*/*") if p.name.endswith((".json", ".json.gz")))


def _digest(files: list[Path]) -> str:
    rows: list[Any] = []
    for file in files:
        try:
            about = file.stat()
        except OSError:
            continue
        rows.append((str(file), about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:24]


def app(run_dir: Path, keys: localweb.Keys) -> localweb.Guard:
    """The web application of one run."""
    shown = LivePage(run_dir)
    inner = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @inner.get("/")
    def index(request: Request) -> Response:
        tag = shown.tag()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        try:
            page = shown.page(tag)
        except run_data.RunError as error:
            return Response(f"{error}\n", 503, media_type="text/plain", headers={"Retry-After": "3"})
        return Response(page, media_type="text/html; charset=utf-8", headers={"ETag": tag})

    return localweb.Guard(inner, keys, shown.csp)
