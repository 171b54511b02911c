"""The Claude proposer against a local server: what it submits, what it costs, and what it does when things go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages_server import Api, Cut, MidError, Slow, serve, text, tools
from messages_server import Status as Http

from optimizer.patching import apply_edits
from optimizer.proposers import Budget, Declined, ProposeContext, get, settings
from optimizer.proposers.meter import CapReached, Meter, Prices
from optimizer.types import Series
from trace_diff.types import Finding, Status

SOURCES = {"engine/a.py": "import torch\n\n\ndef step(x):\n    y = x.item()\n    return y\n"}
FOUND = Finding("host-reads", "host-reads", Status.FOUND, "reads", bound_us=50.0, skills=("remove-host-reads",))
KEY = "sk-ant-test-0123456789abcdef"


def patch(**change: Any) -> dict[str, Any]:
    whole = {
        "edits": [{"file": "engine/a.py", "old": "    y = x.item()\n    return y\n", "new": "    return x\n"}],
        "functions": [],
        "finding_ids": ["host-reads"],
        "mechanism": "Remove Host Reads",
        "title": "no read",
        "predicted_us": 40.0,
        "per": "token",
        "risk": "none",
        "invariants": ["tokens"],
    }
    return whole | change


SUBMIT = tools(("submit_patch", {"patches": [patch()]}))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE", "ANTHROPIC_CONFIG_DIR", "ANTHROPIC_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(api: Api, tmp_path: Path, budget: Budget | None = None, note: Any = None, **options: Any) -> Series | Declined:
    waits: list[float] = []
    given = {"model": "test", "usd_in": 3.0, "usd_out": 15.0, "base_url": api.url, "sleep": waits.append}
    proposer = get("claude", **(given | options))
    answer = proposer.propose(ProposeContext(SOURCES, [FOUND], budget=budget or Budget(), exchanges=tmp_path, attempt=1, note=note))
    proposer.waits = waits  # type: ignore[attr-defined]
    ask.waits = waits  # type: ignore[attr-defined]
    return answer


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "1-claude.jsonl").read_text().splitlines()]


def test_it_looks_tries_and_submits_a_series_with_its_cost(tmp_path: Path) -> None:
    looks = tools(("list_findings", {}), ("read_code", {"file": "engine/a.py", "first_line": 1, "last_line": 0}), ("search_code", {"pattern": "item"}))
    tries = tools(("dry_run", {"edits": patch()["edits"], "functions": []}))
    with serve(looks, tries, SUBMIT) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Series) and answer.proposer == "claude"
    assert apply_edits(SOURCES, answer.patches[0])["engine/a.py"].endswith("    return x\n")
    assert answer.patches[0].mechanism == "remove-host-reads" and answer.patches[0].predicted_us == 40.0
    assert answer.usd == pytest.approx(3 * (1000 * 3 + 100 * 15) / 1e6)
    assert answer.exchange == "1-claude.jsonl"
    headers, body = api.requests[0]
    assert "temperature" not in body and all(t["strict"] for t in body["tools"]) and headers["anthropic-version"]
    results = api.requests[1][1]["messages"][-1]["content"]
    assert [r["tool_use_id"] for r in results] == ["toolu_0_list_findings", "toolu_1_read_code", "toolu_2_search_code"]
    assert "engine/a.py:5: y = x.item()" in results[2]["content"]


def test_a_bad_edit_comes_back_with_the_nearest_lines_and_then_with_functions(tmp_path: Path) -> None:
    wrong = tools(("submit_patch", {"patches": [patch(edits=[{"file": "engine/a.py", "old": "    y = x.item()  # read\n", "new": ""}])]}))
    by_name = [{"file": "engine/a.py", "name": "step", "source": "def step(x):\n    return x\n"}]
    right = tools(("submit_patch", {"patches": [patch(edits=[], functions=by_name)]}))
    with serve(wrong, wrong, right) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Series)
    first, second = (api.requests[n][1]["messages"][-1]["content"][0] for n in (1, 2))
    assert first["is_error"] and "    5      y = x.item()" in first["content"] and "qualified name" not in first["content"]
    assert "qualified name" in second["content"] and '"step"' in second["content"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predicted_us": 60.0}, "above the bound of 50 us"),
        ({"finding_ids": ["nothing"]}, "no finding 'nothing'"),
        ({"edits": [{"file": "engine/a.py", "old": "import torch\n", "new": "import torch\nimport subprocess\n"}]}, "starts processes"),
        ({"edits": [{"file": "engine/b.json", "old": "", "new": "{}"}]}, "only .py files"),
        ({"edits": [{"file": "engine/b.py", "old": "", "new": "x = 1\n" * 130}]}, "130 changed lines"),
        ({"edits": []}, "changes nothing"),
    ],
)
def test_a_patch_that_a_gate_would_stop_is_refused_before_it_costs_an_attempt(change, message, tmp_path: Path) -> None:
    with serve(tools(("submit_patch", {"patches": [patch(**change)]})), text("DECLINE: enough")) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and "enough" in answer.why and answer.usd > 0
    assert message in api.requests[1][1]["messages"][-1]["content"][0]["content"]


def test_without_a_key_it_says_so_and_names_the_playbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve() as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and answer.final and "--agent playbook" in answer.why
    assert api.requests == []


def test_an_expired_key_ends_the_run_at_once(tmp_path: Path) -> None:
    with serve(Http(401)) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and answer.final and "401" in answer.why and len(api.requests) == 1


def test_overload_and_rate_limits_are_waited_out_and_a_server_that_asks_for_more_is_left(tmp_path: Path) -> None:
    with serve(Http(529), Http(429, {"retry-after": "7"}), MidError(), SUBMIT) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Series) and len(api.requests) == 4
    assert ask.waits == [1.0, 7.0, 4.0]  # type: ignore[attr-defined]
    with serve(Http(429, {"retry-after": "3600"})) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and not answer.final and "3600 s" in answer.why


@pytest.mark.parametrize("events", [3, 5])
def test_a_cut_stream_is_no_answer_but_is_paid(events: int, tmp_path: Path) -> None:
    with serve(Cut(SUBMIT, events), SUBMIT) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Series) and len(api.requests) == 2
    assert answer.usd > (1000 * 3 + 100 * 15) / 1e6 + 1000 * 3 / 1e6 - 1e-9
    cut = next(line for line in lines(tmp_path) if line["kind"] == "answer")
    assert cut["message"]["stop_reason"] is None and cut["usd"] > 0


def test_refusal_token_limit_and_silence_are_failures_with_a_cost(tmp_path: Path) -> None:
    with serve(text("", "refusal")) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and "refused" in answer.why and answer.usd > 0
    long = tools(("submit_patch", {"patches": [patch()]}), reason="max_tokens")
    with serve(long, long, long) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and "token limit" in answer.why
    assert "Be shorter" in json.dumps(api.requests[1][1]["messages"])
    assert len(api.requests[2][1]["messages"]) == 1  # the half-written call is not sent back
    with serve(*[text("hm")] * 3) as api:
        answer = ask(api, tmp_path)
    assert isinstance(answer, Declined) and "no patch was submitted" in answer.why


def test_caps_are_checked_before_a_request_is_sent(tmp_path: Path) -> None:
    with serve(SUBMIT) as api:
        for options, budget, word in (
            ({"max_usd": 0.05}, None, "USD cap"),
            ({}, Budget(usd=0.05), "USD cap"),
            ({"max_tokens": 5000}, None, "token cap"),
            ({"max_requests": 0}, None, "request cap"),
            ({"max_seconds": 0.0}, None, "time cap"),
            ({"usd_in": None, "usd_out": None, "max_usd": 1.0}, None, "no price is known"),
        ):
            answer = ask(api, tmp_path, budget, **options)
            assert isinstance(answer, Declined) and word in answer.why, options
        assert api.requests == []


def test_half_and_four_fifths_of_a_cap_are_said_once_live_and_in_the_record(tmp_path: Path) -> None:
    looks = tools(("list_findings", {}))
    said: list[str] = []
    with serve(*[looks] * 8, SUBMIT) as api:
        answer = ask(api, tmp_path, note=said.append, max_requests=10)
    assert isinstance(answer, Series)
    assert said == ["claude: 50% of the cap of 10 requests is used (5)", "claude: 80% of the cap of 10 requests is used (8)"]
    assert [line["text"] for line in lines(tmp_path) if line["kind"] == "warning"] == [text.removeprefix("claude: ") for text in said]


def test_writing_to_the_cache_is_counted_at_its_price_before_it_is_done() -> None:
    prices = Prices.of("test", 3.0, 15.0)
    plain, cached = Meter(prices, max_usd=0.0), Meter(prices, max_usd=0.0)
    for meter, hour in ((plain, 0), (cached, 250_000)):
        with pytest.raises(CapReached, match="USD cap") as caught:
            meter.before(250_000, 0, hour)
        assert f"could cost {0.3 if meter is plain else 0.6:.2f}" in str(caught.value)


def test_settings_come_from_options_then_environment_then_file(tmp_path: Path) -> None:
    file = tmp_path / "claude.json"
    file.write_text(json.dumps({"model": "in-file", "max_usd": 1.0, "max_requests": 7}))
    environ = {"ANTHROPIC_MODEL": "in-environment", "HOTLOOP_CLAUDE_MAX_USD": "2.5"}
    got = settings.read({"max_tokens": 9, "effort": None}, str(file), environ)
    assert (got.model, got.max_usd, got.max_requests, got.max_tokens, got.effort) == ("in-environment", 2.5, 7, 9, None)
    for options, content, match in (({"max_ usd": 1}, "{}", "known settings: model"), ({"max_usd": "much"}, "{}", "not a number"), ({}, '{"budget": 1}', "file .* sets 'budget'"), ({}, "[", "not a file of settings")):
        file.write_text(content)
        with pytest.raises(settings.SettingError, match=match):
            settings.read(options, str(file), {})


def test_a_price_table_of_ones_own_outweighs_the_dated_one(tmp_path: Path) -> None:
    table = tmp_path / "prices.json"
    table.write_text(json.dumps({"as_of": "today", "models": {"claude-opus-9": [1.0, 2.0]}}))
    own = Prices.of("claude-opus-9-1", table_file=table)
    assert own.as_of == "today" and own.cost({"input_tokens": 1_000_000, "output_tokens": 1_000_000}) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="not a table of prices"):
        Prices.of("x", table_file=tmp_path / "none.json")


def test_a_server_that_falls_silent_in_mid_answer_is_asked_again(tmp_path: Path) -> None:
    with serve(Slow(SUBMIT, 0.6), SUBMIT) as api:
        answer = ask(api, tmp_path, timeout_s=0.2)
    assert isinstance(answer, Series) and len(api.requests) == 2


def test_a_stream_longer_than_the_time_cap_is_left(tmp_path: Path) -> None:
    with serve(Slow(SUBMIT, 0.6)) as api:
        answer = ask(api, tmp_path, max_seconds=0.3)
    assert isinstance(answer, Declined) and answer.usd > 0


def test_the_record_holds_every_exchange_and_no_secret(tmp_path: Path) -> None:
    leak = text(f"DECLINE: my key is {KEY}")
    with serve(leak) as api:
        ask(api, tmp_path)
    assert api.requests[0][0]["authorization"] == f"Bearer {KEY}"
    raw = (tmp_path / "1-claude.jsonl").read_text()
    assert KEY not in raw and "[redacted]" in raw
    assert [line["kind"] for line in lines(tmp_path)] == ["begin", "request", "answer", "declined"]


def test_unknown_tools_and_wrong_arguments_come_back_as_errors(tmp_path: Path) -> None:
    odd = tools(("run_shell", {"cmd": "ls"}), ("explain", {}), ("read_skill", {"name": "nothing"}), ("search_code", {"pattern": "("}))
    with serve(odd, SUBMIT) as api:
        assert isinstance(ask(api, tmp_path), Series)
    results = api.requests[1][1]["messages"][-1]["content"]
    assert all(r["is_error"] for r in results)
    assert "no tool 'run_shell'" in results[0]["content"] and "needs finding_id" in results[1]["content"]
