"""`optimize baseline`: capture another engine, list what is kept, check it.

Options in, one call, its answer out. Not for: the work (`baseline.py`), or the form of an index (`reports.baselines`).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

baseline_app = typer.Typer(help="Other engines on a stated cell: clean timings and short traces, kept with their provenance.")
From = Annotated[Path | None, typer.Option("--from", help="folder with an index.json; the bundled one if left out")]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


@baseline_app.command()
def capture(
    engine: Annotated[str, typer.Option("--engine", help="vllm, hf, a folder with a target.toml, or a command line with {socket} or {port} (and {model_dir}, {trace_dir}, {python})")],
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder with weights; the same for every engine")],
    mode: Annotated[str, typer.Option("--mode", help="eager or graph")] = "eager",
    phase: Annotated[str, typer.Option("--phase", help="decode or prefill")] = "decode",
    batch: Annotated[int, typer.Option("--batch")] = 1,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = 12,
    out: Annotated[Path | None, typer.Option("--out", help="folder to add it to; the bundled one if left out")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; cuda where there is a GPU")] = None,
    devices: Annotated[str, typer.Option("--devices", help="GPUs to use: 0,1")] = "",
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16 on a GPU, float32 on a CPU if left out")] = None,
    tp: Annotated[int, typer.Option("--tp", help="tensor-parallel ranks")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="clean timings, fresh prompts each")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="of the prompts: the same seed gives every engine the same")] = 0,
    python: Annotated[Path, typer.Option("--python", help="interpreter of the engine")] = Path(sys.executable),
    vllm_site: Annotated[Path | None, typer.Option("--vllm-site", help="folder with vLLM in it, for PYTHONPATH")] = None,
    engine_args: Annotated[str, typer.Option("--engine-args", help="more arguments for vllm or a target")] = "",
    name: Annotated[str | None, typer.Option("--id", help="of the baseline; made of device, engine, mode and cell if left out")] = None,
    label: Annotated[str | None, typer.Option("--label", help="for table heads")] = None,
    model_name: Annotated[str | None, typer.Option("--model-name", help="what the index says of the model and its weights")] = None,
    version: Annotated[str | None, typer.Option("--version", help="of an engine that does not say")] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="of the engine")] = None,
    sandbox: Annotated[str, typer.Option("--sandbox", help="level for a target folder")] = "auto",
    replace: Annotated[bool, typer.Option("--replace", help="an id that is there already")] = False,
) -> None:
    """Start a reference, time it with the profiler off, trace it, and keep a few steps."""
    from optimizer import baseline
    from optimizer.fingerprint import gpus
    from reports import baselines

    on = device or ("cuda" if gpus() else "cpu")
    want = baseline.Wanted(
        engine=engine, mode=mode, model=model, phase=phase, batch=batch, prompt_tokens=prompt_tokens, device=on,
        devices=tuple(int(n) for n in devices.split(",") if n.strip()), dtype=dtype or ("bfloat16" if on == "cuda" else "float32"), tp=tp,
        repeats=repeats, seed=seed, python=python, vllm_site=vllm_site, engine_args=tuple(shlex.split(engine_args)), id=name, label=label,
        model_name=model_name, version=version, licence=licence, sandbox=sandbox, replace=replace,
    )  # fmt: skip
    got = baseline.capture(want, out or baselines.ROOT)
    times = ", ".join(f"{key} {got.clean[key]:.4g}" for key in ("step_us", "ttft_ms", "tok_s") if got.clean.get(key) is not None)
    ratio = got.provenance["observer_ratio"]
    seen = "" if ratio is None else f"; with the profiler {ratio:.2f} times that"
    _console().print(f"{got.id}: {got.engine} {got.version}, {times}{seen}\nkept {', '.join(str(p) for p in got.paths)}", markup=False, highlight=False)


@baseline_app.command("list")
def show(where: From = None) -> None:
    """What is kept, with the clean timing of each."""
    from reports import baselines

    table = Table(box=None)
    for head in ("id", "engine", "mode", "device", "TP", "batch", "phases", "step us", "first token ms", "with profiler"):
        table.add_column(head, justify="right" if head in ("TP", "batch", "step us", "first token ms", "with profiler") else "left", overflow="fold")
    for t in baselines.load_index(where or baselines.ROOT, check=False):
        first, ratio = t.clean.get("ttft_ms") or t.clean.get("ttft1024_ms"), t.provenance.get("observer_ratio")
        table.add_row(
            t.id, f"{t.engine} {t.version}", t.mode, t.device, str(t.tp), "" if t.batch is None else str(t.batch), ", ".join(t.phases),
            "" if t.control_us is None else f"{t.control_us:.0f}", "" if first is None else f"{first:.1f}", "" if ratio is None else f"{ratio:.2f}x",
        )  # fmt: skip
    _console().print(table)


@baseline_app.command()
def verify(where: From = None) -> None:
    """Check every file against its sha256, and that it holds complete steps of what the index says."""
    from optimizer import baseline
    from reports import baselines

    bad = 0
    for trace in baselines.load_index(where or baselines.ROOT, check=False):
        why = baseline.fault(trace)
        bad += why is not None
        _console().print(f"{'NO' if why else 'ok'}  {trace.id}{': ' + why if why else ''}", markup=False, highlight=False)
    raise typer.Exit(1 if bad else 0)
