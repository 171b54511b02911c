"""The nouns of the loop: what its steps hand to each other.

Frozen, slotted dataclasses only; no behaviour beyond derived properties. Units are in the names. A value
that does not exist is None, never 0. Not for: anything a candidate process may construct (nothing here is
read from a candidate's output without passing through `client.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    ACCEPT = "accept"
    REJECT = "reject"
    UNDECIDED = "undecided"  # the effect is below what could be resolved
    PARKED = "parked"  # waits for a person; the run goes on without it


class Stage(StrEnum):
    """Stages of a measurement; each uses pairs of its own."""

    CALIBRATE = "calibrate"
    SCREEN = "screen"
    DECIDE = "decide"
    CONFIRM = "confirm"
    CANARY = "canary"
    HEADLINE = "headline"
    ABLATE = "ablate"


class RejectReason(StrEnum):
    """Why a candidate was stopped: the `reason` of a `rejected` ledger line."""

    DECLINED = "declined"  # the proposer's patch did not apply
    SCOPE = "scope"  # outside the patch envelope
    POLICY = "policy"  # source check
    SEAL = "seal"  # gates changed
    BOOT = "boot"  # did not start
    CRASH = "crash"  # died while being judged or timed
    HANG = "hang"  # a deadline passed
    WRONG_TOKENS = "wrong_tokens"
    TOKEN_ACCOUNTING = "token_accounting"
    SHAPES = "shapes"
    SAMPLING = "sampling"
    WEIGHTS = "weights"  # weight swap or perturbation probe
    PHYSICS = "physics"  # faster than bytes and FLOPs allow
    WITNESS = "witness"  # trace does not show the model's arithmetic
    RESOURCES = "resources"
    RACES = "races"
    START_UP = "start_up"
    DRIFT = "drift"
    NOT_ACTIVATED = "not_activated"
    GUARD = "guard"  # another metric or traffic shape got worse
    NO_GAIN = "no_gain"
    NO_BUDGET = "no_budget"
    INFRASTRUCTURE = "infrastructure"  # disk full, vanished device: named in detail


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to optimise, as its `target.toml` declares it."""

    root: Path  # paths in `editable` and `frozen` are relative to this
    directory: Path  # the folder that holds target.toml: what the snapshot holds
    name: str
    serve: tuple[str, ...]  # argv template
    editable: tuple[str, ...]
    frozen: tuple[str, ...]
    devices: tuple[str, ...]
    tp: tuple[int, ...]
    dtype: dict[str, str]
    start_timeout_s: float
    small_cache: tuple[str, ...] = ()  # more arguments for a KV cache of {pages} pages, so that gates can fill it


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything needed to start one arm: a self-contained job description."""

    tree: Path  # checkout holding the engine (candidate or incumbent)
    target: Target
    python: Path
    model_dir: Path
    tp: int
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    probes: frozenset[str] = frozenset()  # for launcher.py: "nan_fill", "no_cache_alloc", "launch_blocking"
    sandbox: str = "auto"  # level name, see sandbox.py
    label: str = "candidate"
    env: tuple[tuple[str, str], ...] = ()  # same in both arms of a pair
    extra_args: tuple[str, ...] = ()  # appended to the target's command (`Target.small_cache`)
    compiled: Path | None = None  # folder with what this tree compiles while it runs, or where it will be (confine/compiled.py)
    compiled_before: Path | None = None  # that of the tree which this one changes: what both compile is there


@dataclass(frozen=True, slots=True)
class Cell:
    """One traffic shape."""

    name: str
    prompt_tokens: int
    new_tokens: int
    concurrency: int = 1
    requests: int = 1
    kind: str = "text"  # of its prompts: a name of targets.KINDS
    arrivals_per_s: float | None = None  # open loop: Poisson arrivals at this rate, whatever is still running
    slo_ms: tuple[float, float] | None = None  # (TTFT, mean TPOT) that a good request keeps; None: from arm a


@dataclass(frozen=True, slots=True)
class Stream:
    """One finished (or failed) response as the parent's clock and parser saw it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    sent_ns: int
    arrivals_ns: tuple[int, ...]  # one per token id
    usage: dict[str, int] | None
    error: str | None = None
    status: int | None = None  # HTTP status
    logprobs: tuple[Any, ...] | None = None  # one object per event, as the server sent it


@dataclass(frozen=True, slots=True)
class GateResult:
    gate: str  # short name, e.g. "greedy"
    check: str  # "G08"
    passed: bool
    reason: RejectReason | None = None
    detail: str = ""
    seconds: float = 0.0
    parked: bool = False  # neither pass nor fail: a person decides
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """One replicate: a fresh launch of each arm on the same fresh prompts."""

    stage: Stage
    index: int
    order: str  # "ab" or "ba"
    prompts_sha: str
    a_us_per_token: float | None  # the incumbent; None when discarded
    b_us_per_token: float | None  # the candidate
    guards: dict[str, tuple[float, float]] = field(default_factory=dict)  # metric -> (a, b), lower is better
    discarded: str | None = None  # a pre-registered reason
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)  # environment of both arms, client cost, spreads


@dataclass(frozen=True, slots=True)
class Calibration:
    """What A/A pairs say about this machine."""

    pairs: int
    log_sd: float  # standard deviation of paired log-ratios
    bias: float  # mean of paired log-ratios
    margin: float  # as a fraction: 0.02 = 2 %
    mde: float  # minimum detectable effect of the full procedure at 80 % power, as a fraction
    guard_sds: dict[str, float] = field(default_factory=dict)  # metric -> SD of its paired log-ratio
    guard_margins: dict[str, float] = field(default_factory=dict)  # metric -> margin that a person stated for this run


@dataclass(frozen=True, slots=True)
class StageResult:
    """What one stage of the decision says of its pairs."""

    stage: Stage
    passed: bool
    p: float | None
    ratio: float  # candidate time / incumbent time, point estimate; < 1 is faster
    ci95: tuple[float, float]
    pairs: int
    early: bool = False
    why: str = ""
    reason: RejectReason | None = None  # when not passed; None: more pairs might have passed it (undecided)
    parked: bool = False  # too good or unexplained: a person decides
    facts: dict[str, Any] = field(default_factory=dict)  # guards with margins and power, other statistics


@dataclass(frozen=True, slots=True)
class Edit:
    """Exact search and replace: `old` must match exactly once in `file` (or file must not exist and old == "")."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Patch:
    edits: tuple[Edit, ...]
    finding_ids: tuple[str, ...]
    mechanism: str  # skill name for the playbook, a short slug otherwise
    predicted_us: float  # wall microseconds saved on the slowest rank, per `per`
    per: str = "token"  # or "request"
    title: str = ""
    invariants: tuple[str, ...] = ()
    risk: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    activation: dict[str, Any] | None = None  # rows that must appear or vanish in a fresh trace


@dataclass(frozen=True, slots=True)
class Series:
    """One or more patches judged together at their end."""

    patches: tuple[Patch, ...]
    proposer: str
    usd: float = 0.0
    exchange: str | None = None  # file under exchanges/


@dataclass(frozen=True, slots=True)
class Protocol:
    """How much is measured. Two are defined: see `measure.PROTOCOLS`."""

    name: str
    calibrate_pairs: int
    screen_pairs: int
    decide_pairs: int
    confirm_pairs: int
    headline_pairs: int
    cell: Cell
    guard_cells: tuple[Cell, ...]
    warmup_steps: int
    full_gates: tuple[str, ...] | None = None  # None: all of gates.FULL
    metric: str = "tpot"  # what a_us_per_token holds: a name of targets.METRICS
