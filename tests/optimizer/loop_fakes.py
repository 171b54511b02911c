"""A run on the fake engine with faked services: its STEP_US is its speed, a fake clock pays for every pair.

Everything that decides (ledger, repository, accept, budget) is real; what would take time (launches, the oracle,
profiling) is replaced. With `sealed` the real quick gates judge the real server in its real sandbox.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer import gates
from optimizer.budget import Budget
from optimizer.ledger import Ledger
from optimizer.measure import PROTOCOLS, CandidateFailed
from optimizer.patching import apply_edits
from optimizer.run import Limits, Run, create
from optimizer.run import Request as RunRequest
from optimizer.runrepo import matches
from optimizer.services import Capture, Diagnosis, NoProposal, Question, Services
from optimizer.state import wall_s
from optimizer.target import load_target
from optimizer.traffic.prompts import PromptSource
from optimizer.truth.oracle import BANDS, Score
from optimizer.types import Edit, GateResult, LaunchSpec, Pair, Patch, RejectReason, Series, Stage, Stream
from optimizer.view import Quiet
from trace_diff.types import Finding, Status

FAKES = Path(__file__).resolve().parent.parent / "fakes"
ENGINE, WEIGHTS = FAKES / "engine", FAKES / "weights"
VOCABULARY = json.loads((WEIGHTS / "config.json").read_text())["vocab_size"]
READ_US = 50
BASE_US = 1000


def edit(old: str, new: str, file: str = "model.py", **fields: Any) -> Patch:
    """A patch of the fake engine by one search and replace."""
    about = {"finding_ids": ("host-reads",), "mechanism": "test", "predicted_us": 100.0, "title": f"{old} -> {new}"}
    return Patch(edits=(Edit(file, old, new),), **{**about, **fields})


def speed(step_us: int, was: int = BASE_US, **fields: Any) -> Patch:
    """A patch after which a step costs `step_us`."""
    return edit(f"STEP_US = {was}\n", f"STEP_US = {step_us}\n", **fields)


def one(patch: Patch) -> Series:
    return Series((patch,), "scripted")


WIN = one(speed(700, title="faster"))
WRONG_TOKENS = one(edit("ids.append(next_token(weights, ids, vocabulary))", "ids.append(7)", title="wrong"))
HANG = one(edit("    ids = list(prompt)\n", "    while True:\n        pass\n    ids = list(prompt)\n", title="hangs"))
CRASH = one(edit("import hashlib\n", "import hashlib\n\nraise RuntimeError('no')\n", title="crashes"))
NO_OP = one(
    Patch(
        edits=(
            Edit("model.py", "digest = hashlib.sha256(weights", "mixed = hashlib.sha256(weights"),
            Edit("model.py", "int.from_bytes(digest[:4]", "int.from_bytes(mixed[:4]"),
        ),
        finding_ids=("host-reads",),
        mechanism="rename",
        predicted_us=50.0,
        title="rename",
    )
)
GATE_EDIT = one(edit("", "def run():\n    return True\n", file="optimizer/gates/run.py", title="edits a gate"))
ENABLED_WIN = Series(
    (edit("HOST_READS = 4\n", "HOST_READS = 3\n", title="enabler", predicted_us=0.0), speed(700, title="pays")), "scripted"
)


class FakeClock:
    """Seconds that only pass when something is paid for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def constants(tree: Path) -> dict[str, int]:
    """STEP_US and HOST_READS of a tree's model.py, without running it."""
    found = {}
    for line in (tree / "model.py").read_text().splitlines():
        name, _, value = line.partition(" = ")
        if name in ("STEP_US", "HOST_READS"):
            found[name] = int(value)
    return found


def tokens(tree: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """What a tree's model really generates, in this process."""
    model = runpy.run_path(str(tree / "model.py"))
    return list(model["generate"]((WEIGHTS / "model.safetensors").read_bytes(), list(prompt), count, VOCABULARY))


def oracle(prompt: tuple[int, ...], count: int) -> list[int]:
    """The right tokens: the fake model's rule, written down again."""
    weights, ids = (WEIGHTS / "model.safetensors").read_bytes(), list(prompt)
    for _ in range(count):
        digest = hashlib.sha256(weights + repr(ids).encode()).digest()
        ids.append(2 + int.from_bytes(digest[:4], "big") % (VOCABULARY - 2))
    return ids[len(prompt) :]


@dataclass
class Fakes:
    """Builds the Services of one run. `script` holds the proposals by attempt number, from 1."""

    run: Run
    script: list[Series] = field(default_factory=list)
    noise: float = 0.002
    sealed: bool = False  # the real quick gates on the real server in its sandbox
    pair_s: float = 10.0
    clock: FakeClock = field(default_factory=FakeClock)
    protocol: str = "quick"
    view: Quiet = field(default_factory=Quiet)
    asked: list[int] = field(default_factory=list)
    on_call: Callable[[str], None] = lambda what: None
    lying_trace: bool = False  # traces show no change

    def services(self) -> Services:
        protocol = PROTOCOLS[self.protocol]
        budget = Budget(
            self.run.request.limits,
            protocol,
            self.run.ledger.lines,
            self.clock,
            earlier_s=wall_s(self.run.ledger.lines()[:-1]),
        )
        return Services(
            protocol=protocol,
            budget=budget,
            view=self.view,
            capture=self.capture,
            references=lambda traces, here: [],
            diagnose=self.diagnose,
            propose=self.propose,
            apply_edits=apply_edits,
            gates=self.gates,
            run_pair=self.run_pair,
            check_seal=lambda: self.on_call("seal"),
            learn=self.learn,
        )

    def capture(self, spec: LaunchSpec, out: Path) -> Capture:
        self.on_call("capture")
        self.clock.now += 5.0
        traces = tuple(fake_trace(spec.tree, out, rank, spec.tp) for rank in range(spec.tp))
        about = constants(ENGINE if self.lying_trace else spec.tree)
        return Capture(out.name, traces, spec.tp, 1, float(about["STEP_US"]), about, 5.0)

    def diagnose(self, capture: Capture, references: Any) -> Diagnosis:
        self.on_call("diagnose")
        reads, step = capture.metadata["HOST_READS"], capture.metadata["STEP_US"]
        found = [
            Finding("host-reads", "host-reads", Status.FOUND if reads else Status.NOT_FOUND, "host reads",
                    bound_us=float(reads * READ_US) if reads else None),
            Finding("launch-bound", "launch-bound", Status.FOUND, "launch bound", bound_us=step * 0.8),
        ]  # fmt: skip
        return Diagnosis(tuple(found), float(step), 1)

    def propose(self, question: Question) -> Series | NoProposal:
        self.on_call("propose")
        self.asked.append(question.attempt)
        if question.attempt > len(self.script):
            return NoProposal("the script has ended")
        return self.script[question.attempt - 1]

    def gates(self, stage: str, candidate: LaunchSpec, incumbent: LaunchSpec, base: str, commit: str) -> Iterator[GateResult]:
        if self.sealed:
            yield from self._sealed_gates(stage, candidate, incumbent, base, commit)
            return
        self.on_call(f"gate scope {stage}")
        self.clock.now += 1.0
        allowed = self.run.target.editable
        outside = [c.path for c in self.run.repo.name_status(base, commit) if not matches(c.path, allowed)]
        if outside:
            yield GateResult("scope", "G01", False, RejectReason.SCOPE, f"outside: {outside}", 1.0)
            return
        yield GateResult("scope", "G01", True, seconds=1.0)
        if stage == "static":
            return
        self.on_call(f"gate greedy {stage}")
        yield light_greedy(candidate)

    def _sealed_gates(self, stage: str, *job: Any) -> Iterator[GateResult]:
        names = ("candidate", "incumbent", "base_commit", "candidate_commit")
        context = gates.GateContext(
            **dict(zip(names, job, strict=True)),
            repo=self.run.repo.git_dir,
            target=self.run.target,
            oracle=FakeOracle(),  # type: ignore[arg-type]
            prompts=PromptSource(b"k" * 32, WEIGHTS),
            protocol=replace(PROTOCOLS[self.protocol], full_gates=()),
            run_dir=self.run.dir,
        )
        return gates.run(stage, context)

    def run_pair(self, a: LaunchSpec, b: LaunchSpec, stage: Stage, index: int, order: str) -> Pair:
        self.on_call(f"pair {stage}")
        self.clock.now += self.pair_s
        if not self.sealed and tokens(b.tree, (5, 6, 7), 4) != oracle((5, 6, 7), 4):
            raise CandidateFailed(RejectReason.WRONG_TOKENS, "token 0 of a timed stream")
        times = [constants(spec.tree)["STEP_US"] * self._noise(stage, index, arm) for arm, spec in (("a", a), ("b", b))]
        guards = {"ttft_p50_us": (times[0] * 5, times[1] * 5)}
        return Pair(stage, index, order, f"sha-{stage}-{index}", times[0], times[1], guards, None, self.pair_s)

    def _noise(self, stage: str, index: int, arm: str) -> float:
        return math.exp(random.Random(f"{self.run.request.seed}/{stage}/{index}/{arm}").gauss(0, self.noise))

    def learn(self, number: int | None) -> list[str]:
        self.on_call("learn")
        return [f"entry-{number}"]


def light_greedy(candidate: LaunchSpec) -> GateResult:
    good = tokens(candidate.tree, (3, 4, 5), 6) == oracle((3, 4, 5), 6)
    return GateResult("greedy", "G08", good, None if good else RejectReason.WRONG_TOKENS, "" if good else "token 0", 1.0)


class FakeOracle:
    """The fake model's rule behind the oracle's surface."""

    bands = BANDS["float32"]

    def at(self, model_dir: Path) -> FakeOracle:
        return self

    def score(self, streams: list[Stream]) -> list[Score]:
        return [self._one(stream) for stream in streams]

    def _one(self, stream: Stream) -> Score:
        right = oracle(stream.prompt_ids, len(stream.token_ids))
        bad = next((i for i, pair in enumerate(zip(stream.token_ids, right, strict=True)) if pair[0] != pair[1]), None)
        return Score(bad is None, bad, 0.0 if bad is None else 9.0, "equal" if bad is None else "wrong")


def fake_trace(tree: Path, out: Path, rank: int, world: int, steps: int = 8) -> Path:
    """The trace that the tree's own server would write."""
    out.mkdir(parents=True, exist_ok=True)
    saved = sys.modules.get("model"), list(sys.path)
    sys.modules.pop("model", None)
    sys.path.insert(0, str(tree))
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return runpy.run_path(str(tree / "tracing.py"))["write"](out, rank, world, steps)
    finally:
        sys.dont_write_bytecode = keep
        sys.path[:] = saved[1]
        sys.modules.pop("model", None)
        if saved[0] is not None:
            sys.modules["model"] = saved[0]


def new_run(place: Path, limits: Limits | None = None, engine: Path = ENGINE, **fields: Any) -> Run:
    """A run of the fake engine in a folder."""
    target = load_target(engine)
    request = RunRequest(
        id=place.name,
        created_utc="2026-01-01T00:00:00+00:00",
        target_dir=engine,
        target=target.name,
        target_file="target.toml",
        python=Path(sys.executable),
        model_dir=WEIGHTS,
        metric="tok/s",
        tp=1,
        device="cpu",
        dtype="float32",
        agent="scripted",
        protocol="quick",
        seed=7,
        limits=limits or Limits(),
        gates_digest="digest-of-seal",
        sandbox_level="bwrap",
        prompt_key="00" * 32,
        environment={"hash": "env"},
    )
    return create(place.parent, replace(request, **fields), target, place)


def kinds(run: Run) -> list[str]:
    return [line["kind"] for line in Ledger(run.dir / "ledger.jsonl").lines()]
