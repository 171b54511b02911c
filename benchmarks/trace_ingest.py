"""How fast and how small loading and analysing traces is, beside the peers, on the same files in the same session.

    python -m benchmarks.trace_ingest [--peers] [--tracelens SOURCE] [--gigabyte] [--ranks] [--findings] [FILES...]

Prints a table of CPU seconds (user and system, best of three) and peak memory. Without FILES it takes the largest
traces of the reference folder beside the checkout. `--peers` installs Holistic Trace Analysis 0.5.0 and AMD TraceLens
(git; the name on PyPI is another project) into environments of their own under runs/peers (once) and runs them too;
`--tracelens` says where TraceLens comes from: a git address, or a folder with a clone or with its sources.
"times" is the peer's CPU time over ours on that file, "MB/MB" the peak memory over the size of the JSON.
Not for: whether the answers are right (tests/trace_diff).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
PEERS = REPO / "runs" / "peers"
LARGEST = (
    "traces/mi300x_xdit_flux_graph_63MB.json.gz",
    "traces/mi300x_owlv2_infer_eager_61MB.json.gz",
    "traces/h100_owlv2_infer_eager_55MB.json.gz",
    "baselines/h200_tp1/hf_eager_bs1_12tok.json.gz",
    "traces/diff_control_a100_rank3of8_oldschema.json.gz",
)
# Each prints: CPU seconds of load plus all analyses, and the process's peak memory in kilobytes.
_MEASURE = """
import resource, sys, time, warnings, logging
warnings.filterwarnings("ignore"); logging.disable(50)
{imports}
best = 1e9
for _ in range(3):
    a = time.process_time()
    {work}
    best = min(best, time.process_time() - a)
print("RESULT", best, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
_OURS = _MEASURE.format(
    imports="from trace_diff.ingest import load, gather\nfrom trace_diff.windows import steps\n"
    "from trace_diff.attribute import breakdown\nfrom trace_diff.collectives import match\n"
    "from trace_diff.syncs import sync_points\nfrom trace_diff.summary import rank",
    work="t = load(sys.argv[1]); s = steps(t); c = match(gather([t], 'x')); r = rank(t, c); sync_points(t, s)",
)
_HTA = _MEASURE.format(
    imports="from hta.trace_analysis import TraceAnalysis\n"
    "def every(t):\n"
    "    for name in ('get_temporal_breakdown', 'get_idle_time_breakdown', 'get_comm_comp_overlap',\n"
    "                 'get_gpu_kernel_breakdown', 'get_cuda_kernel_launch_stats'):\n"
    "        try: getattr(t, name)(visualize=False)\n"
    "        except Exception as error: print(name, type(error).__name__, file=sys.stderr)\n"
    "    t.get_queue_length_summary()\n",
    work="every(TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir='/'))",
)
_TRACELENS = _MEASURE.format(
    imports="from TraceLens import TreePerfAnalyzer\n"
    "def every(p):\n"
    "    t = TreePerfAnalyzer.from_file(p)\n"
    "    t.get_df_gpu_timeline()\n"
    "    k = t.get_df_kernel_launchers(); t.get_df_kernel_launchers_summary(k)\n"
    "    t.get_df_kernel_launchers_unique_args(k); t.get_df_kernels()\n",
    work="every(sys.argv[1])",
)
TRACELENS = "https://github.com/AMD-AGI/TraceLens"


def _run(python: str, code: str, path: Path) -> tuple[float, float] | None:
    """(CPU seconds, peak megabytes), None where the tool fails on the file."""
    done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True, cwd=REPO, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            seconds, kilobytes = line.split()[1:]
            return float(seconds), int(kilobytes) / 1024
    print(done.stderr.strip().splitlines()[-1:] or "no output", file=sys.stderr)
    return None


def _peer(name: str, packages: list[str]) -> str | None:
    """Python of a peer's own environment, made when `packages` were not put there yet; None where that fails."""
    home = PEERS / name
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.is_file() or ready.read_text() != repr(packages):
        home.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=False)
        if done.returncode:
            print(f"{name}: cannot be installed here from {packages[0]}; left out", file=sys.stderr)
            return None
        ready.write_text(repr(packages))
    return str(python)


def _packages(tracelens: str) -> dict[str, list[str]]:
    """What each peer is installed from."""
    local = Path(tracelens)
    bare = local.is_dir() and (local / "HEAD").is_file()
    if not local.is_dir():
        source = f"git+{tracelens}"
    else:
        source = f"git+file://{local.resolve()}" if bare or (local / ".git").is_dir() else str(local.resolve())
    return {"hta": ["HolisticTraceAnalysis==0.5.0", "pandas>=2.3,<3", "setuptools"], "tracelens": [source]}


def _size(path: Path) -> float:
    """Megabytes of JSON text."""
    from trace_diff.ingest.notes import NoteBook
    from trace_diff.ingest.reader import chunks

    return sum(len(c) for c in chunks(path, NoteBook())) / 1e6


def files_table(files: list[Path], peers: bool, tracelens: str = TRACELENS) -> None:
    """Load plus all analyses, per file and tool."""
    tools: dict[str, tuple[str, str]] = {"trace_diff": (sys.executable, _OURS)}
    if peers:
        packages = _packages(tracelens)
        for name, code in (("hta", _HTA), ("tracelens", _TRACELENS)):
            python = _peer(name, packages[name])
            if python:
                tools[name] = (python, code)
    print(f"{'file':46} {'MB':>6} " + " ".join(f"{t + ' s':>13} {'MB/MB':>6} {'times':>6}" for t in tools))
    for path in files:
        size = _size(path)
        row, ours = f"{path.name[:46]:46} {size:6.1f} ", None
        for python, code in tools.values():
            got = _run(python, code, path)
            if got is None:
                row += f"{'fails':>13} {'':>6} {'':>6} "
                continue
            ours = ours or got[0]
            row += f"{got[0]:13.3f} {got[1] / size:6.1f} {got[0] / ours:6.1f} "
        print(row, flush=True)


def write_big(path: Path, megabytes: int) -> None:
    """A synthetic trace of about this size: eager decode steps with stacks, launches, kernels, flows and shapes."""
    with path.open("w") as out:
        out.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
        written, step, corr, first = 0, 0, 0, True
        while written < megabytes * 1_000_000:
            text = "" if first else ",\n"
            first = False
            text += ",\n".join(_step_events(step, corr))
            corr += 500
            step += 1
            out.write(text)
            written += len(text)
        out.write("]}\n")


def _step_events(step: int, corr: int) -> list[str]:
    base = step * 10_000_000
    events = [_event("user_annotation", "execute_context_0(0)_generation_1(1)", base, 9_900_000, 1, 1, {})]
    for k in range(500):
        at, ident = base + k * 19_000, corr + k + 1
        shapes = {"External id": ident, "Record function id": 0, "Input Dims": [[1, 4096], [4096, 4096]], "Ev Idx": ident,
                  "Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Strides": [[4096, 1], [1, 4096]]}  # fmt: skip
        events.append(_event("python_function", f"model/layer.py({k % 40}): forward", at, 18_500, 1, 1, {"Python id": ident}))
        events.append(_event("cpu_op", "aten::linear", at + 1_000, 15_000, 1, 1, shapes))
        events.append(_event("cpu_op", "aten::mm", at + 2_000, 12_000, 1, 1, shapes))
        call = {"External id": ident, "cbid": 211, "correlation": ident}
        events.append(_event("cuda_runtime", "cudaLaunchKernel", at + 5_000, 5_000, 1, 1, call))
        events.append(f'{{"ph": "s", "id": {ident}, "pid": 1, "tid": 1, "ts": {at / 1000:.3f}, "cat": "ac2g", "name": "ac2g"}}')
        device = {"External id": ident, "device": 0, "context": 1, "stream": 7, "correlation": ident, "grid": [64, 1, 1],
                  "block": [128, 1, 1], "registers per thread": 90, "shared memory": 49152, "est. achieved occupancy %": 4}  # fmt: skip
        events.append(_event("kernel", f"nvjet_sm90_tst_64x{8 * (k % 9)}_TNT", at + 12_000, 9_000, 0, 7, device))
    return events


def _event(cat: str, name: str, start: int, dur: int, pid: int, tid: int, args: dict) -> str:
    head = json.dumps({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid})[:-1]
    return f'{head}, "ts": {start // 1000}.{start % 1000:03d}, "dur": {dur // 1000}.{dur % 1000:03d},\n    "args": {json.dumps(args)}}}'


def gigabyte() -> None:
    """Target: 20 s and 3 GB on one core."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gigabyte.json"
        write_big(path, 1000)
        code = _OURS.replace("range(3)", "range(1)")
        begin = time.perf_counter()
        got = _run(sys.executable, code, path)
        wall = time.perf_counter() - begin
        print(f"1 GB trace ({path.stat().st_size / 1e6:.0f} MB): ", end="")
        print("fails" if got is None else f"{got[0]:.1f} CPU s, {wall:.1f} s wall with start, {got[1]:.0f} MB at peak")


def eight_ranks() -> None:
    """Target: 8 ranks of 50 MB in 5 s on 2 cores."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "rank0.json"
        write_big(first, 50)
        text = first.read_text()
        for rank in range(1, 8):
            (Path(folder) / f"rank{rank}.json").write_text(text.replace('"rank": 0, "world_size": 1', f'"rank": {rank}, "world_size": 8', 1))
        first.write_text(text.replace('"world_size": 1', '"world_size": 8', 1))
        code = (
            "import os, sys, time\nfrom trace_diff.ingest import load_many\nb = os.times(); a = time.perf_counter()\n"
            "n = len(load_many(sys.argv[1], workers=2)); e = os.times()\n"
            "print(n, time.perf_counter() - a, sum(e[:4]) - sum(b[:4]))"
        )
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, cwd=REPO, check=True)
        count, wall, cpu = done.stdout.split()
        print(f"{count} ranks of {first.stat().st_size / 1e6:.0f} MB, 2 processes: {float(wall):.2f} s wall, {float(cpu):.2f} CPU s")


def findings() -> None:
    """Target: a 3 MB trace from file to ranked findings in 3 s, start of the interpreter included."""
    path = SHARED / "baselines" / "cpu_vllm" / "eager_tp1_rank0.pt.trace.json.gz"
    code = (
        "import sys\nfrom trace_diff.ingest import load_many\nfrom trace_diff.api import analyse, find\n"
        "print(len(find(analyse(load_many(sys.argv[1], 'one')))))"
    )
    best = wall = 1e9
    answers = ""
    for _ in range(3):
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=REPO, check=True)
        after, wall, answers = os.times(), min(wall, time.perf_counter() - begin), done.stdout.strip()
        best = min(best, after.children_user + after.children_system - before.children_user - before.children_system)
    print(f"{_size(path):.1f} MB from file to {answers} answers, start included: {best:.2f} CPU s, {wall:.2f} s wall")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--peers", action="store_true", help="also measure HTA and TraceLens")
    parser.add_argument("--tracelens", metavar="SOURCE", default=TRACELENS, help="git address or folder; default %(default)s")
    parser.add_argument("--gigabyte", action="store_true", help="a synthetic trace of 1 GB")
    parser.add_argument("--ranks", action="store_true", help="eight ranks of 50 MB")
    parser.add_argument("--findings", action="store_true", help="a small trace from file to findings")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    files = options.files or [SHARED / f for f in LARGEST if (SHARED / f).is_file()]
    if files:
        files_table([f.resolve() for f in files], options.peers, options.tracelens)
    if options.gigabyte:
        gigabyte()
    if options.ranks:
        eight_ranks()
    if options.findings:
        findings()


if __name__ == "__main__":
    main()
