"""Times that cannot be believed are kept out of every sum, counted and named; short times are exact."""

from __future__ import annotations

import json

import pytest
from build import Build, decode_steps

from trace_diff import summary
from trace_diff.attribute import breakdown
from trace_diff.ingest import gather, load
from trace_diff.types import Kind
from trace_diff.windows import steps


def test_t07_text_times_at_the_epoch_give_what_numbers_do(tmp_path):
    """Absolute epoch microseconds with nanosecond fraction do not fit a float; a quarter of a microsecond is lost."""
    epoch = 1_712_345_678_901_234_000
    build, other = Build(), Build()
    for i in range(200):
        start, dur = epoch + i * 2000 + i % 7, 1500 + i % 500
        build.kernel(f"k{i % 3}", start, dur)
        ts, length = f"{start // 1000}.{start % 1000:03d}", f"{dur // 1000}.{dur % 1000:03d}"
        event = {"ph": "X", "cat": "kernel", "name": f"k{i % 3}", "pid": "0", "tid": "7", "ts": ts, "dur": length, "args": {"stream": 7}}
        other.raw(json.dumps(event))
    a, b = load(build.write(tmp_path / "a.json")), load(other.write(tmp_path / "b.json"))
    assert a.events.ts_ns.tolist() == b.events.ts_ns.tolist() == [i * 2000 + i % 7 for i in range(200)]
    assert a.events.dur_ns.tolist() == b.events.dur_ns.tolist()
    assert a.base_ns == b.base_ns == epoch
    assert (a.notes.repaired, b.notes.repaired) == (0, 200)
    assert "times of 200 events were written as text" in b.notes.messages
    ends = a.events.ts_ns + a.events.dur_ns
    assert (ends[:-1] <= a.events.ts_ns[1:]).all(), "no kernel reaches into the next by rounding"


def test_t13_kernels_below_a_microsecond_are_summed_exactly_and_never_negative(tmp_path):
    build, total = Build(), 0
    for i in range(500):
        dur = 400 + 3 * i
        build.kernel("tiny", 1_000_001 + i * 5_003, dur)
        total += dur
    trace = load(build.write(tmp_path / "t.json"))
    shown = summary.totals(trace)
    assert shown["gpu_busy_ns"] == total
    assert shown["gpu_span_ns"] == 499 * 5_003 + 400 + 3 * 499
    assert (trace.events.dur_ns >= 0).all()


def test_t15_device_rows_without_timing_are_counted_and_left_out(tmp_path):
    build = decode_steps(Build())
    for i in range(1000):
        build.kernel("graph kernel", 0, 0, 500 + i)
    trace = load(build.write(tmp_path / "t.json"))
    assert trace.notes.quarantined == 1000
    assert any("without timing" in m for m in trace.notes.messages)
    shown = summary.totals(trace)
    assert shown == {"gpu_span_ns": 352_500, "gpu_busy_ns": 150_000, "gpu_idle_ns": 202_500}


@pytest.mark.parametrize("bogus", [16_000_000_000, 3_400_000_000, 5_000_000, 300_000])
def test_t17_a_duration_that_runs_over_later_kernels_is_left_out_and_both_numbers_are_stated(tmp_path, bogus):
    build = Build()
    for i in range(300):
        build.kernel(["gemm", "norm", "rope"][i % 3], i * 12_000, 10_000 if i != 100 else bogus)
    trace = load(build.write(tmp_path / "t.json"))
    assert trace.notes.quarantined == 1
    assert any(f"claim {bogus // 1000}.000 us" in m for m in trace.notes.messages)
    assert summary.totals(trace)["gpu_busy_ns"] == 299 * 10_000
    assert trace.quarantine.dur_ns.tolist() == [bogus]


def test_a_bogus_duration_makes_a_quarantined_row_in_its_step_that_still_sums(tmp_path):
    text = decode_steps(Build()).text().replace('"ts": 1115.000, "dur": 12.500', '"ts": 1115.000, "dur": 3400000.000')
    path = tmp_path / "t.json"
    path.write_text(text)
    shown = summary.show(gather([load(path)], "x"))["ranks"][0]
    assert shown["quarantined"] == 1
    step = shown["steps"][1]
    assert step["parts"]["quarantined"] == 20_000, "from its start to the next device row nobody knows"
    assert sum(step["parts"].values()) == step["wall_ns"]
    assert step["gpu_busy_ns"] == 25_000


def test_a_long_kernel_that_the_host_waited_for_is_believed(tmp_path):
    build = Build().launch("spin", 0, 10_000, 3_000_000_000, 1).call("cudaDeviceSynchronize", 6_000, 3_000_010_000)
    build.op("aten::add", 1_000, 500)
    trace = load(build.write(tmp_path / "t.json"))
    assert trace.notes.quarantined == 0
    assert summary.totals(trace)["gpu_busy_ns"] == 3_000_000_000


def test_overlap_by_dependent_launch_is_legitimate_and_counted_once(tmp_path):
    """With programmatic dependent launch a kernel begins before the one before it ends."""
    build = Build()
    for i in range(100):
        build.kernel("pdl", i * 10_000, 10_900)
    trace = load(build.write(tmp_path / "t.json"))
    assert trace.notes.quarantined == 0
    assert summary.totals(trace)["gpu_busy_ns"] == 99 * 10_000 + 10_900
    assert int(trace.events.dur_ns.sum()) == 100 * 10_900


def test_t19_zero_duration_kernels_that_touch_neighbours_are_kept_and_are_no_overlap(tmp_path):
    build = Build().kernel("a", 1_000, 500).kernel("zero", 1_500, 0).kernel("b", 1_500, 500).kernel("zero", 2_000, 0)
    trace = load(build.write(tmp_path / "t.json"))
    assert len(trace.rows(Kind.KERNEL)) == 4
    assert trace.notes.quarantined == 0
    assert summary.totals(trace)["gpu_busy_ns"] == 1000


@pytest.mark.parametrize("value", ["NaN", "null", '"abc"', "Infinity", "-5.0", "99999999999999999999", '""'])
def test_a_duration_that_is_none_keeps_the_event_out_of_sums_and_is_counted(tmp_path, value):
    text = decode_steps(Build()).text().replace('"ts": 1015.000, "dur": 12.500', f'"ts": 1015.000, "dur": {value}', 1)
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = load(path)
    assert trace.notes.quarantined == 1
    assert len(trace.quarantine) == 1
    assert summary.totals(trace)["gpu_busy_ns"] == 11 * 12_500


@pytest.mark.parametrize("value", ["NaN", "null", '"x"', "1e300"])
def test_a_start_that_is_none_keeps_the_event_out(tmp_path, value):
    text = decode_steps(Build()).text().replace('"ts": 1015.000', f'"ts": {value}', 1)
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = load(path)
    assert trace.notes.quarantined == 1
    assert trace.base_ns == 1_000_000
    assert summary.totals(trace)["gpu_busy_ns"] == 11 * 12_500


def test_missing_ts_and_dur_cost_only_their_events(tmp_path):
    build = decode_steps(Build())
    build.raw('{"ph": "X", "cat": "cpu_op", "name": "no dur", "pid": 1, "tid": 1, "ts": 5}')
    build.raw('{"ph": "X", "cat": "cpu_op", "name": "no ts", "pid": 1, "tid": 1, "dur": 5}')
    trace = load(build.write(tmp_path / "t.json"))
    assert len(trace.events) == 40
    assert trace.notes.quarantined == 2


def test_absolute_time_is_the_files_base_plus_the_events_start(tmp_path):
    base = 1_790_857_026_000_000_000
    trace = load(decode_steps(Build(baseTimeNanoseconds=base)).write(tmp_path / "t.json"))
    assert trace.base_ns == base + 1_000_000
    assert int(trace.events.ts_ns.min()) == 0


def test_no_time_of_the_account_is_a_float(tmp_path):
    trace = load(decode_steps(Build()).write(tmp_path / "t.json"))
    account = breakdown(trace, steps(trace)[0])
    assert trace.events.ts_ns.dtype == trace.events.dur_ns.dtype == "int64"
    assert all(type(v) is int for v in [*account.parts.values(), account.wall_ns, account.gpu_busy_ns])
