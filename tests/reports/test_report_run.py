"""A run's report: its numbers come from ledger and traces, its bytes repeat, and no run or name breaks it."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build_run
import pytest

from reports import html, run_data, run_judged, run_page
from reports.text import micro


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run.build_run(tmp_path_factory.mktemp("r") / "run")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return html.run_report(run, run / "report")


@pytest.fixture(scope="module")
def text(page: Path) -> str:
    return page.read_text("utf-8")


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text("utf-8").splitlines()]


def _pairs(run: Path, stage: str, attempt: int | None) -> list[tuple[float, float]]:
    return [
        (d["a_us_per_token"], d["b_us_per_token"])
        for line in _lines(run)
        if line["kind"] == "pair" and line["attempt"] == attempt
        for d in [line["data"]]
        if d["stage"] == stage and d["discarded"] is None
    ]


def test_headline_is_recomputed_from_the_pairs(run: Path, text: str) -> None:
    pairs = _pairs(run, "headline", None)
    before, after = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    factor = math.exp(-statistics.fmean(math.log(b / a) for a, b in pairs))
    assert f"<b>{factor:.2f}x</b>" in text
    assert f"<b>{1e6 / before:,.1f} tok/s</b>" in text and f"<b>{1e6 / after:,.1f} tok/s</b>" in text
    assert f"{micro(before)} per token" in text and f"{micro(after)} per token" in text


def test_a_run_that_went_on_after_its_end_shows_the_headline_of_its_last_engine(run: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = _lines(run)
    first = next(n for n, line in enumerate(lines) if line["kind"] == "pair" and line["data"]["stage"] == "headline")
    earlier = {**lines[first], "data": {**lines[first]["data"], "key": "headline/" + "0" * 40, "b_us_per_token": 1e6}}
    lines[first:first] = [earlier] * 3
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = run_data.read(tmp_path / "run").headline
    assert shown == run_data.read(run).headline and shown is not None and shown.pairs == 5


def test_the_bound_is_bytes_over_bandwidth_of_the_ledger_and_stands_in_the_headline(run: Path, text: str) -> None:
    found = next(line["data"] for line in _lines(run) if line["kind"] == "calibrated")
    us = found["bound_bytes"] / found["bandwidth_bytes_per_s"] * 1e6
    assert us == pytest.approx(found["bound_us_per_token"])
    assert f"<b>{micro(us)}</b><span>at most {1e6 / us:,.1f} tok/s" in text
    assert "6.4 MB of weights in float32, at 10.0 GB/s measured" in text


def test_measured_savings_are_medians_of_the_confirmation(run: Path, text: str) -> None:
    accepted = [a for a in run_data.read(run).attempts if a.outcome == "accepted"]
    assert [a.number for a in accepted] == [1, 2, 5]
    for attempt in accepted:
        pairs = _pairs(run, "confirm", attempt.number)
        saved = statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs)
        assert attempt.measured().saved_us == pytest.approx(saved)
        assert f'<td class="n">{micro(saved)}</td>' in text


def test_discarded_pairs_do_not_count(run: Path) -> None:
    attempt = run_data.read(run).attempts[0]
    assert attempt.measured("decide").pairs == 5
    assert attempt.measured("decide").discarded == 1


def test_step_walls_are_those_of_the_trace_files(run: Path, text: str) -> None:
    """Of decode steps 2 to 6 on the busiest rank: what the annotations in the JSON say, read without our ingest."""
    import gzip

    starts = sorted(
        e["ts"]
        for e in json.loads(gzip.decompress((run / "traces/2/rank0.json.gz").read_bytes()))["traceEvents"]
        if e["cat"] == "user_annotation"
    )
    walls = [b - a for a, b in itertools.pairwise(starts)]
    assert statistics.fmean(walls) == pytest.approx(3310, rel=0.02)
    shown = re.search(r"after 2 inference-mode</th><td class=\"n best\">([\d.]+) ms", text)
    assert shown and float(shown[1]) * 1000 == pytest.approx(statistics.fmean(walls), rel=0.02)


def test_the_page_names_the_model_by_its_dimensions(text: str) -> None:
    assert "of 4 layers, hidden 256" in text


def test_every_attempt_is_there_with_its_reason(text: str) -> None:
    for words in ("wrong tokens", "passed a deadline", "numeric drift", "effect -0.3 % is below the margin"):
        assert words in text
    assert text.count('class="tag accepted"') == 3


def test_trials_without_parts_of_a_patch_are_not_shown_as_the_patch_left_out_untimed(run: Path, text: str) -> None:
    whole, parts = run_page.build(run_data.read(run)).ablations
    assert whole == ("inference mode in the decode step", "1.06x", "1.04x to 1.09x", "kept: buys 6 %")
    assert parts == ("Parts of “inference mode in the decode step”", "", "", "2 of 2 hunks stay; without some of them: buys -1.4%, buys +6.0%")
    assert parts[3] in text


def test_how_it_was_judged_is_there_and_secrets_are_not(run: Path, text: str) -> None:
    last = _lines(run)[-1]
    for words in (last["hash"], "5ea1" * 16, "bwrap", "2.8% at 80 % power", "77" * 32, "optimize --target tok/s --goal 3x"):
        assert words in text
    every = text + (run / "report/report.md").read_text()
    assert "secret-" not in every, "the prompt key would tell a proposer the hidden prompts"


def test_the_same_run_gives_the_same_bytes(run: Path, page: Path, tmp_path: Path) -> None:
    html.run_report(run, tmp_path)
    for first in (run / "report").iterdir():
        assert first.read_bytes() == (tmp_path / first.name).read_bytes(), first.name


def test_the_page_stands_alone_and_stays_small(page: Path, text: str) -> None:
    assert page.stat().st_size < 3_000_000
    assert "<script" not in text
    links = set(re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", text))
    assert all(link.startswith("#") for link in links), links


def _no_headline(run: Path) -> None:
    build_run.build_run(run, finished=False, traces=False)


def _nothing_tried(run: Path) -> None:
    build_run.build_run(run, plans=(), finished=False, traces=False)


def _only_rejections(run: Path) -> None:
    build_run.build_run(run, plans=[p for p in build_run.PLANS if p.outcome != "accepted"], traces=False)


def _first_line_only(run: Path) -> None:
    _no_headline(run)
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().split("\n")[0] + "\n")


def _torn(run: Path) -> None:
    _no_headline(run)
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-40])


def _empty(run: Path) -> None:
    _no_headline(run)
    (run / "ledger.jsonl").write_text("")
    (run / "run.json").unlink()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_no_headline, "product of 3 confirmed ratios"),
        (_nothing_tried, "stopped before the first attempt|The run has not finished"),
        (_only_rejections, "No patch was accepted"),
        (_first_line_only, "The run has not finished"),
        (_torn, "1 unreadable ledger line"),
        (_empty, "The run has not finished"),
    ],
)
def test_a_run_that_stopped_anywhere_still_gives_a_report(build: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    build(tmp_path / "run")
    out = html.run_report(tmp_path / "run", tmp_path / "out")
    assert re.search(words, out.read_text("utf-8"))
    assert (tmp_path / "out" / "report.md").stat().st_size > 300


def test_a_changed_ledger_line_is_called_out(tmp_path: Path) -> None:
    _no_headline(tmp_path / "run")
    ledger = tmp_path / "run/ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"ratio":0.27', '"ratio":0.17', 1))
    assert "hash chain is broken" in html.run_report(tmp_path / "run", tmp_path / "out").read_text()


def test_a_folder_without_a_ledger_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(run_data.RunError, match=r"ledger\.jsonl"):
        html.run_report(tmp_path, tmp_path / "out")


def test_a_damaged_trace_is_a_note_not_an_end(tmp_path: Path) -> None:
    build_run.build_run(tmp_path / "run", plans=build_run.PLANS[:1])
    (tmp_path / "run/traces/1/rank2.json.gz").write_bytes(b"nothing")
    (tmp_path / "run/traces/hf/rank0.json.gz").write_bytes(b"nothing")
    text = html.run_report(tmp_path / "run", tmp_path / "out").read_text()
    assert "traces/hf" in text and "first engine" in text


@pytest.mark.parametrize("why", ["", "the clients themselves: <b>20.20</b> and 22.50"])
def test_what_two_clients_measured_stands_side_by_side(why: str, tmp_path: Path) -> None:
    run = build_run.build_run(tmp_path / "run", plans=build_run.PLANS[:1], traces=False)
    (run / "aiperf").mkdir()
    work = {"prompt_tokens": 64, "new_tokens": 32, "concurrency": 1, "requests": 24}
    row = {"metric": "ttft_p50_ms", "ours": 15.78, "aiperf": 18.09, "difference": 18.09 / 15.78 - 1, "fault": True, "why": why}
    fine = {"metric": "tokens_per_s", "ours": 161.91, "aiperf": 155.87, "difference": -0.0373, "fault": False}
    engine = {"label": "original", "workload": work, "rows": [row, fine]}
    (run / "aiperf/aiperf.json").write_text(json.dumps({"fault_above": 0.05, "engines": [engine], "left_out": {"vllm": "vLLM, defaults ended\nlog"}}))
    html.run_report(run, tmp_path / "out")
    for name in ("index.html", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        for shown in ("15.78 ms", "18.09 ms", "+14.6%", "161.91 tok/s", "155.87 tok/s", "-3.7%", "24 requests of 64 + 32 tokens", "vllm (vLLM, defaults ended)"):
            assert shown in text, (name, shown)
        assert text.count("fault of measurement") == 1 and "<b>20.20" not in text


@pytest.mark.parametrize("left", ["", "{", "[]", '{"engines": []}', '{"engines": [{"label": "x"}], "fault_above": 0.05}'])
def test_clients_results_that_cannot_be_read_are_left_out(left: str, tmp_path: Path) -> None:
    run = build_run.build_run(tmp_path / "run", plans=build_run.PLANS[:1], traces=False)
    (run / "aiperf").mkdir()
    (run / "aiperf/aiperf.json").write_text(left)
    assert "By two clients" not in html.run_report(run, tmp_path / "out").read_text()


HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=1>&amp;{{ 7*7 }}{% raw %}\x00\x1b[31m$\\frac$|`*_' + "A" * 10_000


def test_hostile_strings_are_shown_not_obeyed(tmp_path: Path) -> None:
    plan = build_run.Plan(HOSTILE[:3000], HOSTILE[:200], 100.0, None, "rejected", HOSTILE, "quick", HOSTILE, ("scope",))
    won = build_run.Plan("win-" + HOSTILE[:3000], HOSTILE[:200], 5000.0, 0.8)
    run = build_run.build_run(tmp_path / "run", plans=[plan, won], traces=False)
    patch = {"edits": [{"file": HOSTILE, "old": HOSTILE + "\n" * 5000, "new": "\n".join([HOSTILE[:500]] * 3000)}] * 40}
    (run / "attempts/1/patch.json").write_text(json.dumps({"patches": [patch]}))
    (run / "traces" / "x<b>").mkdir(parents=True)
    out = html.run_report(run, tmp_path / "out")
    text = out.read_text("utf-8")
    assert "<script" not in text and "<img" not in text and "49" not in re.findall(r"&amp;amp;(\S{2})", text)
    assert "&lt;script&gt;" in text
    assert "\x00" not in text and "\x1b" not in text
    assert out.stat().st_size < 3_000_000
    longest = max(len(line) for line in re.sub(r"<path.*?/>", "", text, flags=re.S).split("\n"))
    assert longest < 60_000
    markdown = (tmp_path / "out/report.md").read_text()
    assert "<script" not in markdown.replace("\\<script", "")


def test_pairs_of_a_retry_against_the_same_incumbent_count_once(tmp_path: Path) -> None:
    """The judge books alpha on the program: a second attempt of it goes on with the pairs of the first."""
    run = build_run.build_run(tmp_path / "run", plans=build_run.PLANS[:1], finished=False, traces=False)
    ledger = build_run.LedgerBuilder(tmp_path / "extra.jsonl")
    lines = _lines(run)
    proposed = next(line["data"] for line in lines if line["kind"] == "proposed")
    with (run / "ledger.jsonl").open("a") as out:
        ledger.add("proposed", proposed, 9)
        out.write((tmp_path / "extra.jsonl").read_text())
    first, second = run_data.read(run).attempts
    assert second.measured().pairs == first.measured().pairs == 6
    more = next(line["data"] for line in lines if line["kind"] == "pair" and line["data"]["stage"] == "confirm")
    with (run / "ledger.jsonl").open("a") as out:
        ledger.add("pair", more, 9)
        out.write((tmp_path / "extra.jsonl").read_text().splitlines()[-1] + "\n")
    first, second = run_data.read(run).attempts
    assert (first.measured().pairs, second.measured().pairs) == (6, 7)  # what is taken after an attempt's end is not its own


def test_the_view_of_a_series_predicts_its_sum() -> None:
    attempt = run_data.Attempt(1, proposed=[{"mechanism": "a", "predicted_us": 10.0}, {"mechanism": "b", "predicted_us": 32.0}])
    assert attempt.predicted_us == 42.0
    assert attempt.mechanism == "a + b"


def test_the_command_repeats_everything_that_was_asked_for() -> None:
    info = {
        "metric": "tok/s", "tp": 1, "devices": [0, 1], "engine_args": ["--num-kv-blocks", "4096"], "seed": 5, "accept_numeric_drift": True,
        "limits": {"attempts": 3, "consecutive_rejections": 8}, "options": {"only": ["a", "b"], "model": "x"}, "without_knowledge": ["all"],
    }  # fmt: skip
    said = run_judged.command(info)
    for words in (
        "--devices 0,1", "--engine-args '--num-kv-blocks 4096'", "--skills a,b", "--agent-option model=x", "--max-rejections 8",
        "--without-knowledge all", "--seed 5", "--accept-numeric-drift",
    ):  # fmt: skip
        assert words in said


def test_the_command_is_spelled_out_when_the_run_kept_none() -> None:
    words = run_judged.command({"metric": "tok/s", "tp": 2, "goal": {"kind": "value", "value": 60.0}, "target_dir": "/a b"})
    assert words == "optimize --target tok/s --goal 60 --target-dir '/a b' --tp 2"


def test_a_printed_page_keeps_the_colours_of_its_legends(page: Path, tmp_path: Path) -> None:
    """Browsers drop backgrounds in print: then the legend was a row of empty squares."""
    import browser

    with browser.chromium() as chromium:
        shown = chromium.new_page()
        shown.goto(page.as_uri())
        shown.emulate_media(media="print")
        kept = shown.evaluate("[...document.querySelectorAll('.swatch, .bar')].map(e => getComputedStyle(e).printColorAdjust)")
    assert len(kept) > 10 and set(kept) == {"exact"}


def test_the_page_has_the_medians_that_the_judge_had_and_of_the_judged_program_alone() -> None:
    """With a pair discarded after the verdict the page said 77.2 ms where the terminal had 80.2; an enabler's pairs counted for its series."""
    pair = {"stage": "screen", "a_us_per_token": 90.0, "b_us_per_token": 10.0, "discarded": None}
    said = {"ratio": 0.125, "ci95": [0.1, 0.15], "a_us": 80.0, "b_us": 10.0}
    attempt = run_data.Attempt(1, [{"ast_hash": "end"}], pairs=[{**pair, "key": "enabler", "b_us_per_token": 90.0}, {**pair, "key": "end"}], stages={})
    found = attempt.measured("screen")
    assert (found.pairs, found.b_us, found.saved_us) == (1, 10.0, 80.0)
    attempt.stages["screen"] = said
    assert (attempt.measured("screen").a_us, attempt.measured("screen").saved_us) == (80.0, 70.0)
