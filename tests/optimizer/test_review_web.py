"""Review in the browser: who gets in, what a decision leaves behind, and that nothing a stranger wrote gets out of its box."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import review_desk
from review_desk import LONG, XSS, Place
from starlette.testclient import TestClient

from optimizer import cli, localweb, state
from optimizer.knowledge.blueprint import Blueprint, Evidence, Status
from optimizer.ledger import Ledger
from optimizer.review import diff_view, parked
from optimizer.review import evidence as review_evidence
from optimizer.review import queue as review
from optimizer.review import web as review_web
from optimizer.review.evidence import Interval

WIN, PARKED = "/entry/20260101-win.1", "/parked/20260102-parked/1"
SCOPE = {f"scope.{n}": "any" for n in ("tp", "batch")} | {f"scope.{n}": "x" for n in ("engine", "engine_version", "model", "mode", "device", "dtype", "torch")}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("review")
    review_desk.build(home)
    return home


@pytest.fixture
def place(built, tmp_path) -> Place:
    home = tmp_path / "desk"
    shutil.copytree(built, home)
    return Place(home / "runs", home / "repo" / "skills" / "blueprint", home / "repo")


@pytest.fixture
def keys() -> localweb.Keys:
    return localweb.Keys()


@pytest.fixture
def stranger(place, keys) -> TestClient:
    return TestClient(review_web.app(place.runs, keys, place.blueprint), base_url="http://127.0.0.1:8000", follow_redirects=False)


@pytest.fixture
def person(stranger, keys) -> TestClient:
    """A browser that opened the link."""
    assert stranger.get("/", params={"token": keys.token}).status_code == 303
    return stranger


def ledger(place: Place, run: str) -> list[dict]:
    return Ledger(place.runs / run / "ledger.jsonl").lines()


# -- who gets in ------------------------------------------------------------------------------------------------


def test_without_the_link_nobody_sees_anything(stranger):
    for path in ("/", WIN, PARKED, "/style.css", f"{WIN}/patch"):
        assert stranger.get(path).status_code == 403
    assert stranger.get("/", params={"token": "guess"}).status_code == 403


def test_another_name_for_this_machine_is_refused_even_with_the_key(stranger, keys):
    assert stranger.get("/", params={"token": keys.token}, headers={"host": "evil.example:8000"}).status_code == 421
    assert stranger.get("/", params={"token": keys.token}, headers={"host": "localhost:9999"}).status_code == 303, "a tunnel"


def test_the_key_becomes_a_cookie_that_other_sites_cannot_send(stranger, keys):
    answer = stranger.get(WIN, params={"token": keys.token, "a": "b c"})
    assert answer.headers["location"] == f"{WIN}?a=b+c"
    cookie = answer.headers["set-cookie"]
    assert "SameSite=Strict" in cookie and "HttpOnly" in cookie and keys.token not in cookie


@pytest.mark.parametrize("path", ["//evil.example/", "/%2F%2Fevil.example", "/x%0d%0aSet-Cookie:a=b", "/%5C%5Cevil.example"])
def test_letting_in_never_leads_elsewhere(stranger, keys, path):
    answer = stranger.get(f"http://127.0.0.1:8000{path}?token={keys.token}")
    assert re.fullmatch(r"/[^/\\\s][^\\\s]*", answer.headers["location"])


def test_pages_forbid_what_they_do_not_need(person):
    answer = person.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    assert not re.search(r"<script(?! src=\"/review\.js\")|<style|https?://(?!127)", answer.text)


def test_a_form_without_its_secret_decides_nothing(person, place, keys):
    body = {"decision": "reject", "reason": "no"}
    assert person.post(WIN, data=body).status_code == 403
    assert person.post(WIN, data={**body, "csrf": "x"}).status_code == 403
    good = {**body, "csrf": keys.csrf}
    assert person.post(WIN, data=good, headers={"origin": "http://127.0.0.1:8001"}).status_code == 403
    assert person.post(WIN, data={**good, "pad": "x" * (300 << 10)}).status_code == 403
    assert not [x for x in ledger(place, "20260101-win") if x["kind"] == "reviewed"]
    assert person.post(WIN, data=good, headers={"origin": "http://127.0.0.1:8000"}).status_code == 303


@pytest.mark.parametrize(
    "argv", [["review", "--web", "--runs", "{runs}", "--blueprint", "{blueprint}", "--reviewer", "Eve"], ["report", "--serve", "--runs", "{runs}", "2026"]]
)
def test_the_command_prints_one_link_and_serves_this_machine_only(place, monkeypatch, capsys, argv):
    seen = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: seen.append((self.config.app, sockets[0].getsockname())))
    shutil.rmtree(place.runs / "20260102-parked")
    given = [a.format(runs=place.runs, blueprint=place.blueprint) for a in argv]
    monkeypatch.setattr("sys.argv", ["optimize", *given])
    with pytest.raises(SystemExit) as end:
        cli.main()
    [(app, (host, port))] = seen
    link = re.fullmatch(rf"open (http://127\.0\.0\.1:{port}/)\?token=(\S{{32}}) \(Ctrl-C ends it\)\n", capsys.readouterr().out)
    assert not end.value.code and host == "127.0.0.1" and link
    browser = TestClient(app, base_url=link[1].rstrip("/"))
    assert browser.get("/").status_code == 403 and browser.get("/", params={"token": link[2]}).status_code == 200


def test_a_port_that_is_taken_is_one_line(place, monkeypatch, capsys):
    with localweb.bind() as taken:
        monkeypatch.setattr("sys.argv", ["optimize", "review", "--web", "--port", str(taken.getsockname()[1]), "--runs", str(place.runs)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# -- decisions ----------------------------------------------------------------------------------------------------


def test_the_queue_holds_everything_that_waits(person):
    text = person.get("/").text
    order = [text.index(f'href="{p}"') for p in (PARKED, WIN, "/entry/20260101-win.2", "/entry/hostile.entry", "/entry/elsewhere.O1_inference_mode")]
    assert order == sorted(order) and "5 decisions wait" in text and "Ada Reviewer" in text


def test_accepting_with_a_scope_is_a_commit_and_a_ledger_line(person, place, keys):
    answer = person.post(WIN, data={"csrf": keys.csrf, "decision": "accept", "reason": "seen twice", **SCOPE})
    assert answer.status_code == 303 and answer.headers["location"] == "/entry/20260101-win.2"
    entry = Blueprint.load(place.blueprint).get("20260101-win.1")
    assert entry.status is Status.ACCEPTED and entry.reviewer == "Ada Reviewer" and entry.scope.tp == ["any"] and entry.scope.torch == ["x"]
    log = place.git("log", "-1", "--format=%an|%s|%b")
    assert log.startswith("Ada Reviewer|Accept knowledge 20260101-win.1|") and "seen twice" in log
    line = ledger(place, "20260101-win")[-1]
    assert line["kind"] == "reviewed" and line["data"]["entry"] == entry.id and f"Ledger-hash: {line['hash']}" in log
    following = person.get("/")
    assert "Accepted 20260101-win.1" in following.text and f'href="{WIN}"' not in following.text
    assert "Accepted 20260101-win.1, scope" not in person.get("/").text, "said once"


def test_what_the_validator_blocks_is_refused_with_its_words_and_what_was_typed(person, place, keys):
    head = place.git("rev-parse", "HEAD")
    answer = person.post("/entry/elsewhere.O1_inference_mode", data={"csrf": keys.csrf, "decision": "accept", "reason": "my words"})
    assert answer.status_code == 409 and "cannot be accepted" in answer.text and "my words" in answer.text
    assert place.git("rev-parse", "HEAD") == head and not place.git("status", "--porcelain")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"decision": "reject", "reason": "  "}, "a rejection needs a reason"),
        ({"decision": "accept", **SCOPE, "scope.tp": "four"}, "scope.tp: write whole numbers, or any"),
        ({"reason": "?"}, "press one of the buttons"),
    ],
)
def test_a_form_that_decides_nothing_says_why(person, keys, form, words):
    answer = person.post(WIN, data={"csrf": keys.csrf, **form})
    assert answer.status_code == 409 and words in answer.text


def test_a_rejected_entry_stays_on_file_with_its_reason(person, place, keys):
    assert person.post("/entry/hostile.entry", data={"csrf": keys.csrf, "decision": "reject", "reason": XSS}).status_code == 303
    assert Blueprint.load(place.blueprint).get("hostile.entry").reason == XSS
    text = person.get("/").text
    assert "Decided" in text and "&lt;script&gt;" in text and "<script>window" not in text


def test_what_was_decided_meanwhile_is_gone_not_decided_twice(person, place, keys):
    person.get("/")
    item = review.find(review.queue(place.runs, place.blueprint), "hostile.entry")
    review.reject(item, "in the terminal", "Bob", place.blueprint)
    person.get("/")
    answer = person.post("/entry/hostile.entry", data={"csrf": keys.csrf, "decision": "reject", "reason": "again"})
    assert answer.status_code == 404 and Blueprint.load(place.blueprint).get("hostile.entry").reviewer == "Bob"
    for path in ("/entry/nothing", "/parked/nothing/1", "/parked/20260102-parked/9"):
        assert person.get(path).status_code == 404


def test_an_admitted_patch_waits_to_be_judged_again(person, place, keys):
    answer = person.post(PARKED, data={"csrf": keys.csrf, "decision": "admit", "reason": "the trace is known to miss it"})
    assert answer.status_code == 303 and answer.headers["location"] == WIN
    lines = ledger(place, "20260102-parked")
    assert lines[-1]["kind"] == "reviewed" and lines[-1]["data"]["decision"] == "admit" and state.waiting(lines) == 1
    git = ("--git-dir", str(place.runs / "20260102-parked" / "repo.git"))
    shown = place.git(*git, "show", "reviewed/1")
    assert "+STEP_US = 700" in shown and "Reviewed-by: Ada Reviewer" in shown
    assert PARKED not in person.get("/").text


def test_a_dropped_patch_leaves_a_commit_without_change(person, place, keys):
    refused = person.post(PARKED, data={"csrf": keys.csrf, "decision": "drop", "reason": ""})
    assert refused.status_code == 409 and "needs a reason" in refused.text
    assert person.post(PARKED, data={"csrf": keys.csrf, "decision": "drop", "reason": "cannot be right"}).status_code == 303
    lines = ledger(place, "20260102-parked")
    assert lines[-1]["data"]["decision"] == "drop" and state.waiting(lines) is None
    git = ("--git-dir", str(place.runs / "20260102-parked" / "repo.git"))
    assert not place.git(*git, "show", "--format=", "reviewed/1")
    assert parked.waiting(place.runs) == []


def test_a_run_that_is_working_is_not_interrupted(person, place, keys):
    head = place.git("rev-parse", "HEAD")
    for path, run, form in (
        (PARKED, "20260102-parked", {"decision": "drop"}),
        (PARKED, "20260102-parked", {"decision": "admit"}),
        (WIN, "20260101-win", {"decision": "accept", **SCOPE}),
    ):
        held = Ledger(place.runs / run / "ledger.jsonl")
        held.append("budget", None, {})
        answer = person.post(path, data={"csrf": keys.csrf, "reason": "now", **form})
        assert answer.status_code == 409 and re.search("being written by another process|still going", answer.text)
        held.close()
    assert place.git("rev-parse", "HEAD") == head and not place.git("status", "--porcelain")
    assert len(parked.waiting(place.runs)) == 1


# -- what a stranger wrote ------------------------------------------------------------------------------------------


def test_hostile_text_stays_text(person):
    text = person.get("/entry/hostile.entry").text
    assert "<img" not in text and "<script>" not in text.replace('<script src="/review.js" defer></script>', "")
    assert "{{ 7 * 7 }}" in text and "root:" not in text, "templates are not expanded, files not read"
    assert "</textarea></title>" not in text and len(text) < 400_000
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x00]", text)


def test_a_patch_says_what_it_does_not_show(person):
    text = person.get("/entry/hostile.entry").text
    assert "U+202E RIGHT-TO-LEFT OVERRIDE" in text and "invisible or change direction" in text
    assert "9,606 more characters" in text and "4,402 more lines are not shown" in text and "outside ASCII" in text
    assert re.search(r"<details class=\"file\"><summary><code>engine/huge.py", text), "a huge file is folded"
    whole = person.get("/entry/hostile.entry/patch")
    assert whole.headers["content-type"].startswith("text/plain") and whole.headers["x-content-type-options"] == "nosniff"
    assert LONG in whole.text and "line 4999" in whole.text


def test_a_trace_counts_as_evidence_only_while_it_is_the_one_that_was_recorded(person, place):
    text = person.get(WIN).text
    assert text.count("as recorded") == 2 and '<svg class="timeline"' in text and "after: 700 us" in text
    trace = place.runs / "20260101-win" / "traces" / "1" / "rank0.json.gz"
    trace.write_bytes(trace.read_bytes() + b" ")
    text = person.get(WIN).text
    assert text.count("as recorded") == 1 and "differs" in text and "after: 700 us" not in text


def test_an_entry_cannot_point_outside_its_run(place):
    entry = review_desk.hostile().model_copy(update={"evidence": Evidence(traces={"before: traces/../run.json": "0" * 64, "x": "1" * 64})})
    found = review_evidence.traces(entry, place.runs / "20260101-win")
    assert [f.state for f in found] == ["not on this machine"] * 2 and [f.path for f in found] == [None] * 2


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_diff_keeps_its_line_numbers_and_is_not_fooled_by_lines_that_look_like_heads():
    text = diff_view.between({"a.py": "one\ntwo\nthree"}, {"a.py": "one\n++ b/x\nthree", "b.py": "new\n"})
    shown = diff_view.view(text)
    assert [(f.name, f.added, f.deleted) for f in shown.files] == [("a.py", 1, 1), ("b.py", 1, 0)]
    lines = [(x.kind, x.old, x.new, "".join(p.text for p in x.pieces)) for x in shown.files[0].lines if x.kind in ("add", "del", "same")]
    assert lines == [("same", 1, 1, "one"), ("del", 2, None, "two"), ("add", None, 2, "++ b/x"), ("same", 3, 3, "three")]
    assert shown.warnings == ()


def test_a_plain_diff_has_file_names_too_and_windows_line_ends_are_no_alarm():
    plain = "--- a/x.py\r\n+++ b/x.py\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n--- old/y.py\t2026\n+++ new/y.py\t2026\n@@ -1,2 +1,2 @@\n \n--- gone\n+++ come\n"
    shown = diff_view.view(plain)
    assert [(f.name, f.added, f.deleted) for f in shown.files] == [("x.py", 1, 1), ("new/y.py", 1, 1)]
    assert "".join(p.text for p in shown.files[1].lines[-1].pieces) == "++ come" and shown.warnings == ()
    lying = diff_view.view("diff --git a/a b/a\n@@ -1,99999 +1,99999 @@\n-x\ndiff --git a/b b/b\n@@ -1 +1 @@\n+y\n")
    assert [(f.name, f.added, f.deleted) for f in lying.files] == [("a", 0, 1), ("b", 1, 0)]
    words = diff_view.view("not a diff\nat all")
    assert [(f.name, len(f.lines)) for f in words.files] == [("(no file named)", 2)]


def test_many_files_are_counted_not_drawn():
    text = "".join(f"diff --git a/{n} b/{n}\n@@ -0,0 +1,1 @@\n+x\n" for n in range(200))
    shown = diff_view.view(text)
    assert len(shown.files) == diff_view.FILES and shown.left_out_files == 140 and "140 file(s) are left out" in shown.warnings[0]


def test_an_axis_holds_no_change_the_margin_and_every_interval():
    bars = [Interval("a", 1.4, 1.3, 1.5, ""), Interval("b", 0.98, None, None, "")]
    drawn = review_evidence.chart(bars, margin=0.02)
    assert drawn is not None and drawn.margin is not None and drawn.zero < drawn.margin < drawn.bars[0].low < drawn.bars[0].mid < drawn.bars[0].high <= 100
    assert drawn.bars[1].mid < drawn.zero and any(text == "0 %" for _, text in drawn.ticks)
    assert review_evidence.chart([]) is None
