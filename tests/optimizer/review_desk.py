"""A place to review: two runs of the fake engine (one win, one parked patch) and a blueprint in a git repository.

With a hostile entry: markup in every text, a path out of the run, a patch with long lines, invisible characters and
thousands of lines. Not for: the loop's own tests.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import loop_fakes as fake
from loop_fakes import Fakes, new_run

from optimizer.knowledge.blueprint import Blueprint, Detection, Entry, Evidence, Gain, Gains, Scope, Status
from optimizer.loop import Loop

XSS = '<img src=x onerror="document.title=1"><script>window.pwned=1</script>\'";</textarea></title>'
LONG = "x = '" + "A" * 10_000 + "'"


@dataclass(frozen=True)
class Place:
    runs: Path
    blueprint: Path
    repo: Path

    def git(self, *args: str) -> str:
        return subprocess.run(["git", *args], cwd=self.repo, check=True, capture_output=True, text=True).stdout.strip()


def build(home: Path) -> Place:
    """Everything that can wait for a person."""
    place = Place(home / "runs", home / "repo" / "skills" / "blueprint", home / "repo")
    place.blueprint.mkdir(parents=True)
    book = Blueprint((), place.blueprint)
    for entry in (imported(), hostile()):
        book.put(entry)
        book.save(entry.topic)
    place.git("init", "-q", "-b", "main")
    place.git("config", "user.name", "Ada Reviewer")
    place.git("config", "user.email", "ada@example.org")
    place.git("add", ".")
    place.git("commit", "-q", "-m", "start")
    _run(place.runs / "20260101-win", Fakes, [fake.WIN, fake.NO_OP])
    _run(place.runs / "20260102-parked", lambda run, script: Fakes(run, script, lying_trace=True), [fake.WIN])
    return place


def _run(where: Path, fakes, script) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    run = new_run(where)
    Loop(fakes(run, script).services(), run).go()
    run.ledger.close()


def imported() -> Entry:
    return Entry(
        id="elsewhere.O1_inference_mode",
        topic="inference-mode",
        mechanism="inference-mode",
        title="Run decode in inference mode",
        rule="Wrap the step in torch.inference_mode().",
        why="Autograd records every operator otherwise.",
        detection=Detection(signature="version counters and autograd nodes in the decode step"),
        scope=Scope(),
        status=Status.IMPORTED,
    )


def hostile() -> Entry:
    """Everything that a stranger's file could hold."""
    return Entry(
        id="hostile.entry",
        topic="hostile",
        mechanism=XSS,
        title=f"{XSS} " + "T" * 3000,
        rule=f"{XSS}\n{{{{ 7 * 7 }}}} {{% include '/etc/passwd' %}}",
        why="\u202eevil\u202c " + XSS,
        detection=Detection(signature=XSS, before={XSS: 1.0}, after={}),
        scope=Scope(engine=[XSS], tp=[4], device=["cpu:x86_64"]),
        params={XSS: [XSS]},
        gain=Gains(marginal=Gain(ratio=0.9, ci95=(0.85, 0.95), pairs=6)),
        evidence=Evidence(
            run="../../etc",
            attempt=1,
            traces={"before: ../../../../etc/passwd": "0" * 64, f"after: {XSS}": "1" * 64, "after: traces/\x00": "2" * 64},
        ),
        patch=hostile_patch(),
        pitfalls=[XSS],
        status=Status.PROPOSED,
    )


def hostile_patch() -> str:
    head = (
        "diff --git a/engine/<script>alert(1)</script>.py b/engine/<script>alert(1)</script>.py\n"
        "--- a/engine/x.py\n+++ b/engine/x.py\n@@ -1,2 +1,4 @@\n same\n"
        f"-old </td></table>\n+{LONG}\n+if access_level != 'user\u202e \u2066# check\u2069 \u2066':\n+p\u0430ssword = 1\n"
    )
    many = "".join(f"+line {n}\n" for n in range(5000))
    return head + f"diff --git a/engine/huge.py b/engine/huge.py\n--- /dev/null\n+++ b/engine/huge.py\n@@ -0,0 +1,5000 @@\n{many}"
