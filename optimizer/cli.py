"""The `optimize` command line: options in, one call to the module that does the work, its answer out.

Every error of the user is one line on stderr and exit status 2. Not for: any work of its own.
"""

from __future__ import annotations

import errno
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from optimizer import start
from optimizer.baseline_cli import baseline_app
from optimizer.review import cli as review_cli

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Make a correct but slow LLM inference engine fast, one small measured patch at a time: "
        "`optimize --target tok/s`. A run can be stopped at any time and taken up with `optimize resume`."
    ),
)
Runs = Annotated[Path, typer.Option("--runs", help="folder of all runs")]
Which = Annotated[str | None, typer.Argument(help="id of a run, the beginning of one, or its folder; the newest if left out")]
RUNS = Path("runs")


WIDE = 160  # columns where there is no terminal: a log should hold whole tables


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE)


@app.callback(invoke_without_command=True)
def optimize(
    context: typer.Context,
    target: Annotated[str, typer.Option("--target", help="what to improve: tok/s, tpot, ttft, throughput@C, goodput@TTFT,TPOT, memory")] = "tok/s",
    goal: Annotated[str | None, typer.Option("--goal", help="stop when reached: 1.5x, or a number: tok/s, of ttft and tpot ms, of goodput requests/s, of memory MiB")] = None,
    target_dir: Annotated[Path | None, typer.Option("--target-dir", help="folder with a target.toml; this repository's engine/ if left out")] = None,
    python: Annotated[Path | None, typer.Option("--python", help="the target's interpreter; this one if left out")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="tensor-parallel ranks")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face model folder; with --load-format dummy also a name: qwen3-8b")] = None,
    load_format: Annotated[str, typer.Option("--load-format", help="auto: the folder's weights, random ones where it has none; safetensors; dummy: random ones from the seed")] = "auto",
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; cuda where there is a GPU")] = None,
    devices: Annotated[str | None, typer.Option("--devices", help="GPUs to use: 0,1")] = None,
    agent: Annotated[str, typer.Option("--agent", help="who proposes: playbook, claude, mcp, replay")] = "playbook",
    protocol: Annotated[str, typer.Option("--protocol", help="quick or full")] = "quick",
    attempts: Annotated[int | None, typer.Option("--attempts", help="at most so many")] = None,
    budget_minutes: Annotated[float | None, typer.Option("--budget-minutes", help="wall time of the whole run")] = None,
    max_rejections: Annotated[int | None, typer.Option("--max-rejections", help="in a row")] = start.MAX_REJECTIONS,
    max_usd: Annotated[float | None, typer.Option("--max-usd", help="for the proposer")] = None,
    gpu_minutes: Annotated[float | None, typer.Option("--gpu-minutes", help="of all GPUs together")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of everything drawn, but for the secret prompts")] = None,
    sandbox: Annotated[str, typer.Option("--sandbox", help="a lower level than the highest that works here: bwrap, namespaces, landlock; one step at most, and for the playbook only")] = "auto",
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="run candidates unconfined where nothing else works")] = False,
    accept_numeric_drift: Annotated[bool, typer.Option("--accept-numeric-drift", help="do not park patches whose tokens differ within the tolerance band")] = False,
    guard_margin: Annotated[list[str] | None, typer.Option("--guard-margin", help="NAME=SHARE: how much worse a guard may become, e.g. peak_memory_bytes=0.05; may be repeated")] = None,
    agent_option: Annotated[list[str] | None, typer.Option("--agent-option", help="KEY=VALUE for the agent, e.g. model=NAME; may be repeated")] = None,
    trust_skills: Annotated[list[Path] | None, typer.Option("--trust-skills", help="a further folder of skills; its code runs in this process")] = None,
    skills: Annotated[str, typer.Option("--skills", help="only these of the playbook's skills: a,b; all if left out")] = "",
    knowledge: Annotated[Path | None, typer.Option("--knowledge", help="folder of accepted knowledge; skills/blueprint if left out")] = None,
    without_knowledge: Annotated[str, typer.Option("--without-knowledge", help="ids of entries that the proposer does not get: a,b, or all")] = "",
    engine_args: Annotated[str, typer.Option("--engine-args", help="more arguments for the engine, the same in every arm: '--num-kv-blocks 4096'")] = "",
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="where this run is kept; runs/<id> if left out")] = None,
    runs: Runs = RUNS,
) -> None:
    """Run the loop (without a command)."""
    if context.invoked_subcommand is not None:
        return
    options = start.Options(
        metric=target, goal=goal, target_dir=target_dir, python=python, tp=tp, model=model, load_format=load_format, device=device,
        devices=devices, agent=agent, protocol=protocol, attempts=attempts, budget_minutes=budget_minutes,
        max_rejections=max_rejections, max_usd=max_usd, gpu_minutes=gpu_minutes, seed=seed,
        sandbox=sandbox, unsafe_no_sandbox=unsafe_no_sandbox, accept_numeric_drift=accept_numeric_drift, guard_margins=tuple(guard_margin or ()), run_dir=run_dir, runs=runs, trust_skills=tuple(trust_skills or ()), engine_args=engine_args, skills=skills,
        agent_options=tuple(agent_option or ()), knowledge=knowledge, without_knowledge=without_knowledge,
    )  # fmt: skip
    from optimizer import session

    out = console()
    run = start.prepare(options)
    session.greet(run, out)
    raise typer.Exit(session.work(run, out))


@app.command()
def init(directory: Path) -> None:
    """Draft a target.toml for an engine of your own."""
    from optimizer import target_init

    console().print(f"wrote {target_init.draft(directory)}; `optimize check {directory}` says what is still missing")


@app.command()
def check(directory: Path) -> None:
    """Say what keeps a folder from being optimised."""
    from optimizer import target_init

    problems = target_init.check(directory)
    for problem in problems:
        console().print(problem, markup=False)
    if not problems:
        console().print(f"{directory}: nothing is missing")
    raise typer.Exit(1 if problems else 0)


@app.command()
def resume(
    run: Which = None,
    attempts: Annotated[int | None, typer.Option("--attempts", help="a new limit")] = None,
    budget_minutes: Annotated[float | None, typer.Option("--budget-minutes", help="a new limit for the whole run")] = None,
    max_usd: Annotated[float | None, typer.Option("--max-usd", help="a new limit")] = None,
    give_up: Annotated[str | None, typer.Option("--give-up", help="why the open attempt is to end here, undecided")] = None,
    runs: Runs = RUNS,
) -> None:
    """Go on with a run that was stopped or killed."""
    from optimizer import session
    from optimizer.run import Limits, find, load

    found = load(find(runs, run))
    limits = Limits(attempts=attempts, wall_minutes=budget_minutes, usd=max_usd)
    raise typer.Exit(session.take_up(found, limits, console(), give_up))


@app.command()
def admit(
    run: str,
    attempt: int,
    reason: Annotated[str, typer.Option("--reason", help="why it may be judged")],
    reviewer: Annotated[str | None, typer.Option("--reviewer", help="your name; the user's if left out")] = None,
    runs: Runs = RUNS,
) -> None:
    """Let a parked patch be judged: `optimize resume` then tries it again."""
    import getpass

    from optimizer.review import admit as admitting
    from optimizer.run import find, load

    found = load(find(runs, run))
    why = admitting.admit(found, attempt, reviewer or getpass.getuser(), reason)
    console().print(f"attempt {attempt} was parked for: {why}\n`optimize resume {found.request.id}` judges it", markup=False)


@app.command()
def status(run: Which = None, runs: Runs = RUNS) -> None:
    """Show where a run stands; without an id also list all runs."""
    from optimizer import status as view
    from optimizer.run import find

    out = console()
    if run is None:
        out.print(view.overview(runs))
    out.print(view.status(find(runs, run)))


@app.command()
def report(
    run: Which = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="a page that follows a running loop, on 127.0.0.1")] = False,
    port: Annotated[int, typer.Option("--port", help="of --serve; any free one if left out")] = 0,
    runs: Runs = RUNS,
) -> None:
    """Write a run's report, or show it while the run works."""
    from optimizer.run import find
    from reports import html

    place = find(runs, run)
    if not serve:
        console().print(f"wrote {html.run_report(place, out or place / 'report')}")
        return
    from optimizer import localweb, report_web

    keys = localweb.Keys()
    localweb.serve(report_web.app(place, keys), keys, port, partial(console().print, markup=False, highlight=False, soft_wrap=True))


@app.command()
def apply(
    run: Which = None,
    branch: Annotated[str | None, typer.Option("--branch", help="make this branch instead of writing the tree")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="root of another checkout of the target")] = None,
    runs: Runs = RUNS,
) -> None:
    """Replay a run's accepted patches on your tree, or on a branch; all of them or none."""
    from optimizer import apply as applying
    from optimizer import state
    from optimizer.run import find, load

    found = load(find(runs, run))
    final = state.incumbent(found.ledger.lines(), found.base)
    root = to or found.target.root
    if branch:
        done = applying.to_branch(found.repo, found.base, final, root, branch)
    else:
        done = applying.to_tree(found.repo, found.base, final, root)
    console().print(f"applied {done.commits} patches to {done.where}: {', '.join(done.files) or 'it had them already'}")


@app.command()
def export(
    run: Which = None, out: Annotated[Path, typer.Option("--out", help="folder")] = Path("patches"), runs: Runs = RUNS
) -> None:
    """Write a run's accepted patches as a mailable series with the text of a pull request."""
    from optimizer import export as exporting
    from optimizer.run import find, load

    for path in exporting.export(load(find(runs, run)), out):
        console().print(str(path), markup=False)


@app.command()
def verify(run: Which = None, runs: Runs = RUNS) -> None:
    """Check offline that a run's ledger is whole and its patches were judged by the sealed gates."""
    from optimizer import verify as verifying
    from optimizer.run import find

    checks = verifying.verify(find(runs, run))
    _rows((c.what, c.ok, c.detail, "") for c in checks)
    raise typer.Exit(1 if any(c.ok is False for c in checks) else 0)


@app.command()
def reproduce(
    run: Which = None,
    patch: Annotated[int | None, typer.Option("--patch", help="one accepted attempt by its number; the first engine against the final one if left out")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="weights where the run's are not here; a real model folder, or one with the run's config.json")] = None,
    pairs: Annotated[int | None, typer.Option("--pairs", help="fresh launches of both; as many as the run's protocol if left out")] = None,
    devices: Annotated[str, typer.Option("--devices", help="GPUs to use: 0,1")] = "",
    keep: Annotated[Path | None, typer.Option("--keep", help="folder of what is done here")] = None,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="where no sandbox works")] = False,
    runs: Runs = RUNS,
) -> None:
    """Apply, gate and time a run's accepted patches again on this machine, from its base commit."""
    from optimizer import reproduce as again
    from optimizer.run import find, load, new_id
    from optimizer.view import Terminal

    if pairs is not None and pairs < 2:
        _fail("--pairs: an interval needs at least 2")
    record = load(find(runs, run))
    keep = keep or runs / f"{record.request.id}-again-{new_id()}"  # a record may lie where nothing should be added
    wanted = again.Options(patch, model, pairs, tuple(int(n) for n in devices.split(",") if n.strip()), keep, unsafe_no_sandbox)
    view = Terminal(console())
    with view.live():
        found = again.reproduce(record, wanted, view)
    for line in again.said(found):
        console().print(line, markup=False, highlight=False)
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def bench(
    run: Which = None,
    aiperf: Annotated[bool, typer.Option("--aiperf", help="AIPerf beside our own client, over HTTP")] = False,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 24,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 1,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2)] = 64,
    url: Annotated[list[str] | None, typer.Option("--url", help="another server that is up: label=http://host:port/model")] = None,
    vllm_site: Annotated[Path | None, typer.Option("--vllm-site", help="folder with vLLM in it, where the run's interpreter has none")] = None,
    runs: Runs = RUNS,
) -> None:
    """The first and the final engine of a run, vLLM where it is installed, and other servers, measured by AIPerf and by our own client."""
    from optimizer.run import find, load
    from optimizer.traffic import bench_aiperf as benching

    if not aiperf:
        _fail("bench knows --aiperf only; the loop's own measurement is `optimize`")
    work = benching.Workload(prompt_tokens, new_tokens, concurrency, requests)
    place = find(runs, run)
    found = benching.bench_run(load(place), work, url or (), vllm_site)
    for line in (*benching.lines(found), f"`optimize report {place.name}` shows them beside the run's own figures"):
        console().print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(engine["fault"] for engine in found["engines"]) else 0)


@app.command()
def doctor(python: Annotated[Path | None, typer.Option("--python", help="the target's interpreter")] = None) -> None:
    """Look at this machine and say what to install."""
    from optimizer import doctor as looking

    rows = list(looking.rows(python))
    _rows((row.what, row.ok, row.found, "" if row.ok else row.hint) for row in rows)
    raise typer.Exit(1 if any(row.ok is False for row in rows) else 0)


@app.command()
def seal(reason: Annotated[str, typer.Option("--reason", help="why the gates were changed")]) -> None:
    """Seal the gates as they are now and raise their version."""
    from optimizer import seal as sealing

    number = sealing.write(reason)
    console().print(f"gates version {number}, digest {sealing.digest()}")


@app.command()
def mcp(
    run: Annotated[str | None, typer.Option("--run", help="join this run at once")] = None,
    http: Annotated[int | None, typer.Option("--http", help="serve streamable HTTP on this port of 127.0.0.1 instead of stdio")] = None,
    trust_skills: Annotated[list[Path] | None, typer.Option("--trust-skills", help="a further folder of skills")] = None,
    runs: Runs = RUNS,
) -> None:
    """Offer the proposer's tools to a coding agent over the Model Context Protocol."""
    from optimizer.proposers import mcp_server

    mcp_server.main(runs, run, http, tuple(trust_skills or ()))


app.add_typer(baseline_app, name="baseline")
app.add_typer(review_cli.review_app, name="review")
app.add_typer(review_cli.knowledge_app, name="knowledge")


def _rows(rows: Any) -> None:
    table = Table(box=None, show_header=False)
    for what, ok, detail, hint in rows:
        mark = {True: "[green]ok[/green]", False: "[red]NO[/red]", None: "[dim]-[/dim]"}[ok]
        table.add_row(what, mark, detail, hint)
    console().print(table)


def main() -> None:
    """Run the command line; an error of the user is one line."""
    try:
        status = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:  # the outermost frame: known errors become one line
        usage = getattr(error, "format_message", None)  # click's errors, whichever click typer carries
        if usage is None and not _known(error):
            raise
        _fail(usage() if usage else str(error))
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _known(error: Exception) -> bool:
    """Errors whose message is meant for the user, by the modules that raise them; and a full disk."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EADDRINUSE):
        return True
    names = {
        "Refused", "TargetError", "RunError", "LedgerBroken", "LedgerBusy", "NotApplied", "NothingToExport",
        "SealBroken", "Differs", "LaunchError", "SandboxError", "OracleError", "DiagnoseError", "WeightsChanged",
        "BlueprintError", "ReviewError", "AblationError", "ReplayError", "AiperfError", "BaselineError", "BaselineCaptureError", "ReproduceError",
    }  # fmt: skip
    return type(error).__name__ in names


def _fail(message: str) -> None:
    sys.stderr.write(f"optimize: {' '.join(message.split())}\n" if "\n" not in message else f"optimize: {message}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
