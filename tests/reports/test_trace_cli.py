"""The trace-diff command line: what it prints, what it returns, and one clear line for everything that goes wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import build_run
import build_trace
import pytest

from reports import trace_cli


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cli")
    found = {
        "eager": build_trace.write(folder / "eager.json.gz", build_trace.events(autograd=True, launch_us=40.0)),
        "graph": build_trace.write(folder / "graph.json", build_trace.events(graph=True)),
    }
    for rank in range(2):
        build_run.write_trace(folder / "ranks" / f"rank{rank}.json.gz", rank, comm_us=800, autograd=False, world=2)
    return {**{k: str(v) for k, v in found.items()}, "ranks": str(folder / "ranks")}


def _run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = trace_cli.main(args)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_default_command_prints_the_table_and_the_findings(
    capsys: pytest.CaptureFixture[str], files: dict[str, str]
) -> None:
    code, out, _ = _run(capsys, files["eager"], files["graph"])
    assert code == 0
    assert "Where the step's wall time goes" in out and "Findings" in out and "graph launches" in out
    assert "graph needs" in out and "times as much" in out


def test_json_holds_what_the_python_api_says(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    code, out, _ = _run(capsys, files["eager"], files["graph"], "--json", "--label", "mine", "--label", "theirs")
    data = json.loads(out)
    assert code == 0
    assert [e["label"] for e in data["diff"]["engines"]] == ["mine", "theirs"]
    for at, engine in enumerate(data["diff"]["engines"]):
        parts = sum(r["us"][at] for r in data["diff"]["rows"] if r["kind"] == "wall")
        assert parts == pytest.approx(engine["wall_us"], abs=0.01)
    assert {f["status"] for f in data["findings"]} <= {"found", "not_found", "could_not_look"}


def test_other_cells_are_context_never_mixed(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    _, out, _ = _run(capsys, files["eager"], files["ranks"])
    assert "structure only" in out and "TP" in out
    assert "relative" in out and out.count("1.00x") == 1, "only the first engine has a time"


def test_show_json_accounts_exactly(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    code, out, _ = _run(capsys, "show", files["eager"], files["ranks"], "--json")
    ranks = json.loads(out)["ranks"]
    assert code == 0 and [r["rank"] for r in ranks] == [0, 0, 1]
    for rank in ranks:
        assert {"repaired", "quarantined", "truncated", "gpu_span_ns"} <= set(rank)
        for step in rank["steps"]:
            assert sum(step["parts"].values()) == step["wall_ns"]
    gpu = ranks[0]
    assert gpu["gpu_busy_ns"] + gpu["gpu_idle_ns"] == gpu["gpu_span_ns"]
    kernels = [e for e in build_trace.events(autograd=True, launch_us=40.0) if e.get("cat") in ("kernel", "gpu_memcpy")]
    assert gpu["gpu_busy_ns"] == round(sum(e["dur"] for e in kernels) * 1000)
    assert ranks[1]["gpu_busy_ns"] is None


def test_pages_and_exports_are_written(capsys: pytest.CaptureFixture[str], files: dict[str, str], tmp_path: Path) -> None:
    assert _run(capsys, files["eager"], files["graph"], "--html", str(tmp_path / "a.html"), "--markdown")[0] == 0
    assert _run(capsys, files["eager"], files["graph"], "--html", str(tmp_path / "b.html"))[0] == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert "graph replay, 21 kernels" in (tmp_path / "a.html").read_text()
    assert _run(capsys, "export", "--perfetto", files["eager"], files["graph"], "-o", str(tmp_path / "p.json.gz"))[0] == 0
    assert _run(capsys, "cut", files["eager"], "-o", str(tmp_path / "c.json.gz"), "--decode", "2")[0] == 0
    assert _run(capsys, "show", str(tmp_path / "c.json.gz"))[1].count("decode") == 2


def test_markdown_is_a_table_per_account(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    _, out, _ = _run(capsys, files["eager"], files["graph"], "--markdown")
    assert out.startswith("# eager against graph") and "| category | eager | graph |" in out


def test_fail_if_slower_speaks_through_the_exit_code(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    code, _, err = _run(capsys, files["eager"], files["graph"], "--fail-if-slower", "3%")
    assert code == 1 and "slower than graph, 3.0% allowed" in err
    assert _run(capsys, files["graph"], files["eager"], "--fail-if-slower", "3")[0] == 0
    code, _, err = _run(capsys, files["eager"], files["ranks"], "--fail-if-slower", "3%")
    assert code == 4 and "no comparable reference" in err


def test_explain_tells_found_from_not_found_from_could_not_look(
    capsys: pytest.CaptureFixture[str], files: dict[str, str]
) -> None:
    assert "comm-wait" in _run(capsys, "explain", "list")[1]
    code, out, _ = _run(capsys, "explain", "host-reads")
    assert code == 0 and len(out.splitlines()) > 2
    assert _run(capsys, "explain", "comm-wait", files["eager"])[0] == 6
    code, out, _ = _run(capsys, "explain", "launch-bound-decode", files["eager"])
    assert code == 0 and "formula:" in out
    code, _, err = _run(capsys, "explain", "nope")
    assert code == 2 and "host-reads" in err


def test_a_bundled_trace_is_named_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "show", "baseline:cpu-vllm-eager-tp1")
    assert code == 0 and "rank 0 of 1" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"hello", "byte 0"), (b"", "empty|byte 0"), (b'{"a": 1}', "byte 0|no 4 neighbouring"), (b"\x1f\x8b\x08\x00", "bytes")],
)
def test_an_unreadable_file_gives_one_line_with_file_and_byte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes, said: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text)
    for args in ([str(path)], ["cut", str(path), "-o", str(tmp_path / "o.json")], ["export", str(path)]):
        code, out, err = _run(capsys, *args)
        assert code in (3, 4) and out == ""
        assert err.startswith("trace-diff: ") and len(err.splitlines()) == 1
        assert "broken.json" in err and re.search(said, err), err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["/no/such/file"], 3, "no such file"),
        (["baseline:nope"], 3, "h200-vllm-graph"),
        (["EAGER", "--phase", "prefill", "--control-us", "x=5"], 2, "no such label"),
        (["EAGER", "--map", "GRAPH"], 4, "no Python frames"),
        (["EAGER", "--html", "/proc/nope/x.html"], 3, "/proc/nope/x.html"),
        (["capture", "http://127.0.0.1:1", "--trace-dir", "/tmp"], 5, "127.0.0.1:1"),
    ],
)
def test_errors_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], files: dict[str, str], args: list[str], code: int, words: str
) -> None:
    got, _, err = _run(capsys, *[files.get(a.lower(), a) for a in args])
    assert got == code and words in err and "Traceback" not in err


def test_a_wrong_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        trace_cli.main(["--fail-if-slower", "much", "a"])
    assert stop.value.code == 2
    assert "such as 3%" in capsys.readouterr().err


def test_it_starts_light_and_never_imports_torch(files: dict[str, str]) -> None:
    code = (
        "import sys; from reports import trace_cli; trace_cli.parser().format_help(); early = set(sys.modules)\n"
        f"trace_cli.main({[files['eager'], files['graph'], '--html', '/dev/null']!r})\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'rich', 'jinja2', 'scipy'}\n"
        "assert not heavy & early, heavy & early\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_demo_says_from_data_that_autograd_was_the_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = _run(capsys, "demo", "--html", str(tmp_path / "d.html"))
    assert code == 0
    words = " ".join(out.split())
    assert "inference_mode: the trace said 'Autograd recording is on" in words
    assert "measured 8.75 ms per token" in words
    assert ".item() removal" in words and "within the noise" in words
    assert (tmp_path / "d.html").stat().st_size < 3_000_000


def test_the_critical_path_says_when_hta_is_not_there(
    capsys: pytest.CaptureFixture[str], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = _run(capsys, "critical-path", files["eager"])
    assert code == 4 and "not installed: pip install" in err


def test_every_rule_is_explained_by_the_name_that_reports_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    from trace_diff.findings import RULES

    for module in RULES:
        code, out, _ = _run(capsys, "explain", module.RULE)
        assert code == 0 and out.startswith(module.RULE) and "Bound:" in out


def test_show_takes_the_files_of_one_run_together_and_names_the_late_rank(
    capsys: pytest.CaptureFixture[str], shared: Path
) -> None:
    files = [str(shared / "baselines" / "h200_tp2" / f"vllm_tp2_eager_custom_rank{r}.json.gz") for r in (0, 1)]
    code, out, _ = _run(capsys, "show", *files, "--json")
    data = json.loads(out)
    assert code == 0 and [r["rank"] for r in data["ranks"]] == [0, 1]
    assert data["sets"][0]["late"]["rank"] == 0
    assert all(sum(s["parts"].values()) == s["wall_ns"] for r in data["ranks"] for s in r["steps"])
    assert any("comm.wait" in s["parts"] for s in data["ranks"][1]["steps"])
