"""`capture` takes only new, whole traces of every rank with enough steady steps, and says which check failed."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import build_trace
import pytest

from reports import trace_cli
from trace_diff import capture
from trace_diff.server import Server, ServerError
from trace_diff.types import Phase


@dataclass
class Fake:
    """What the fake server does wrong, and what it saw."""

    folder: Path
    ranks: int = 2
    steps: int = 5
    device: str = "cuda"
    wrong_count: bool = False
    no_profiler: bool = False
    writes: bool = True
    same_rank: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


def _handler(fake: Fake) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "local"

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            meta = {"tp": fake.ranks, "device": fake.device, "engine": "fake"}
            self._send(200, json.dumps({"data": [{"id": "m", "metadata": meta}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            fake.calls.append(self.path)
            if self.path == "/start_profile" and fake.no_profiler:
                return self._send(404, b'{"error": "no such route"}')
            if self.path == "/stop_profile" and fake.writes:
                for rank in range(fake.ranks):
                    rows = build_trace.events(steps=fake.steps)
                    said = 0 if fake.same_rank else rank
                    build_trace.write(fake.folder / f"t{len(fake.calls)}-rank{rank}.json", rows, rank=said, world=fake.ranks)
            if self.path != "/v1/completions":
                return self._send(200, b"{}")
            fake.prompts.append(body["prompt"])
            n = body["max_tokens"] - fake.wrong_count
            chunks = [{"choices": [{"text": "x", "index": 0}]} for _ in range(n)]
            chunks.append({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}})
            text = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
            self._send(200, text.encode(), "text/event-stream")

    return Handler


class _Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Fake, str]]:
    fake = Fake(tmp_path / "traces")
    fake.folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield fake, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


DECODE = capture.Workload(Phase.DECODE, 1, 6)
QUICK = capture.Limits(minutes=0.02)  # a failing capture waits this long for files


def test_a_capture_stores_every_rank_with_its_provenance(served: tuple[Fake, str], tmp_path: Path) -> None:
    fake, url = served
    got = capture.capture(url, fake.folder, tmp_path / "out", DECODE)
    assert got.files == ("rank0.json", "rank1.json") and got.steps == (5, 5)
    stored = json.loads((tmp_path / "out/decode/capture.json").read_text())
    assert stored["schedule"] == {"execute_context_0(0)_generation_1(1)": 5, "execute_context_1(12)_generation_0(0)": 1}
    assert stored["server"]["metadata"]["engine"] == "fake"
    assert stored["control_us"] > 0 and stored["perturbation"] == pytest.approx(stored["traced_us"] / stored["control_us"])
    assert fake.calls.index("/start_profile") == 2, "warm-up and control run before the profiler"


def test_every_prompt_is_fresh_and_has_the_length_of_the_cell(served: tuple[Fake, str], tmp_path: Path) -> None:
    fake, url = served
    fake.steps = 1
    work = capture.workloads(40, 8, 2, ["prefill"])[0]
    with pytest.raises(capture.CaptureError):  # one prefill step is too few
        capture.capture(url, fake.folder, tmp_path / "out", work, limits=QUICK)
    assert {len(p) for p in fake.prompts} == {40}
    assert len({tuple(p) for p in fake.prompts}) == len(fake.prompts) == 3 * 5 * 2


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"steps": 2}, "steps", "2 complete steady decode steps, 3 needed"),
        ({"writes": False}, "ranks", "0 new trace files"),
        ({"wrong_count": True}, "schedule", "asked for 6 new tokens, got 5"),
        ({"no_profiler": True}, "profiler", "404"),
        ({"same_rank": True}, "ranks", "rank 0 was also written"),
    ],
)
def test_an_unusable_capture_fails_by_name(
    served: tuple[Fake, str], tmp_path: Path, change: dict[str, Any], name: str, words: str
) -> None:
    fake, url = served
    for key, value in change.items():
        setattr(fake, key, value)
    with pytest.raises(capture.CaptureError, match=words) as caught:
        capture.capture(url, fake.folder, tmp_path / "out", DECODE, limits=QUICK)
    assert caught.value.name == name
    assert not (tmp_path / "out").exists()


def test_a_stale_file_does_not_count(served: tuple[Fake, str], tmp_path: Path) -> None:
    fake, url = served
    build_trace.write(fake.folder / "old-rank0.json", build_trace.events(), rank=0, world=2)
    build_trace.write(fake.folder / "old-rank1.json", build_trace.events(), rank=1, world=2)
    fake.writes = False
    with pytest.raises(capture.CaptureError, match="a stale file does not count"):
        capture.capture(url, fake.folder, tmp_path / "out", DECODE, limits=QUICK)


def test_a_trace_without_device_events_is_refused_on_a_gpu(tmp_path: Path) -> None:
    rows = [e for e in build_trace.events() if e.get("cat") not in ("kernel", "gpu_memcpy")]
    path = build_trace.write(tmp_path / "t.json", rows)
    with pytest.raises(capture.CaptureError, match="no device events"):
        capture._check(path, DECODE, device=True)


def test_a_trace_of_graph_capture_is_refused(tmp_path: Path) -> None:
    rows = build_trace.events()
    rows.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamBeginCapture", "pid": 1, "tid": 1, "ts": 120, "dur": 1})
    with pytest.raises(capture.CaptureError, match="graph capture"):
        capture._check(build_trace.write(tmp_path / "t.json", rows), DECODE, device=True)


def test_limits_are_kept(served: tuple[Fake, str], tmp_path: Path) -> None:
    fake, url = served
    with pytest.raises(capture.CaptureError, match="the limit is 4"):
        capture.capture(url, fake.folder, tmp_path / "o", DECODE, limits=capture.Limits(steps=4))
    with pytest.raises(capture.CaptureError, match="the limit is 1000"):
        capture.capture(url, fake.folder, tmp_path / "o", DECODE, limits=capture.Limits(bytes=1000))


def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    path = tmp_path / "s.sock"
    server = _Unix(str(path), _handler(fake))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        assert Server(f"unix://{path}").model()["id"] == "m"
        assert Server(str(path)).complete("m", [1, 2, 3], 4, timeout=5).tokens == 4
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ServerError, match="not a server address"):
        Server(url)


def _refused(path: Path, rows: list[dict[str, Any]], work: capture.Workload = DECODE, device: bool = True, **kw: Any) -> str:
    with pytest.raises(capture.CaptureError) as caught:
        capture._check(build_trace.write(path / "t.json", rows, **kw), work, device=device)
    return caught.value.name


def test_a_trace_of_another_schedule_than_asked_for_is_refused(tmp_path: Path) -> None:
    """Four sequences were to decode together, the server ran them one by one; a prompt was to be one step, it ran in chunks."""
    assert _refused(tmp_path, build_trace.events(), capture.Workload(Phase.DECODE, 1, 6, batch=4)) == "schedule"
    chunks = [
        {**e, "name": "execute_context_1(512)_generation_0(0)"} if e["name"].startswith("execute") else e for e in build_trace.events()
    ]
    assert _refused(tmp_path, chunks, capture.Workload(Phase.PREFILL, 2048, 1, repeat=5)) == "schedule"
    assert capture._check(tmp_path / "t.json", capture.Workload(Phase.PREFILL, 512, 1, repeat=5), device=True)[1].good


def test_a_trace_of_an_idle_server_is_refused_as_such(tmp_path: Path) -> None:
    rows = [{**e, "name": "execute_context_0(0)_generation_0(0)"} if e["name"].startswith("execute") else e for e in build_trace.events()]
    assert _refused(tmp_path, rows) == "steady"


def test_a_dummy_run_is_refused(tmp_path: Path) -> None:
    rows = build_trace.events()
    rows.append({"ph": "X", "cat": "python_function", "name": "vllm/gpu_model_runner.py(9): _dummy_run", "pid": 1, "tid": 1, "ts": 120, "dur": 1})
    assert _refused(tmp_path, rows) == "steady"


def test_a_cpu_engines_trace_without_operators_is_refused(tmp_path: Path) -> None:
    rows = [e for e in build_trace.events() if e.get("cat") == "user_annotation"]
    assert _refused(tmp_path, rows, device=False) == "device"


def test_one_file_of_a_larger_world_is_not_the_whole_run(tmp_path: Path) -> None:
    assert _refused(tmp_path, build_trace.events(), world=4) == "ranks"


def test_far_more_steps_than_asked_for_are_other_traffic(tmp_path: Path) -> None:
    path = build_trace.write(tmp_path / "t.json", build_trace.events(steps=30))
    with pytest.raises(capture.CaptureError, match="other traffic"):
        capture._check(path, DECODE, device=True, most_steps=6)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = build_trace.write(tmp_path / "t.json", build_trace.events())
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(capture.CaptureError, match="cut off"):
        capture._check(path, DECODE, device=True)


def test_the_context_of_a_captured_cell_comes_from_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, prompt in (("short", 1), ("long", 4096)):
        build_trace.write(tmp_path / name / "rank0.json", build_trace.events(launch_us=6.0))
        record = {"phase": "decode", "files": ["rank0.json"], "workload": {"batch": 1, "prompt_tokens": prompt, "new_tokens": 10}}
        (tmp_path / name / "capture.json").write_text(json.dumps(record))
    assert trace_cli.main([str(tmp_path / "short"), str(tmp_path / "long"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["diff"]["context"][0]["reasons"] == ["context: 6 tokens here, 4101 there"]
