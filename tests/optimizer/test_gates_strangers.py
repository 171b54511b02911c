"""What a candidate writes and answers is read by gates: whatever it is, it ends as a verdict, never as an exception."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimizer import gates
from optimizer.gates import context, logprobs, resources, sampling, shapes, witness
from optimizer.gates.context import failed
from optimizer.types import RejectReason, Stream

SPAN = {"ph": "X", "cat": "user_annotation", "name": "execute_context_0(0)_generation_3(3)", "ts": 0, "dur": 10}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1f\x8b",
        gzip.compress(b'{"traceEvents": []}')[:20],
        gzip.compress(b'{"traceEvents": [')[:-4] + b"abcd",
        gzip.compress(b"[" * 200_000),
        gzip.compress(b"[]"),
        gzip.compress(json.dumps({"traceEvents": "none"}).encode()),
        gzip.compress(json.dumps({"traceEvents": [7]}).encode()),
        gzip.compress(json.dumps({"traceEvents": [SPAN | {"ts": "soon"}, SPAN]}).encode()),
        gzip.compress(json.dumps({"traceEvents": [SPAN | {"dur": None}]}).encode()),
        gzip.compress(json.dumps({"traceEvents": [SPAN, SPAN | {"ts": 1, "cat": "cpu_op", "name": "aten::mm", "args": [1]}]}).encode()),
        gzip.compress(
            json.dumps({"traceEvents": [SPAN, SPAN | {"ts": 1, "cat": "cpu_op", "name": "aten::mm", "args": {"Input Dims": [["x", 2], [2, 3]]}}]}).encode()
        ),
    ],
    ids=range(12),
)
def test_a_trace_that_is_none_is_unreadable_and_nothing_else(tmp_path, data):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(data)
    with pytest.raises(witness.UNREADABLE):
        witness.count(path)


def stream(tops: list[Any]) -> Stream:
    return Stream((1,), (2,), "", "length", 0, (1,), None, logprobs=({"top_logprobs": tops},))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "empty"),
        ({"token_id:9": -1.0}, "outside the vocabulary"),
        ({"token_id:1": float("nan")}, "finite"),
        ({"token_id:1": 10**400}, "finite"),
        ({"token_id:1": "-1"}, "finite"),
        ({"token_id:1": -1.0}, None),
    ],
)
def test_impossible_tables_of_log_probabilities_are_named(table, words):
    wrong = logprobs._odd([logprobs._tables(stream([table]))], 9)
    assert wrong is None if words is None else words in (wrong or "")


@pytest.mark.parametrize("name", ["token_id:", "token_id:x", "token_id:\u00b2", "token_id:-1", "one", "token_id:" + "1" * 40])
def test_a_table_in_another_form_is_none(name):
    assert logprobs._tables(stream([{name: -1.0}])) == []


def test_details_are_short_and_printable():
    lab: Any = SimpleNamespace(cpu_s=lambda: 0.0)
    gate = gates.Gate("boot", "G05", lambda lab: failed("boot", "G05", RejectReason.BOOT, "\x1b[2J" + "x" * 10_000))
    detail = gates.one(gate, lab).detail
    assert detail.isprintable() and len(detail) < 2100 and not detail.startswith("\x1b")


def test_places_of_right_draws_are_uniform_and_of_colder_ones_are_not():
    rng = np.random.default_rng(1)
    p = sampling.softmax(rng.normal(0, 2, 400))

    def masses(drawn: np.ndarray) -> list[list[tuple[float, float]]]:
        return [[(float(p[p > p[t]].sum()), float(p[t]))] for t in drawn]

    right = rng.choice(400, 300, p=p)
    colder = p**1.5 / (p**1.5).sum()
    assert sampling.places_p(masses(right), rng) > 1e-3
    assert sampling.places_p(masses(rng.choice(400, 300, p=colder)), rng) < sampling.ALPHA


def test_the_pace_of_a_lonely_stream_sets_how_long_the_longest_is():
    one = Stream((1,), (2, 3, 4), "", "length", 0, (10**9, 10**9 + 4 * 10**6, 10**9 + 8 * 10**6), None)
    assert shapes.pass_s(one) == pytest.approx(4e-3)
    assert shapes.pass_s(Stream((1,), (2,), "", "length", 0, (5,), None)) == 1e-4


def test_equal_streams_are_suspicious_only_where_the_model_leaves_a_choice():
    same = [Stream((1,), (2, 3), "", "length", 0, (1, 2), None)] * 12
    assert sampling.alike_p(same, [[(0.0, 0.1), (0.0, 0.2)]] * 12) < sampling.ALPHA
    assert sampling.alike_p(same, [[(0.0, 0.99), (0.0, 0.98)]] * 12) > 0.1
    other = [Stream((1,), (i, 3), "", "length", 0, (1, 2), None) for i in range(12)]
    assert sampling.alike_p(other, [[(0.0, 0.1), (0.0, 0.2)]] * 12) == 1.0


def test_connections_that_close_late_are_no_leak_and_open_ones_are(monkeypatch):
    monkeypatch.setattr(resources, "SETTLE_S", 0.1)
    still = dict.fromkeys(("processes", "threads", "rss_bytes", "stored_bytes"), 5)

    class Slow:
        def __init__(self, counts: list[int]) -> None:
            self.counts = counts

        def census(self) -> dict[str, int]:
            return still | {"fds": self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]}

    before = still | {"fds": 10}
    late: Any = Slow([70, 40, 11])
    leaking: Any = Slow([70])
    assert resources.settled(late, before)["fds"] == 11
    assert not resources._flat("leak", [before, resources.settled(leaking, before)], 1 << 20).passed


STEADY = pytest.mark.parametrize(
    ("growth_mib", "most_kib", "warm", "flat"),
    [
        ((150, 4), 1024, 1, True),  # long prompts touch pages of a large cache once
        ((90, 70), 1024, 1, False),
        ((450, 40), 1024, 1, False),  # far more than a cache explains
        ((2, 2, 0, 0, 0, 0, 0, 0, 0, 0), 40, 0, True),
        ((6, 5, -8, 6, -1, 0, 4, -4, 2, -3), 40, 0, True),  # an allocator that grows and shrinks
        ((4, 11, 5, 4, -6, 6, 5, 9, -2, 6), 40, 0, False),  # 100 KB a request, as it was seen
        ((3, 0, 3, 3, 3, 3, 0, 3, 3, 3), 40, 0, False),
        ((0, 110, 0, 0, 0, 0, 0, 0, 0, 0), 40, 0, False),
    ],
)


@STEADY
def test_growth_in_jumps_is_no_leak_and_steady_growth_is(growth_mib, most_kib, warm, flat):
    seen = [dict.fromkeys(("fds", "processes", "threads", "rss_bytes", "stored_bytes"), 0)]
    for mib in growth_mib:
        seen.append(seen[-1] | {"rss_bytes": seen[-1]["rss_bytes"] + (mib << 20)})
    assert resources._flat("resources", seen, most_kib << 10, warm).passed is flat


@pytest.mark.parametrize(("looks", "idle"), [([0.0], 0.0), ([1.0, 0.6, 0.1], 0.1), ([1.0] * 30, 1.0)])
def test_an_engine_that_still_has_something_to_do_is_looked_at_again(monkeypatch, looks, idle):
    left = list(looks)
    monkeypatch.setattr(context.procfs, "wanting", lambda pids: left.pop(0))
    engine: Any = SimpleNamespace(processes=lambda: [])
    assert context.idle_threads(engine) == idle
