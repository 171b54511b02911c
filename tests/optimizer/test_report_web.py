"""A report that follows a running loop: drawn anew when the ledger grows, untouched otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import browser
import pytest
from build_run import PLANS, LedgerBuilder, build_run
from starlette.testclient import TestClient

from optimizer import localweb, report_web
from reports import html


def go_on(run: Path) -> LedgerBuilder:
    """A writer that appends to the ledger that `build_run` left."""
    text = (run / "ledger.jsonl").read_text("utf-8")
    ledger = LedgerBuilder(run / "ledger.jsonl")
    ledger.path.write_text(text, "utf-8")
    ledger.seq = len(text.splitlines())
    ledger.prev = re.findall(r'"hash":"(\w{64})"', text)[-1]
    return ledger


@pytest.fixture
def run(tmp_path) -> Path:
    return build_run(tmp_path / "run", plans=PLANS[:2], finished=False, traces=False)


def client(run: Path) -> TestClient:
    keys = localweb.Keys()
    found = TestClient(report_web.app(run, keys), base_url="http://127.0.0.1", follow_redirects=True)
    assert found.get("/").status_code == 403
    assert found.get("/", params={"token": keys.token}).status_code == 200
    return found


def test_the_page_grows_with_the_ledger_and_is_not_sent_twice(run):
    page = client(run)
    first = page.get("/")
    assert "2 attempts so far; the next one follows" in first.text and "The run has not finished" not in first.text and "Run 2026" in first.text
    assert page.get("/", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    ledger = go_on(run)
    ledger.add("proposed", {"patch_sha": "1" * 64, "ast_hash": "k", "finding_ids": ["x"], "mechanism": "new<b>", "predicted_us": 1.0,
                            "per": "token", "proposer": "playbook", "usd": 0.0}, 3)  # fmt: skip
    ledger.add("pair", {"stage": "screen", "index": 0, "order": "ab", "prompts_sha": "", "a_us_per_token": 2.0, "b_us_per_token": 1.0,
                        "discarded": None, "key": "k"}, 3)  # fmt: skip
    second = page.get("/", headers={"if-none-match": first.headers["etag"]})
    assert second.status_code == 200 and "attempt 3, new&lt;b&gt;: screening, 1 pair so far" in second.text
    assert 'class="tag open"' in second.text and "new<b>" not in second.text
    ledger.add("finished", {"reason": "budget spent"})
    third = page.get("/").text
    assert 'class="ended"' in third and "finished: budget spent" in third


def test_a_run_that_is_torn_or_not_there_yet_still_answers(run, tmp_path):
    with (run / "ledger.jsonl").open("a") as out:
        out.write('{"kind": "pai')
    assert "unreadable ledger line" in client(run).get("/").text
    keys = localweb.Keys()
    empty = TestClient(report_web.app(tmp_path, keys), base_url="http://127.0.0.1")
    answer = empty.get("/", params={"token": keys.token})
    assert answer.status_code == 503 and "no such file" in answer.text


def test_the_page_shows_what_the_written_report_shows(run, tmp_path):
    served = client(run).get("/").text
    written = html.run_report(run, tmp_path / "out").read_text("utf-8")
    rows = [re.findall(r"<tr>.*?</tr>", text, re.S) for text in (served, written)]
    assert rows[0] and rows[0] == rows[1]
    assert "<script" not in written and "live" not in re.sub(r"<style>.*?</style>", "", written, flags=re.S)


@pytest.mark.browser
def test_an_open_page_follows_the_ledger_and_keeps_what_was_opened(run):
    keys, listener = localweb.Keys(), localweb.bind()
    with browser.chromium() as chromium, browser.served(report_web.app(run, keys), listener) as address:
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        noise: list[str] = []
        page.on("pageerror", lambda e: noise.append(str(e)))
        page.on("console", lambda m: noise.append(m.text) if "favicon" not in m.text and "404" not in m.text else None)
        page.goto(f"{address}/?token={keys.token}")
        page.locator("main details summary").first.click()
        page.evaluate("scrollTo(0, 300)")
        go_on(run).add("finished", {"reason": "goal reached"})
        page.wait_for_selector("#live.ended", timeout=20_000)
        assert "finished: goal reached" in page.inner_text("#live") and "ago" in page.inner_text("#live time")
        assert page.evaluate("document.querySelector('main details').open") and page.evaluate("scrollY") == 300
        assert "goal reached" in page.inner_text("main"), "the page itself is new, too"
        assert noise == []
