"""Command line of the knowledge blueprint: `optimize review ...` and `optimize knowledge ...`.

Not for: what a decision does (queue.py), or checks (knowledge/check.py).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

BLUEPRINT = Path(__file__).resolve().parents[2] / "skills" / "blueprint"  # knowledge.BLUEPRINT, without its imports
review_app = typer.Typer(help="Look at knowledge entries that wait for a person; accept or reject them.", no_args_is_help=False)
knowledge_app = typer.Typer(help="Check, import and export the knowledge blueprint.", no_args_is_help=True)
Runs = Annotated[Path, typer.Option("--runs", help="folder of all runs")]
Folder = Annotated[Path, typer.Option("--blueprint", help="folder of the blueprint")]
Reviewer = Annotated[str | None, typer.Option("--reviewer", help="your name; git's user.name if left out")]
RUNS = Path("runs")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


@review_app.callback(invoke_without_command=True)
def listing(
    context: typer.Context,
    web: Annotated[bool, typer.Option("--web", help="pages on 127.0.0.1 instead of the terminal")] = False,
    port: Annotated[int, typer.Option("--port", help="of --web; any free one if left out")] = 0,
    reviewer: Reviewer = None,
    runs: Runs = RUNS,
    blueprint: Folder = BLUEPRINT,
) -> None:
    """List what waits: knowledge entries, and patches that were parked."""
    if context.invoked_subcommand is not None:
        return
    if web:
        from optimizer import localweb
        from optimizer.review import web as review_web

        keys = localweb.Keys()
        pages = review_web.app(runs, keys, blueprint, reviewer)
        localweb.serve(pages, keys, port, partial(_console().print, markup=False, highlight=False, soft_wrap=True))
        return
    from optimizer.review import parked
    from optimizer.review import queue as review

    out = _console()
    out.print(review.table(review.queue(runs, blueprint)))
    for item in parked.waiting(runs):
        words = f"parked: run {item.run.name} attempt {item.attempt}: {item.reason or item.stage}: {item.detail}"
        out.print(f"{words}; `optimize admit {item.run.name} {item.attempt} --reason ...`, or `optimize review --web`", markup=False)


@review_app.command("show")
def show(entry: str, runs: Runs = RUNS, blueprint: Folder = BLUEPRINT) -> None:
    """Show one entry with its evidence, its patch and what the validator says."""
    from optimizer.review import queue as review

    _console().print(review.show(review.find(review.queue(runs, blueprint), entry), blueprint))


@review_app.command("accept")
def accept(
    entry: str,
    reason: Annotated[str | None, typer.Option("--reason", help="why")] = None,
    scope: Annotated[list[str] | None, typer.Option("--scope", help="FIELD=VALUE[,VALUE...]: replace a field of the scope; `any` widens it")] = None,
    reviewer: Reviewer = None,
    runs: Runs = RUNS,
    blueprint: Folder = BLUEPRINT,
) -> None:
    """Admit an entry: proposers read it from now on where its scope holds."""
    from optimizer.review import queue as review

    item = review.find(review.queue(runs, blueprint), entry)
    done = review.accept(item, reviewer, reason, _scope(scope or []), blueprint)
    _console().print(f"accepted {done.id}, reviewed by {done.reviewer}", markup=False)


@review_app.command("reject")
def reject(
    entry: str,
    reason: Annotated[str, typer.Option("--reason", help="why")],
    reviewer: Reviewer = None,
    runs: Runs = RUNS,
    blueprint: Folder = BLUEPRINT,
) -> None:
    """Keep an entry out; it stays on file with the reason."""
    from optimizer.review import queue as review

    done = review.reject(review.find(review.queue(runs, blueprint), entry), reason, reviewer, blueprint)
    _console().print(f"rejected {done.id}, reviewed by {done.reviewer}", markup=False)


def _scope(given: list[str]) -> dict[str, list[Any]]:
    from optimizer.review.queue import ReviewError

    found: dict[str, list[Any]] = {}
    for text in given:
        name, sign, values = text.partition("=")
        if not sign:
            raise ReviewError(f"--scope {text}: write FIELD=VALUE")
        found[name] = [int(v) if v.isdigit() else v for v in values.split(",")]
    return found


def _read(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises BlueprintError naming the file."""
    from optimizer.knowledge.blueprint import BlueprintError

    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BlueprintError(f"{file}: {error}") from None
    if not isinstance(data, dict):
        raise BlueprintError(f"{file}: not a JSON object")
    return data


@knowledge_app.command("check")
def check(file: Annotated[Path | None, typer.Argument(help="a MetaInfer blueprint; our own if left out")] = None, blueprint: Folder = BLUEPRINT) -> None:
    """Find contradictions, stale evidence and advice that loosens gates.

    Exit 1 when one blocks: in our own blueprint, when an accepted entry has it; the others wait for a person anyway.
    """
    from optimizer import seal
    from optimizer.knowledge import check as blueprint_check
    from optimizer.knowledge import prose as blueprint_prose
    from optimizer.knowledge.blueprint import Blueprint, Status
    from optimizer.review import queue as review

    fatal: set[str] | None = None
    if file is None:
        entries = Blueprint.load(blueprint).entries()
        here = review.present(review.Item(e, None) for e in entries)
        found = blueprint_check.check(entries, gates_digest=seal.digest(), files=here)
        fatal = {e.id for e in entries if e.status is Status.ACCEPTED}
    else:
        found = blueprint_prose.check(_read(file))
    for problem in found:
        _console().print(f"{'blocks' if problem.blocking else 'note  '}  {problem}", markup=False)
    _console().print(f"{len(found)} problems")
    raise typer.Exit(1 if any(p.blocking and (fatal is None or fatal & set(p.entries)) for p in found) else 0)


@knowledge_app.command("import")
def import_(file: Path, repository: Annotated[str, typer.Option("--repository", help="where the file comes from")] = "", blueprint: Folder = BLUEPRINT) -> None:
    """Take a MetaInfer inference_blueprint.json in as `imported` entries; those already there are left alone."""
    from optimizer.knowledge.blueprint import Blueprint, SourceRef
    from optimizer.knowledge.metainfer import import_entries

    source = SourceRef(repository=repository, file=file.name) if repository else None
    book = Blueprint.load(blueprint) if blueprint.is_dir() else Blueprint((), blueprint)
    known = {e.id for e in book.entries()}
    new = [e for e in import_entries(_read(file), source) if e.id not in known]
    for entry in new:
        book.put(entry)
    for topic in sorted({e.topic for e in new}):
        book.save(topic, blueprint)
    _console().print(f"imported {len(new)} entries; `optimize review` shows them")


@knowledge_app.command("propose")
def propose(
    run_dir: Path,
    name: Annotated[str | None, typer.Option("--name", help="stands for the run in the entries' ids; the run's own id if left out")] = None,
    blueprint: Folder = BLUEPRINT,
) -> None:
    """Put what a run taught into the blueprint as `proposed` entries, for reviewers who do not have the run."""
    from optimizer.knowledge import writeback

    done = writeback.ship(run_dir, blueprint, name)
    for entry in done:
        _console().print(f"proposed {entry.id}: {entry.title}", markup=False)
    _console().print(f"{len(done)} entries in {blueprint}; `optimize review` shows them", markup=False)


@knowledge_app.command("ablate")
def ablate(
    entries: Annotated[list[str] | None, typer.Argument(help="accepted entries that one arm does without")] = None,
    every: Annotated[bool, typer.Option("--all", help="without any entry instead")] = False,
    target: Annotated[str, typer.Option("--target", help="what to improve")] = "tok/s",
    target_dir: Annotated[Path | None, typer.Option("--target-dir", help="folder with a target.toml; this repository's engine/ if left out")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face model folder")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="tensor-parallel ranks")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda")] = None,
    protocol: Annotated[str, typer.Option("--protocol", help="quick or full")] = "quick",
    skills: Annotated[str, typer.Option("--skills", help="only these of the playbook's skills")] = "",
    attempts: Annotated[int, typer.Option("--attempts", help="budget of every run")] = 6,
    budget_minutes: Annotated[float | None, typer.Option("--budget-minutes", help="wall time of every run")] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="how many; two runs each")] = 5,
    share: Annotated[float, typer.Option("--share", help="of the final gain, that is to be reached")] = 0.9,
    jobs: Annotated[int, typer.Option("--jobs", help="runs side by side, each on CPUs of its own")] = 1,
    cpus_per_job: Annotated[int | None, typer.Option("--cpus-per-job", help="an equal part of all if left out")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder of the runs; what is finished there is not run again")] = RUNS / "ablation",
    blueprint: Folder = BLUEPRINT,
) -> None:
    """Say whether knowledge pays: the same budget with and without it, attempts and time to a share of the final gain."""
    from optimizer import start
    from optimizer.knowledge import trials

    if every == bool(entries):
        raise trials.AblationError("name entries, or give --all")
    given = start.Options(
        metric=target, target_dir=target_dir, model=model, tp=tp, device=device, protocol=protocol, skills=skills,
        attempts=attempts, budget_minutes=budget_minutes,
    )  # fmt: skip
    plan = trials.Plan(out, blueprint, trials.arguments(given), tuple(range(1, seeds + 1)), tuple(entries or ()), share, jobs, cpus_per_job)
    trials.check(plan)
    trials.probe(plan, given)
    console = _console()
    found = trials.ablate(plan, say=lambda text: console.print(text, markup=False, highlight=False))
    trials.show(found, console)
    raise typer.Exit(0 if found.pays is not False else 1)


@knowledge_app.command("export")
def export(base: Path, out: Path, blueprint: Folder = BLUEPRINT) -> None:
    """Write BASE, a MetaInfer blueprint, with our accepted entries added to OUT."""
    from optimizer.knowledge.blueprint import Blueprint
    from optimizer.knowledge.metainfer import export_entries

    data = _read(base)
    done = export_entries(Blueprint.load(blueprint).entries(), data, datetime.now(UTC).date().isoformat())
    out.write_text(json.dumps(done, indent=2, ensure_ascii=False) + "\n", "utf-8")
    _console().print(f"wrote {out}", markup=False)
