"""Review in a real browser: hostile entries run nothing, and everything can be done with the keyboard."""

from __future__ import annotations

import browser
import pytest
import review_desk

from optimizer import localweb
from optimizer.knowledge.blueprint import Blueprint, Status
from optimizer.review import web as review_web

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """(page, address, place, noise): one browser page on one server; noise collects whatever went wrong in it."""
    place = review_desk.build(tmp_path_factory.mktemp("desk"))
    keys, listener = localweb.Keys(), localweb.bind()
    app = review_web.app(place.runs, keys, place.blueprint)
    with browser.chromium() as chromium, browser.served(app, listener) as address:
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        noise: list[str] = []
        page.on("console", lambda m: noise.append(m.text))
        page.on("pageerror", lambda e: noise.append(str(e)))
        page.on("dialog", lambda d: noise.append(f"dialog {d.message}"))
        page.on("request", lambda r: noise.append(f"asked for {r.url}") if not r.url.startswith((address, "data:", "about:")) else None)
        page.goto(f"{address}/?token={keys.token}")
        assert keys.token not in page.url, "the key does not stay in the address bar"
        yield page, address, place, noise


def test_a_hostile_entry_runs_nothing_and_fits_the_window(desk):
    page, address, _, noise = desk
    for width in (1366, 800):
        page.set_viewport_size({"width": width, "height": 768})
        for path in ("/", "/entry/hostile.entry"):
            page.goto(f"{address}{path}")
            assert page.evaluate("window.pwned") is None and not page.query_selector("main img, main script")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} at {width}"
    page.set_viewport_size({"width": 1366, "height": 768})
    page.keyboard.press("o")  # opens the huge file too
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    assert page.locator("table.diff tr").count() < 1500
    assert noise == []


def test_an_injected_script_would_not_run_either(desk):
    page, address, _, noise = desk
    page.goto(f"{address}/entry/hostile.entry")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned=1\"><style>body{display:none}</style>')")
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None and page.is_visible("h1")
    assert noise and all("Content Security Policy" in text or "404" in text for text in noise)
    page.goto("about:blank")  # what is still on its way comes before the next test
    page.wait_for_timeout(200)
    noise.clear()


def test_the_queue_is_walked_and_an_entry_rejected_by_keys_alone(desk):
    page, address, place, noise = desk
    page.goto(address)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.getAttribute('href')")
    assert focused == "/entry/20260101-win.1"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus must be seen"
    page.keyboard.press("Enter")
    page.wait_for_url("**/entry/20260101-win.1")
    page.keyboard.press("j")
    page.wait_for_url("**/entry/20260101-win.2")
    page.keyboard.press("a")
    assert page.evaluate("document.activeElement.value") == "accept" and page.url.endswith("win.2"), "a key never decides"
    page.keyboard.press("r")
    page.keyboard.type("no effect, as it says; jak")  # letters in a field are letters
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "reject"
    page.keyboard.press("Enter")
    page.wait_for_url("**/entry/hostile.entry")
    assert "Rejected 20260101-win.2." in page.inner_text("[role=status]")
    entry = Blueprint.load(place.blueprint).get("20260101-win.2")
    assert entry.status is Status.REJECTED and entry.reason == "no effect, as it says; jak"
    assert noise == []


def test_the_step_before_and_after_is_drawn_where_the_traces_are(desk):
    page, address, _, noise = desk
    page.goto(f"{address}/entry/20260101-win.1")
    spans = page.locator("svg.timeline rect")
    assert spans.count() > 8 and page.locator("svg.timeline title").first.text_content()
    box = page.locator("svg.timeline").bounding_box()
    assert box and box["width"] > 700 and page.locator(".decide").bounding_box()["y"] < 768, "the form is on the first screen"
    assert noise == []
