"""Damaged files load as far as they are good, and say what was mended, quarantined and lost.

Named Tnn after the public reports that each kind of damage is known from.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from build import Build, decode_steps

from trace_diff import summary
from trace_diff.ingest import TraceError, gather, load
from trace_diff.ingest import reader as reader_module
from trace_diff.ingest.mend import Unmendable, mend
from trace_diff.types import Kind


def _load(tmp_path: Path, data: bytes | str, name: str = "t.json"):
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load(path)


def _busy(trace) -> int | None:
    return summary.totals(trace)["gpu_busy_ns"]


GOOD = decode_steps(Build()).text()
WHOLE = 12 * 12_500


@pytest.mark.parametrize(
    "name",
    [
        r"torch\cuda\__init__.py(219): _lazy_init",
        r"C:\Users\new\temp\file.py(3): run",
        r"C:\x",
        r"\u12",
        r"ends with \q",
        r"C:\dir\sub\\",
    ],
)
def test_t01_invalid_escapes_are_taken_as_written(tmp_path, name):
    text = GOOD.replace('"aten::mm"', f'"{name}"', 1)
    trace = _load(tmp_path, text)
    assert len(trace.events) == 40
    assert trace.notes.repaired == 1
    assert _busy(trace) == WHOLE


def test_t01_every_string_of_a_windows_trace_may_be_damaged(tmp_path):
    text = GOOD.replace('"aten::mm"', r'"C:\Users\me\model.py(3): forward"')
    trace = _load(tmp_path, text)
    assert trace.notes.repaired == 12
    assert r"C:\Users\me\model.py(3): forward" in trace.names


def test_a_backslash_before_the_closing_quote_is_part_of_the_text(tmp_path):
    for name in ("C:\\dir\\", "C:\\new\\", "\\"):
        trace = _load(tmp_path, GOOD.replace('"name": "aten::mm"', f'"name": "{name}"', 1))
        assert name in trace.names
        assert len(trace.events) == 40


@pytest.mark.parametrize("name", ['say "hi" now', '"', 'f("a", "b")', 'x", "y', 'a "quoted', '{"a": "b"}', 'a", b'])
def test_raw_quotes_inside_a_string_are_mended(tmp_path, name):
    trace = _load(tmp_path, GOOD.replace('"name": "aten::mm"', f'"name": "{name}"', 1))
    assert name in trace.names
    assert len(trace.events) == 40
    assert trace.notes.repaired >= 1
    assert _busy(trace) == WHOLE


@pytest.mark.parametrize("char", ["\n", "\t", "\r\n", "\x00", "\x01", "\x1f", "\x0b"])
def test_raw_control_characters_inside_a_string_are_kept(tmp_path, char):
    trace = _load(tmp_path, GOOD.replace('"aten::mm"', f'"aten{char}mm"', 1))
    assert f"aten{char}mm" in trace.names
    assert trace.notes.repaired == 1
    assert len(trace.events) == 40


@pytest.mark.parametrize("byte", [b"\xe9", b"\xff", b"\xc3(", b"\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_cost_no_event(tmp_path, byte):
    data = GOOD.encode().replace(b'"aten::mm"', b'"at' + byte + b'n"', 1)
    trace = _load(tmp_path, data)
    assert len(trace.events) == 40
    assert trace.notes.repaired == 1
    assert _busy(trace) == WHOLE


@pytest.mark.parametrize(
    "value", ["inf", "-inf", "NaN", "nan", "-nan", "Infinity", "-Infinity", "None", "undefined", "1.#INF", "-nan(ind)"]
)
def test_t03_values_that_json_has_not_become_null_and_the_event_stays(tmp_path, value):
    text = GOOD.replace('"stream": 7}', f'"stream": 7, "memory bandwidth (GB/s)": {value}}}', 1)
    text = text.replace('"device": 0,', f'"x": {value}, "device": 0,', 1)
    trace = _load(tmp_path, text)
    assert _busy(trace) == WHOLE
    kernel = int(trace.rows(Kind.KERNEL)[0])
    assert trace.args(kernel)["x"] is None
    assert trace.args(kernel)["correlation"] == 1
    assert trace.notes.repaired >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cbid": 1,', '"cbid": ,'),
        ('"cbid": 1,', '"cbid": 1,,'),
        ('"cbid": 1,', '"cbid": 1'),
        ('"cbid": 1,', '"cbid": foo bar,'),
        ('"cbid": 1,', '"cbid": True,'),
        ('"cbid": 1,', '"cbid": 01,'),
        ('"cbid": 1,', '"cbid": [1, 2,],'),
        ('"cbid": 1,', '"cbid": 1., "x": .5,'),
    ],
)
def test_small_faults_of_syntax_are_mended(tmp_path, old, new):
    trace = _load(tmp_path, GOOD.replace(old, new, 1))
    assert len(trace.events) == 40
    assert trace.notes.repaired >= 1
    assert _busy(trace) == WHOLE


def test_commas_too_many_and_too_few_between_events_do_no_harm(tmp_path):
    for text in (
        GOOD[:-2] + ", ]}",
        GOOD[:-2] + ",]}",
        GOOD.replace('}}, {"ph"', '}},, {"ph"', 1),
        GOOD.replace('}}, {"ph"', '}} {"ph"', 1),
        GOOD.replace('"traceEvents": [', '"traceEvents": [,'),
    ):
        trace = _load(tmp_path, text)
        assert len(trace.events) == 40, text[-40:]
        assert _busy(trace) == WHOLE
        assert not trace.notes.truncated


def test_t05_a_file_cut_anywhere_gives_its_complete_events(tmp_path):
    data = decode_steps(Build(), count=2, kernels=1).text(indent=True).encode()
    body = data.index(b"[") + 1
    ends = [m + 2 for m in _find_all(data, b"}}", body)]
    array_end = data.rindex(b"]")
    for cut in range(len(data)):  # 2,000 loads
        trace = _load(tmp_path, data[:cut])
        complete = sum(e <= cut for e in ends)
        starts_after = cut > array_end
        assert len(trace.events) == (complete if not starts_after else 8), cut
        assert trace.notes.truncated, cut


def test_t05_a_cut_inside_nested_arguments_adds_no_phantom_events(tmp_path):
    build = Build()
    for i in range(4):
        inner = [{"ph": "X", "name": f"inner {j}", "ts": 1, "dur": 1} for j in range(30)]
        build.event("cpu_op", f"op {i}", i * 100, 50, args={"list": inner, "last": 1})
    data = build.text().encode()
    ends = [data.index(b'"last": 1}}', m) + 11 for m in _find_all(data, b'"op ', 0)]
    for cut in range(ends[1] - 50, ends[3] + 1, 7):
        trace = _load(tmp_path, data[:cut])
        assert [trace.name(i) for i in range(len(trace.events))] == [f"op {i}" for i in range(sum(e <= cut for e in ends))]
        assert trace.notes.truncated


def test_nested_objects_that_look_like_events_are_no_events_in_damaged_text(tmp_path, monkeypatch):
    for chunk in (400, 5000, 1 << 19):
        monkeypatch.setattr(reader_module, "CHUNK", chunk)
        build = Build()
        for i in range(6):
            inner = [{"ph": "X", "name": f"inner {j}", "ts": 1, "dur": 1} for j in range(40)]
            build.event("cpu_op", f"op {i}", i * 100, 50, args={"list": inner, "bad": "MARK" if i == 3 else ""})
        trace = _load(tmp_path, build.text().replace('"MARK"', "NaN"))
        assert sorted(trace.name(i) for i in range(len(trace.events))) == [f"op {i}" for i in range(6)]
        assert (trace.notes.repaired, trace.notes.lost) == (1, 0)
        assert len(trace.args(3)["list"]) == 40


@pytest.mark.parametrize("seed", range(40))
def test_no_corruption_of_bytes_makes_loading_fail(tmp_path, seed):
    """Whatever happens to the bytes, a load ends, raises nothing but its own error, and makes no negative time."""
    rng = random.Random(seed)
    data = bytearray(decode_steps(Build(), count=6).text(indent=seed % 2 == 0).encode())
    for _ in range(rng.randrange(1, 12)):
        at, n = rng.randrange(len(data)), rng.randrange(1, 30)
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + n]
        elif kind == 2:
            data[at:at] = bytes(rng.choice(b'{}[]",:\\ \n0x\xff') for _ in range(n))
        else:
            data[at : at + n] = data[:n]
    try:
        trace = _load(tmp_path, bytes(data))
    except TraceError:
        return
    assert (trace.events.dur_ns >= 0).all()
    shown = summary.rank(trace)
    for step in shown["steps"]:
        assert sum(step["parts"].values()) == step["wall_ns"]


def _find_all(data: bytes, what: bytes, start: int) -> list[int]:
    """Places where an event's arguments and the event itself close."""
    out, at = [], data.find(what, start)
    while at >= 0:
        out.append(at)
        at = data.find(what, at + 1)
    return out


def test_t05_a_gzip_cut_anywhere_gives_a_prefix_and_says_so(tmp_path):
    blob = gzip.compress(decode_steps(Build(), count=3).text().encode())
    last = 0
    for cut in range(0, len(blob) - 8, 7):
        trace = _load(tmp_path, blob[:cut], "t.json.gz")
        assert trace.notes.truncated
        assert len(trace.events) >= last - 1
        last = len(trace.events)
    assert last > 20


def test_t05_a_cut_file_names_the_last_good_time_and_claims_nothing_of_the_rest(tmp_path):
    text = GOOD[: GOOD.index('"ProfilerStep#2"') + 40]
    trace = _load(tmp_path, text)
    shown = summary.show(gather([trace], "cut"))["ranks"][0]
    assert shown["truncated"] is True
    assert shown["lost"] == 1
    assert any(m.startswith("last good time: ") for m in shown["notes"])
    assert shown["steps"][-1]["complete"] is False
    assert shown["gpu_busy_ns"] == 6 * 12_500


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_a_damaged_gzip_gives_what_lies_before_the_damage(tmp_path, at):
    rng = random.Random(5)
    build = Build()
    for i in range(4000):
        build.op(f"op{rng.random()}", i * 100, 50)
    blob = bytearray(gzip.compress(build.text().encode()))
    place = int(len(blob) * at)
    blob[place : place + 40] = b"\x00" * 40
    trace = _load(tmp_path, bytes(blob), "t.json.gz")
    assert trace.notes.truncated
    assert len(trace.events) > 4000 * at * 0.5
    assert len(trace.events) <= 4000


def test_a_wrong_checksum_at_the_end_loses_nothing(tmp_path):
    blob = bytearray(gzip.compress(GOOD.encode()))
    blob[-6] ^= 0xFF
    assert len(_load(tmp_path, bytes(blob), "t.json.gz").events) == 40


def test_an_empty_file_is_an_empty_truncated_trace(tmp_path):
    for data in (b"", b"  \n", gzip.compress(b"")):
        trace = _load(tmp_path, data, "t.json.gz" if data[:1] == b"\x1f" else "t.json")
        assert len(trace.events) == 0
        assert trace.notes.truncated
        assert summary.totals(trace) == {"gpu_span_ns": None, "gpu_busy_ns": None, "gpu_idle_ns": None}


@pytest.mark.parametrize(
    "number", ["10159970886766084423", "-10159970886766084423", "99999999999999999999999999999", "1e30", '"18446744073709551615"']
)
def test_t09_identifiers_beyond_64_bits_are_kept_exactly(tmp_path, number):
    text = GOOD.replace('"correlation": 1}', f'"correlation": {number}}}').replace('"correlation": 1}', f'"correlation": {number}}}')
    text = text.replace('"device": 0,', f'"Comms Id": {number}, "device": 0,', 1)
    trace = _load(tmp_path, text)
    assert len(trace.events) == 40
    assert _busy(trace) == WHOLE
    kernel = int(trace.rows(Kind.KERNEL)[0])
    assert trace.args(kernel)["Comms Id"] == json.loads(number)


def test_t09_rows_with_the_same_huge_identifier_are_still_tied_together(tmp_path):
    big = 10159970886766084423
    build = Build().mark("ProfilerStep#0", 0, 90_000)
    build.launch("gemm", 10_000, 20_000, 5_000, 7)
    text = build.text().replace('"correlation": 7', f'"correlation": {big}')
    trace = _load(tmp_path, text)
    shown = summary.rank(trace)
    assert shown["unlinked_rows"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_scattered_damage_costs_only_damaged_events(tmp_path, monkeypatch, seed):
    """Good events around damaged ones survive whatever the chunks are."""
    rng = random.Random(seed)
    monkeypatch.setattr(reader_module, "CHUNK", rng.choice([300, 2000, 1 << 19]))
    build, good = Build(), set()
    faults = [
        r'{"ph": "X", "cat": "cpu_op", "name": "bad\path", "pid": 1, "tid": 1, "ts": 1, "dur": 1}',
        '{"ph": "X", "cat": "cpu_op", "name": "bad "quote" here", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"a": 1}}',
        '{"ph": "X", "cat": "cpu_op", "name": "bad\nline", "pid": 1, "tid": 1, "ts": 1, "dur": 1}',
        '{"ph": "X", "cat": "cpu_op", "name": "bad", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"x": NaN}}',
        '{"ph": "X", "cat": "cpu_op", "name": "bad" "oops" 17 {, "ts": 1}',
    ]
    hopeless = 0
    for i in range(300):
        if rng.random() < 0.1:
            fault = rng.choice(faults)
            hopeless += "oops" in fault
            build.raw(fault)
        else:
            name = f'good {i} {rng.choice(["", "},{", "[", chr(92) * 2])}'
            good.add(name)
            build.event("cpu_op", name, i * 10, 5, args={"Input Dims": [{"ph": 1}, {"ph": 2}]})
    trace = _load(tmp_path, build.text(indent=rng.random() < 0.5))
    assert good <= {trace.name(i) for i in range(len(trace.events))}
    assert trace.notes.lost <= hopeless * 2
    assert not trace.notes.truncated


def test_text_that_is_no_value_cannot_be_mended():
    for text in (b"{", b'{"a"', b'{"a": ', b'{"a": "', b"[}", b"{]", b'{"a": {"b": 1}', b"{1: 2}"):
        with pytest.raises(Unmendable):
            mend(text)


@pytest.mark.parametrize("seed", range(30))
def test_mending_leaves_good_json_alone(seed):
    rng = random.Random(seed)

    def value(depth: int):
        kind = rng.randrange(7 if depth < 3 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 6:
            return {f"k{rng.random()}": value(depth + 1) for _ in range(rng.randrange(4))}
        return [None, True, rng.random(), rng.randrange(-(10**6), 10**6), 'q" \\ \n é },{ "x": '][kind]

    data = {"a": value(0), "b": value(0)}
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2])).encode()
    fixed, end, count = mend(text + b", trailing")
    assert json.loads(fixed) == data
    assert (end, count) == (len(text), 0)
