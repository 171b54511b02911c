"""Loading of well-formed text: any layout, any cut between chunks, exact numbers, arguments on demand."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from build import Build, decode_steps

from trace_diff.ingest import TraceError, load
from trace_diff.ingest import reader as reader_module
from trace_diff.ingest.numbers import to_ns
from trace_diff.ingest.scan import spans
from trace_diff.types import Kind

NASTY = [
    "plain",
    'quoted "inner" text',
    "brace },{ inside",
    '}, {"ph": "X", "name": "not an event"',
    "back\\slash",
    "trailing backslash \\",
    "bracket ]}",
    "tab\tnewline\n",
    "unicode é 漢字 😀",
    "[{},{}]",
    "",
]


def _random_events(rng: random.Random, count: int) -> list[dict]:
    events = []
    for i in range(count):
        args: dict = {"correlation": i, "External id": rng.randrange(1 << 40)}
        for _ in range(rng.randrange(4)):
            args[rng.choice(NASTY) + str(rng.random())] = rng.choice(
                [rng.choice(NASTY), None, True, 1.5, [1, [2, {"ph": "X"}]], {"ph": "X", "nested": [{}, {}]}, []]
            )
        event = {"ph": "X", "cat": "cpu_op", "name": rng.choice(NASTY) + f"#{i}", "pid": 1, "tid": 2, "ts": i, "dur": 1, "args": args}
        keys = list(event)
        rng.shuffle(keys)
        events.append({k: event[k] for k in keys})
    return events


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("chunk", [37, 200, 4096, 1 << 20])
def test_any_layout_and_any_chunk_cut_gives_what_json_gives(tmp_path, monkeypatch, seed, chunk):
    rng = random.Random(seed)
    events = _random_events(rng, 40)
    shape = seed % 4
    if shape == 0:
        text = json.dumps({"traceEvents": events, "traceName": "x },{ y"}, indent=2)
    elif shape == 1:
        text = json.dumps({"note": 'says "traceEvents": [ here', "nested": {"traceEvents": [1]}, "traceEvents": events})
    elif shape == 2:
        text = json.dumps(events, ensure_ascii=False)
    else:
        text = json.dumps({"traceEvents": events, "after": [{"a": 1}, {"b": [{}]}]}, indent=1).replace("\n", "\r\n")
    path = tmp_path / "t.json"
    path.write_bytes(text.encode())
    monkeypatch.setattr(reader_module, "CHUNK", chunk)
    monkeypatch.setattr(reader_module, "_READ", chunk)
    trace = load(path)
    got = {trace.name(i): trace.args(i) for i in range(len(trace.events))}
    assert got == {e["name"]: e["args"] for e in events}
    assert (trace.notes.repaired, trace.notes.lost, trace.notes.truncated) == (0, 0, False)
    if shape == 3:
        assert trace.meta["after"] == [{"a": 1}, {"b": [{}]}]


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_the_objects_of_the_array(seed):
    rng = random.Random(seed)
    events = _random_events(rng, 20)
    text = json.dumps(events, indent=rng.choice([None, 1]))[1:].encode()
    found = spans(text)
    assert [json.loads(text[a:b]) for a, b in zip(found.starts, found.ends, strict=True)] == events
    assert text[found.array_end : found.array_end + 1] == b"]"


def test_times_are_exact_for_any_decimal_text():
    rng = random.Random(1)
    texts = []
    for _ in range(3000):
        whole = str(rng.randrange(10 ** rng.randrange(1, 15)))
        part = "".join(rng.choice("0123456789") for _ in range(rng.randrange(0, 8)))
        texts.append((whole + ("." + part if part else "")).encode())
    values, bad, _ = to_ns(texts)
    assert bad is None
    want = [int((Decimal(t.decode()) * 1000).to_integral_value(ROUND_HALF_UP)) for t in texts]
    assert values.tolist() == want


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1.5", 1500),
        (b'"1.5"', 1500),
        (b'" 1.5 "', 1500),
        (b"1e3", 1_000_000),
        (b"1.7E+2", 170_000),
        (b"-2.001", -2001),
        (b"-0.5", -500),
        (b"0", 0),
        (b"1712345678901234.567", 1_712_345_678_901_234_567),
        (b"0.0004", 0),
        (b"0.0005", 1),
        (b"12.", 12_000),
    ],
)
def test_each_way_to_write_a_time(text, ns):
    for texts in ([text], [text, b"7"], [b"7.000", text]):
        values, bad, _ = to_ns(texts)
        assert bad is None
        assert int(values[texts.index(text)]) == ns


@pytest.mark.parametrize("text", [b"null", b"", b'""', b"true", b'"abc"', b"1e400", b"99999999999999999999", b"[1]", b'"NaN"', b"1,5"])
def test_what_is_no_time_is_said_to_be_none(text):
    values, bad, _ = to_ns([b"1.000", text, b"2.000"])
    assert bad is not None
    assert bad.tolist() == [False, True, False]
    assert values.tolist()[0] == 1000


@pytest.mark.parametrize("members", [1, 2, 7])
def test_gzip_of_several_members_is_one_text(tmp_path, members):
    data = decode_steps(Build()).text().encode()
    cut = [len(data) * k // members for k in range(members + 1)]
    blob = b"".join(gzip.compress(data[a:b]) for a, b in itertools.pairwise(cut))
    path = tmp_path / "t.json.gz"
    path.write_bytes(blob)
    trace = load(path)
    assert len(trace.events) == 40
    assert trace.notes.messages == ()


@pytest.mark.parametrize("garbage", [b"garbage", b"\0" * 1000, b"\x1f\x8c\x00"])
def test_bytes_after_the_gzip_stream_do_no_harm(tmp_path, garbage):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(decode_steps(Build()).text().encode()) + garbage)
    trace = load(path)
    assert len(trace.events) == 40
    assert trace.notes.truncated is False


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_byte_order_marks_and_wide_encodings_are_read(tmp_path, encoding):
    text = decode_steps(Build()).text()
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    path = tmp_path / "t.json"
    path.write_bytes(mark + text.encode(encoding))
    assert len(load(path).events) == 40


def test_two_event_arrays_are_both_read(tmp_path):
    a, b = Build().op("a", 0, 5), Build().op("b", 10, 5)
    text = a.text(tail=f', "traceEvents": [{", ".join(b.events)}]')
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = load(path)
    assert sorted(trace.names) == ["a", "b"]
    assert any("more than one event array" in m for m in trace.notes.messages)


def test_one_event_larger_than_many_chunks_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "CHUNK", 1 << 12)
    big = {"data": "x" * (1 << 20), "list": list(range(5000))}
    build = Build().op("small", 0, 5).event("cpu_op", "huge", 10, 5, args=big).op("after", 20, 5)
    trace = load(build.write(tmp_path / "t.json"))
    at = next(i for i in range(3) if trace.name(i) == "huge")
    assert trace.args(at) == big


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ('{"traceEvents": []}', 0),
        ("[]", 0),
        ('{"traceEvents": null}', 0),
        ('{"traceEvents": [], "traceName": "x"}', 0),
        ('{"traceEvents": [null, 3, {"ph": "X", "name": "a", "ts": 1, "dur": 1}]}', 1),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2}]}', 1),
        ('{"traceEvents": [{"ph": "X", "name": null, "cat": null, "pid": null, "tid": null, "ts": 1, "dur": 2, "args": null}]}', 1),
        ('{"traceEvents": [{"ph": "X", "name": 7, "cat": [], "pid": 1.0, "tid": {}, "ts": 1, "dur": 2, "args": [1]}]}', 1),
        ('{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]}', 0),
    ],
)
def test_odd_but_legal_files_load(tmp_path, text, events):
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = load(path)
    assert len(trace.events) == events
    for i in range(events):
        assert trace.args(i) == {}


def test_duplicate_keys_mean_the_last_one(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "B", "ph": "X", "name": "a", "name": "b", "ts": 5, "ts": 7, "dur": 1}]}')
    trace = load(path)
    assert trace.names == ["b"]
    assert trace.base_ns == 7000


def test_what_is_no_trace_is_an_error_that_names_file_and_byte(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("  hello")
    with pytest.raises(TraceError, match=r"t\.json: byte 2: not a JSON trace"):
        load(path)
    path.write_text('{"foo": 1}')
    with pytest.raises(TraceError, match="traceEvents"):
        load(path)
    with pytest.raises(TraceError, match="No such file"):
        load(tmp_path / "absent.json")


def test_process_and_thread_ids_as_text_are_the_same_tracks(tmp_path):
    a = load(Build().op("a", 0, 9, tid=5).call("cudaLaunchKernel", 1, 2, 3, tid=5).write(tmp_path / "a.json"))
    build = Build()
    build.event("cpu_op", "a", 0, 9, pid=str(100), tid="5").event("cuda_runtime", "cudaLaunchKernel", 1, 2, "100", "5")
    b = load(build.write(tmp_path / "b.json"))
    assert a.tracks == b.tracks == [(100, 5)]


def test_files_of_old_and_foreign_schemas_have_the_same_kinds(tmp_path):
    build = Build()
    cats = {
        "Kernel": Kind.KERNEL, "kernel": Kind.KERNEL, "Memcpy": Kind.MEMCPY, "gpu_memcpy": Kind.MEMCPY,
        "Memset": Kind.MEMSET, "gpu_memset": Kind.MEMSET, "Operator": Kind.CPU_OP, "cpu_op": Kind.CPU_OP,
        "Runtime": Kind.RUNTIME, "cuda_runtime": Kind.RUNTIME, "hip_runtime": Kind.RUNTIME, "xpu_runtime": Kind.RUNTIME,
        "privateuse1_runtime": Kind.RUNTIME, "mtia_runtime": Kind.RUNTIME, "cuda_driver": Kind.DRIVER,
        "python_function": Kind.PYTHON, "user_annotation": Kind.ANNOTATION, "gpu_user_annotation": Kind.GPU_ANNOTATION,
        "cuda_sync": Kind.SYNC, "overhead": Kind.PROFILER, "Trace": Kind.PROFILER, "mtia_ccp_events": Kind.OTHER,
    }  # fmt: skip
    for i, cat in enumerate(cats):
        build.event(cat, cat, i * 10, 5)
    trace = load(build.write(tmp_path / "t.json"))
    assert {trace.name(i): Kind(trace.events.kind[i]) for i in range(len(trace.events))} == cats
    assert any("mtia_ccp_events" in m for m in trace.notes.messages)


def test_a_loaded_trace_can_be_asked_for_arguments_only_while_its_file_is_unchanged(tmp_path):
    path = decode_steps(Build()).write(tmp_path / "t.json")
    trace = load(path)
    decode_steps(Build(), count=5).write(path)
    with pytest.raises(TraceError, match="changed"):
        trace.args(0)


def test_progress_reaches_the_file_size(tmp_path):
    path = decode_steps(Build()).write(tmp_path / "t.json.gz")
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size,) * 2


def test_t11_memory_stays_below_two_and_a_half_times_the_text(tmp_path):
    build = Build()
    args = {"External id": 1, "Input Dims": [[64, 64], [64, 64]], "Call stack": "model.py(12): forward"}
    for i in range(60_000):
        build.event("cpu_op", f"aten::op{i % 50}", i * 1000, 900, args=args)
    path = build.write(tmp_path / "big.json")
    code = (
        "import resource, sys\nfrom trace_diff.ingest import load\n"
        "a = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nt = load(sys.argv[1])\n"
        "print(len(t.events), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - a)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    count, kilobytes = map(int, out.stdout.split())
    assert count == 60_000
    assert kilobytes * 1024 < 2.5 * path.stat().st_size
