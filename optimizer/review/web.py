"""`optimize review --web`: the queue of knowledge entries and parked patches as local pages with forms.

Every decision goes through the functions of the terminal's review (queue.py, parked.py). Pages are drawn on the
server; without scripts everything still works. Not for: what a decision does, what stands behind an entry
(evidence.py), or who may open a page (localweb.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse

from optimizer import localweb
from optimizer.knowledge.blueprint import BLUEPRINT, BlueprintError, Scope, Status
from optimizer.ledger import LedgerBroken, LedgerBusy
from optimizer.review import page as review_page
from optimizer.review import parked
from optimizer.review import queue as review
from optimizer.review.parked import Parked
from optimizer.review.queue import Item, ReviewError
from reports import html

TEMPLATES = Path(__file__).resolve().parent / "templates"
CSP = (
    "default-src 'none'; style-src 'self'; style-src-attr 'unsafe-inline'; script-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_NUMBERS = ("tp", "batch")  # fields of a scope that hold whole numbers
_REFUSALS = (ReviewError, BlueprintError, LedgerBusy, LedgerBroken)


class NotWaiting(Exception):
    """No such entry or patch is in the queue; it may have been decided on."""


class Desk:
    """The queue as it was last read, and what the person did since the server started."""

    def __init__(self, runs: Path, folder: Path, reviewer: str | None) -> None:
        self.runs, self.folder = runs, folder
        self.reviewer = reviewer or review.whoami(folder if folder.is_dir() else Path.cwd())
        self.lock = threading.RLock()  # one decision at a time; figures and git are not made for more
        self.items: list[Item] = []
        self.parked: list[Parked] = []
        self.said: list[str] = []  # shown once

    def refresh(self) -> None:
        found = review.queue(self.runs, self.folder)
        self.items = sorted(found, key=lambda i: i.entry.status is Status.IMPORTED)  # as the page groups them
        self.parked = parked.waiting(self.runs)

    def order(self) -> list[str]:
        """Paths of everything that waits, as the queue shows it."""
        return [*(path_of_parked(p) for p in self.parked), *(path_of(i) for i in self.items)]

    def neighbours(self, path: str) -> tuple[str | None, str | None]:
        order = self.order()
        at = order.index(path) if path in order else -1
        if at < 0:
            return None, None
        return (order[at - 1] if at else None), (order[at + 1] if at + 1 < len(order) else None)

    def item(self, entry_id: str) -> Item:
        for fresh in (False, True):
            if fresh:
                self.refresh()
            found = next((i for i in self.items if i.entry.id == entry_id), None)
            if found is not None:
                return found
        raise NotWaiting(f"No entry {entry_id!r} waits for a decision.")

    def patch(self, run: str, attempt: int) -> Parked:
        for fresh in (False, True):
            if fresh:
                self.refresh()
            found = next((p for p in self.parked if p.run.name == run and p.attempt == attempt), None)
            if found is not None:
                return found
        raise NotWaiting(f"No parked patch {attempt} of run {run!r} waits for a decision.")

    def tell(self) -> list[str]:
        said, self.said = self.said, []
        return said


def path_of(item: Item) -> str:
    return f"/entry/{quote(item.entry.id, safe='')}"


def path_of_parked(item: Parked) -> str:
    return f"/parked/{quote(item.run.name, safe='')}/{item.attempt}"


def decide_entry(desk: Desk, item: Item, form: dict[str, str]) -> str:
    """Accept or reject as the form says; returns what to tell the person. Raises one of _REFUSALS."""
    reason = form.get("reason", "").strip()
    if form.get("decision") == "accept":
        scope = changed_scope(item, form)
        done = review.accept(item, desk.reviewer, reason or None, scope, desk.folder)
        return f"Accepted {done.id}" + (f", scope changed: {', '.join(scope)}" if scope else "") + "."
    if form.get("decision") == "reject":
        done = review.reject(item, reason, desk.reviewer, desk.folder)
        return f"Rejected {done.id}."
    raise ReviewError("press one of the buttons: accept or reject")


def changed_scope(item: Item, form: dict[str, str]) -> dict[str, list[Any]]:
    """Fields of the scope that the person wrote anew. Raises ReviewError when a number is none."""
    found: dict[str, list[Any]] = {}
    for name in Scope.model_fields:
        if f"scope.{name}" not in form:
            continue
        words = [w.strip() for w in form[f"scope.{name}"].split(",") if w.strip()]
        values: list[Any] = [int(w) if name in _NUMBERS and w.isdigit() else w for w in words]
        if name in _NUMBERS and values != ["any"] and not all(isinstance(v, int) for v in values):
            raise ReviewError(f"scope.{name}: write whole numbers, or any")
        if values != list(getattr(item.entry.scope, name)):
            found[name] = values
    return found


def decide_parked(desk: Desk, item: Parked, form: dict[str, str]) -> str:
    if form.get("decision") not in (parked.ADMIT, parked.DROP):
        raise ReviewError("press one of the buttons: admit or drop")
    keep = form["decision"] == parked.ADMIT
    commit = parked.decide(item, keep, form.get("reason", ""), desk.reviewer)
    what = f"`optimize resume {item.run.name}` judges it again" if keep else "it stays out"
    return f"{'Admitted' if keep else 'Dropped'} attempt {item.attempt} of run {item.run.name} (commit {commit[:12]}); {what}."


class Pages:
    """What each address answers."""

    def __init__(self, desk: Desk, keys: localweb.Keys) -> None:
        self.desk, self.keys = desk, keys
        self.env = html.environment(TEMPLATES)

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        about = {"csrf": self.keys.csrf, "reviewer": self.desk.reviewer, "said": self.desk.tell()}
        text = self.env.get_template(template).render(**about, **values)
        return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")

    def gone(self, request: Request, error: Exception) -> Response:
        return self.page("review_gone.html.j2", 404, why=str(error))

    def queue(self) -> Response:
        desk = self.desk
        with desk.lock:
            desk.refresh()
            view = review_page.queue(desk.items, desk.parked, desk.folder, path_of, path_of_parked)
            return self.page("review_queue.html.j2", view=view)

    def entry(self, entry_id: str) -> Response:
        with self.desk.lock:
            return self._entry(self.desk.item(entry_id))

    def _entry(self, item: Item, status: int = 200, error: str = "", form: dict[str, str] | None = None) -> Response:
        view = review_page.entry(item, self.desk.folder)
        return self._one("review_entry.html.j2", path_of(item), status, view=view, error=error, form=form or {})

    def parked(self, run: str, attempt: int) -> Response:
        with self.desk.lock:
            return self._parked(self.desk.patch(run, attempt))

    def _parked(self, item: Parked, status: int = 200, error: str = "", form: dict[str, str] | None = None) -> Response:
        view = review_page.parked(item)
        return self._one("review_parked.html.j2", path_of_parked(item), status, view=view, error=error, form=form or {})

    def _one(self, template: str, here: str, status: int, **values: Any) -> Response:
        before, after = self.desk.neighbours(here)
        return self.page(template, status, here=here, previous=before, next=after, **values)

    async def decide_entry(self, entry_id: str, request: Request) -> Response:
        def then(form: dict[str, str]) -> Response:
            item = self.desk.item(entry_id)
            return self._decide(path_of(item), form, decide_entry, item, self._entry)

        return await self._form(request, then)

    async def decide_parked(self, run: str, attempt: int, request: Request) -> Response:
        def then(form: dict[str, str]) -> Response:
            item = self.desk.patch(run, attempt)
            return self._decide(path_of_parked(item), form, decide_parked, item, self._parked)

        return await self._form(request, then)

    async def _form(self, request: Request, then: Callable[[dict[str, str]], Response]) -> Response:
        try:
            form = localweb.read_form(await localweb.body(request), self.keys)
        except localweb.BadForm as error:
            return self.page("review_gone.html.j2", 403, why=str(error))
        return await run_in_threadpool(then, form)

    def _decide(self, here: str, form: dict[str, str], decision: Callable[..., str], item: Any, again: Callable[..., Response]) -> Response:
        """The decision, then what comes next in the queue; the same page with the reason where it was refused."""
        desk = self.desk
        with desk.lock:
            try:
                said = decision(desk, item, form)
            except _REFUSALS as error:
                return again(item, 409, str(error), form)
            _, after = desk.neighbours(here)
            desk.said.append(said)
            desk.refresh()
            return RedirectResponse(after if after in desk.order() else "/", 303)

    def entry_patch(self, entry_id: str) -> Response:
        return plain(self.desk.item(entry_id).entry.patch or "")

    def parked_patch(self, run: str, attempt: int) -> Response:
        return plain(parked.diff(self.desk.patch(run, attempt)))

    def style(self) -> Response:
        return Response(html.style() + (TEMPLATES / "review.css").read_text("utf-8"), media_type="text/css")

    def script(self) -> Response:
        return Response((TEMPLATES / "review.js").read_text("utf-8"), media_type="text/javascript")


def app(runs: Path, keys: localweb.Keys, folder: Path = BLUEPRINT, reviewer: str | None = None) -> localweb.Guard:
    """The web application over a folder of runs and a blueprint."""
    pages = Pages(Desk(runs, folder, reviewer), keys)
    inner = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    inner.add_exception_handler(NotWaiting, pages.gone)
    for path, answer in (
        ("/", pages.queue),
        ("/entry/{entry_id}", pages.entry),
        ("/entry/{entry_id}/patch", pages.entry_patch),
        ("/parked/{run}/{attempt}", pages.parked),
        ("/parked/{run}/{attempt}/patch", pages.parked_patch),
        ("/style.css", pages.style),
        ("/review.js", pages.script),
    ):
        inner.add_api_route(path, answer, methods=["GET"], response_model=None)
    inner.add_api_route("/entry/{entry_id}", pages.decide_entry, methods=["POST"], response_model=None)
    inner.add_api_route("/parked/{run}/{attempt}", pages.decide_parked, methods=["POST"], response_model=None)
    return localweb.Guard(inner, keys, CSP)


def plain(text: str) -> Response:
    """A whole patch as text; never as a page."""
    return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8")
