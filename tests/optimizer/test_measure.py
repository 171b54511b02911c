"""Pairs are timed by the parent's clock, verified afterwards, and every failure gets its right name.

The engines here are fakes whose speed is a number: no processes, no sleeping.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer import environment, measure, targets
from optimizer.arms import Arm
from optimizer.confine.launch import LaunchError
from optimizer.gates.streams import tokenizer_of
from optimizer.measure import PROTOCOLS, Bench, CandidateFailed, InfrastructureError, protocol_for
from optimizer.traffic.client import ClientError
from optimizer.traffic.loadgen import Load, LoadError
from optimizer.truth import bands
from optimizer.truth.oracle import OracleError, Score
from optimizer.types import Cell, LaunchSpec, RejectReason, Stage, Stream, Target

TARGET = Target(Path(), Path(), "fake", (), (), (), ("cpu",), (1, 2, 4), {}, 10.0)
QUICK = measure.PROTOCOLS["quick"]
FULL = measure.PROTOCOLS["full"]


@dataclass
class Engine:
    """How one arm behaves. Times in seconds."""

    step_s: float = 0.05
    first_s: float = 0.08
    start_s: float = 4.0
    memory: int = 10**9
    wrong: bool = False
    odd: bool = False  # tokens between the bands
    fails: str | None = None  # "boot", "crash", "hang", "short", "usage", "refused"
    foreign_cores: float = 0.0
    throttled: bool = False
    token_wait_s: float = 0.0  # added by every concurrent request


@dataclass
class World:
    """Two engines by label, one clock, and a diary of what happened in which order."""

    engines: dict[str, Engine]
    now_s: float = 0.0
    diary: list[str] = field(default_factory=list)
    envs: list[dict[str, str]] = field(default_factory=list)
    warm: int = 0
    busy_s: float = 0.0

    def bench(self) -> Bench:
        return Bench(self.launch, self.generator, self.snapshot, lambda: self.now_s)

    @contextmanager
    def launch(self, spec: LaunchSpec):
        engine = self.engines[spec.label]
        self.diary.append(f"launch {spec.label}")
        self.envs.append(dict(spec.env))
        if engine.fails == "boot":
            raise LaunchError(RejectReason.BOOT, "ended with code 1")
        self.now_s += engine.start_s
        yield Server(self, engine, spec.label)
        self.diary.append(f"close {spec.label}")

    @contextmanager
    def generator(self):
        yield Generator(self)

    def snapshot(self, pids, devices) -> environment.Snapshot:
        engine = self.engines[next(p for p in pids if isinstance(p, str))]
        gpu = environment.Gpu(0, "u", 1500, 2000, 50, 300, 1000, 0x40 if engine.throttled else 0, "1", "g")
        busy = self.busy_s + self.now_s * engine.foreign_cores
        return environment.Snapshot(self.now_s, busy, 0.0, None, 1.0, 0.0, (gpu,))


@dataclass
class Server:
    world: World
    engine: Engine
    label: str
    killed_for: str | None = None

    @property
    def client(self) -> Server:
        return self

    @property
    def start_s(self) -> float:
        return self.engine.start_s

    def processes(self) -> list[Any]:
        return [self.label]

    def alive(self) -> bool:
        return self.engine.fails != "crash"

    def own_bytes(self) -> int:
        return self.engine.memory

    def log_tail(self, lines: int = 20) -> str:
        return "Traceback: boom"


@dataclass
class Generator:
    world: World
    pids: tuple[int, ...] = ()

    def run(self, client: Server, requests, deadline_s: float) -> Load:
        world, engine = self.world, client.engine
        world.diary.append(f"{client.label} {len(requests)}x{requests[0].max_tokens}")
        if engine.fails == "refused":
            raise ClientError("cannot connect: refused")
        if engine.fails == "loadgen":
            raise LoadError("gone")
        streams = [self._stream(engine, r, len(requests)) for r in requests]
        world.now_s += max(s.arrivals_ns[-1] for s in streams) / 1e9 - world.now_s if streams else 0
        return Load(streams, cpu_s=len(streams) * 1e-3, wall_s=1.0)

    def _stream(self, engine: Engine, request, concurrent: int) -> Stream:
        step = engine.step_s + engine.token_wait_s * (concurrent - 1)
        sent = self.world.now_s + request.delay_s
        n = request.max_tokens - (engine.fails == "short")
        arrivals = tuple(int((sent + engine.first_s + i * step) * 1e9) for i in range(n))
        error = {"crash": "receive: reset", "hang": "not finished within 40 s"}.get(engine.fails or "")
        said = request.max_tokens + (engine.fails == "usage")
        usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": said}
        ids = tuple((7 if engine.wrong else 4 if engine.odd else 3) for _ in range(n))
        finish = "stop" if engine.fails == "stops" else "length"
        return Stream(request.prompt_ids, ids, "", finish, int(sent * 1e9), arrivals, usage, error)


class Prompts:
    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.names: list[str] = []

    def draw(self, evaluation, n, tokens, kinds) -> list[tuple[int, ...]]:
        self.names.append(evaluation)
        if self.world:
            self.world.diary.append("draw")
        lengths = tokens if isinstance(tokens, list) else [tokens] * n
        return [tuple([len(self.names), i] * length)[:length] for i, length in enumerate(lengths)]

    def integers(self, evaluation, n, below) -> list[int]:
        return [12345] * n

    @staticmethod
    def sha(prompts) -> str:
        return str(hash(tuple(map(tuple, prompts))))


class Oracle:
    """Token 3 is right, 4 lies between the bands, all others are wrong."""

    def __init__(self, dead: bool = False) -> None:
        self.scored = 0
        self.dead = dead

    def score(self, streams) -> list[Score]:
        if self.dead:
            raise OracleError("gone")
        self.scored += len(streams)
        bands = [{3: "equal", 4: "tolerance"}.get(s.token_ids[0], "wrong") for s in streams]
        return [Score(b == "equal", None if b == "equal" else 0, 0.0 if b == "equal" else 9.0, b) for b in bands]


def take(a: Engine, b: Engine, *, protocol=QUICK, stage=Stage.DECIDE, order="ab", oracle=None, device="cpu"):
    world = World({"a": a, "b": b})
    prompts = Prompts(world)
    spec = LaunchSpec(Path(), TARGET, Path("python"), Path(), 4, device, label="a")
    pair = measure.run_pair(
        spec, replace(spec, label="b"), protocol=protocol, stage=stage, index=0, order=order, prompts=prompts,
        oracle=oracle or Oracle(), bench=world.bench(),
    )  # fmt: skip
    return pair, world, prompts


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_on_a_gpu_both_arms_are_up_and_warm_before_either_is_timed(order, monkeypatch):
    monkeypatch.setattr(environment, "gpu_memory", lambda devices: {})
    monkeypatch.setattr(environment, "query_gpus", lambda devices: ())
    protocol = measure.protocol_for(QUICK, "tok/s", "cuda")
    pair, world, _ = take(Engine(step_s=0.05), Engine(step_s=0.01), device="cuda", protocol=protocol, order=order)
    assert pair.a_us_per_token == pytest.approx(50_000) and pair.b_us_per_token == pytest.approx(10_000)
    diary = world.diary
    assert {diary[0], diary[1]} == {"launch a", "launch b"} and diary[2] == "draw"
    timed = [i for i, d in enumerate(diary) if d.endswith(f"x{protocol.cell.new_tokens}")]
    assert [diary[i][0] for i in timed[:1]] == [order[0]] and [diary[i][0] for i in timed[-1:]] == [order[1]]
    assert {diary[-1], diary[-2]} == {"close a", "close b"}


@pytest.mark.parametrize("a,b,error", [(None, "boot", CandidateFailed), ("boot", None, InfrastructureError)])
def test_on_a_gpu_the_arm_that_does_not_start_is_named_and_the_other_is_closed(a, b, error, monkeypatch):
    with pytest.raises(error):
        take(Engine(fails=a), Engine(fails=b), device="cuda", protocol=measure.protocol_for(QUICK, "tok/s", "cuda"))


def test_the_times_are_those_of_the_arrivals():
    pair, _, _ = take(Engine(step_s=0.055), Engine(step_s=0.013))
    assert pair.a_us_per_token == pytest.approx(55_000) and pair.b_us_per_token == pytest.approx(13_000)
    assert pair.guards["decode.ttft_p50_us"] == (pytest.approx(80_000), pytest.approx(80_000))
    assert pair.guards["peak_memory_bytes"] == (1e9, 1e9) and pair.facts["memory_bytes"] == {"a": 1e9, "b": 1e9}
    assert pair.discarded is None and pair.facts["start_s"] == {"a": 4.0, "b": 4.0}


@pytest.mark.parametrize(("device", "tp", "more", "seen"), [
    ("cuda", 2, 868 << 20, 0),  # CUDA graphs with NCCL inside, two ranks of 15 GB: 2.7 %
    ("cuda", 1, 868 << 20, 356 << 20),
    ("cuda", 2, -(868 << 20), -(868 << 20)),
    ("cpu", 4, 1 << 20, 1 << 20),
])  # fmt: skip
def test_on_a_gpu_each_rank_may_hold_its_graphs_beyond_the_margin(device, tp, more, seen):
    one = Arm((), 4.0, 1.0, 30.7e9, None, 0.0)  # type: ignore[arg-type]
    spec = LaunchSpec(Path(), TARGET, Path("python"), Path(), tp, device)
    guards = measure._guards(one, replace(one, memory_bytes=one.memory_bytes + more), QUICK, spec)
    assert guards["peak_memory_bytes"] == (30.7e9, 30.7e9 + seen)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_prompts_are_drawn_once_when_the_first_arm_is_up_and_sent_to_both(order):
    _, world, _ = take(Engine(), Engine(), order=order)
    first, second = order
    assert world.diary[0] == f"launch {first}" and world.diary[1] == "draw"
    assert "draw" not in world.diary[world.diary.index(f"launch {second}") :]
    sent = {label: [d[2:] for d in world.diary if d.startswith(f"{label} ")] for label in "ab"}
    assert sent["a"] == sent["b"] and len(sent["a"]) > 3


def test_warm_up_is_every_shape_once_and_then_a_fixed_count_whatever_the_arm():
    for engine in (Engine(step_s=0.5), Engine(step_s=0.001)):
        _, world, _ = take(engine, engine)
        mine = [d for d in world.diary if d.startswith("a ")]
        assert mine[:3] == ["a 1x2", "a 4x2", f"a 1x{QUICK.warmup_steps + 1}"]
        assert mine[3] == f"a 1x{QUICK.cell.new_tokens}"


def test_prompts_are_new_in_every_evaluation():
    names = [set(take(Engine(), Engine())[2].names) for _ in range(2)]
    assert not names[0] & names[1]


def test_nuisance_layout_is_the_same_in_both_arms_and_drawn_anew():
    envs = [take(Engine(), Engine())[1].envs for _ in range(3)]
    assert all(a == b and "PYTHONHASHSEED" in a for a, b in envs)
    assert len({e[0]["PYTHONHASHSEED"] for e in envs}) == 3


def test_a_screen_times_the_target_cell_only():
    screen, world, _ = take(Engine(), Engine(), stage=Stage.SCREEN)
    assert not any("4x" in d for d in world.diary)
    assert "batch4.token_wall_us" not in screen.guards and "start_up_s" in screen.guards
    decide, _, _ = take(Engine(), Engine(), stage=Stage.DECIDE)
    assert "batch4.token_wall_us" in decide.guards


def test_every_timed_stream_is_scored_once_after_both_arms():
    oracle = Oracle()
    _, world, _ = take(Engine(), Engine(), oracle=oracle)
    assert oracle.scored == QUICK.cell.requests + sum(c.requests for c in QUICK.guard_cells)
    assert world.diary[-1] == "close b"


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Engine(wrong=True, step_s=0.001), RejectReason.WRONG_TOKENS),
        (Engine(fails="boot"), RejectReason.BOOT),
        (Engine(fails="crash"), RejectReason.CRASH),
        (Engine(fails="refused"), RejectReason.CRASH),
        (Engine(fails="hang"), RejectReason.HANG),
        (Engine(fails="short"), RejectReason.TOKEN_ACCOUNTING),
        (Engine(fails="usage"), RejectReason.TOKEN_ACCOUNTING),
        (Engine(fails="stops"), RejectReason.TOKEN_ACCOUNTING),
    ],
)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_candidate_that_fails_is_rejected_by_name(engine, reason, order):
    with pytest.raises(CandidateFailed) as failure:
        take(Engine(), engine, order=order)
    assert failure.value.reason is reason


@pytest.mark.parametrize("fails", ["boot", "short", "loadgen"])
def test_an_incumbent_that_fails_says_nothing_of_the_candidate(fails):
    with pytest.raises(InfrastructureError):
        take(Engine(fails=fails), Engine())


def test_wrong_tokens_of_the_incumbent_are_not_the_candidates_fault_even_if_both_share_them():
    for b in (Engine(), Engine(wrong=True)):
        with pytest.raises(InfrastructureError, match="incumbent"):
            take(Engine(wrong=True), b)


def test_tokens_between_the_bands_are_counted_where_only_the_candidate_gives_them():
    pair, _, _ = take(Engine(), Engine(odd=True))
    assert pair.facts["drift"]["tolerance"] == QUICK.cell.requests + sum(c.requests for c in QUICK.guard_cells)
    assert pair.facts["drift"]["largest"] == 9.0
    both, _, _ = take(Engine(odd=True), Engine(odd=True))
    assert both.facts["drift"] == {"reorder": 0, "tolerance": 0, "largest": 0.0}


def test_a_dead_oracle_is_nobodys_fault():
    with pytest.raises(InfrastructureError, match="oracle"):
        take(Engine(), Engine(), oracle=Oracle(dead=True))


@pytest.mark.parametrize(("fails", "named"), [("crash", "incumbent_crash"), ("hang", "incumbent_hang")])
def test_a_crash_of_the_incumbent_discards_the_pair(fails, named):
    pair, _, _ = take(Engine(fails=fails), Engine())
    assert pair.discarded == named and pair.a_us_per_token is None and pair.b_us_per_token is None


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        (Engine(foreign_cores=1.5), Engine(), "load"),
        (Engine(), Engine(foreign_cores=1.5), "load"),
        (Engine(foreign_cores=1.5), Engine(foreign_cores=1.5), None),  # both alike: no reason
        (Engine(throttled=True), Engine(), "throttle"),
        (Engine(step_s=1.0), Engine(), None),  # slow is no reason
    ],
)
def test_pairs_are_discarded_only_for_the_reasons_written_down(a, b, named):
    pair, _, _ = take(a, b)
    assert pair.discarded == named and (pair.a_us_per_token is None) == (named is not None)


def test_cost_moved_to_start_up_shows_as_a_guard():
    """Minutes of tuning at import, or before the first answer: both count; a second on a CPU is allowed for."""
    slow, _, _ = take(Engine(), Engine(start_s=40.0))
    a, b = slow.guards["start_up_s"]
    assert b > 5 * a
    put_off, _, _ = take(Engine(), Engine(first_s=9.0))
    assert put_off.guards["start_up_s"][1] > 2 * put_off.guards["start_up_s"][0]
    little, _, _ = take(Engine(), Engine(start_s=4.5))
    assert little.guards["start_up_s"][0] == little.guards["start_up_s"][1]


def test_a_batch_delay_shows_in_ttft_and_a_slow_batch_in_its_cell():
    delayed, _, _ = take(Engine(), Engine(step_s=0.04, first_s=0.2))
    assert delayed.guards["decode.ttft_p50_us"][1] > 2 * delayed.guards["decode.ttft_p50_us"][0]
    serial, _, _ = take(Engine(), Engine(step_s=0.04, token_wait_s=0.05))
    a, b = serial.guards["batch4.token_wall_us"]
    assert b > 2 * a


def test_requests_past_their_deadline_lower_goodput():
    pair, _, _ = take(Engine(), Engine(first_s=2.0), protocol=FULL)
    assert pair.guards["poisson.missed_fraction"] == (0.0, 1.0)


def test_full_times_every_cell():
    pair, _, _ = take(Engine(), Engine(), protocol=FULL)
    cells = {name.split(".")[0] for name in pair.guards if "." in name}
    assert cells == {"decode", "long_decode", "prefill", "long_context", "batch8", "batch32", "mixed", "repetitive",
                     "code", "poisson"}  # fmt: skip


# --- targets -----------------------------------------------------------------------------------------------


def stream(first_s: float, gaps_s: list[float]) -> Stream:
    at = [first_s]
    for gap in gaps_s:
        at.append(at[-1] + gap)
    arrivals = tuple(int(t * 1e9) for t in at)
    return Stream((1,), (3,) * len(at), "", "length", 0, arrivals, None)


def test_tokens_in_bursts_do_not_look_fast():
    burst = stream(0.1, [0.0, 0.0, 0.3, 0.0, 0.0, 0.3])
    assert targets.tpot_us(burst) == pytest.approx(100_000)


def test_targets_pick_their_cell_and_metric():
    for text, cell, metric in [
        ("tok/s", "decode", "tpot"),
        ("ttft", "prefill", "ttft"),
        ("throughput@16", "batch16", "token_wall"),
        ("goodput@200,60", "poisson", "good_wall"),
        ("memory", "decode", "memory"),
    ]:
        protocol = measure.protocol_for(QUICK, text)
        assert (protocol.cell.name, protocol.metric) == (cell, metric)
        names = [protocol.cell.name, *(c.name for c in protocol.guard_cells)]
        assert len(names) == len(set(names)) and "decode" in names
    assert measure.protocol_for(QUICK, "throughput@16").cell.concurrency == 16
    with pytest.raises(ValueError, match=r"throughput@C"):
        measure.protocol_for(QUICK, "speed")
    with pytest.raises(ValueError, match="cpu, cuda"):
        measure.protocol_for(QUICK, "tok/s", "tpu")


def test_gpus_get_longer_cells_and_warm_up():
    gpu = measure.protocol_for(FULL, "tok/s", "cuda")
    assert gpu.cell.new_tokens > 100
    for protocol in (gpu, measure.protocol_for(QUICK, "tok/s", "cuda")):  # libraries may plan for each length anew
        assert protocol.warmup_steps + 1 == protocol.cell.new_tokens
    assert {c.name for c in gpu.guard_cells} == {c.name for c in FULL.guard_cells}


def test_every_target_gives_its_number():
    timed = targets.Timed(Cell("c", 1, 3, 2, 2, slo_ms=(150.0, 60.0)), (stream(0.1, [0.05, 0.05]), stream(0.2, [0.05, 0.05])), (300_000_000,))  # fmt: skip
    assert targets.value("tpot", timed, 5.0) == pytest.approx(50_000)
    assert targets.value("ttft", timed, 5.0) == pytest.approx(150_000)
    assert targets.value("token_wall", timed, 5.0) == pytest.approx(50_000)
    assert targets.value("good_wall", timed, 5.0) == pytest.approx(300_000)  # one of two is in time
    assert targets.value("memory", timed, 5.0) == 5.0
    with pytest.raises(KeyError, match="tpot"):
        targets.value("speed", timed, 5.0)


def test_quantiles_are_values_that_were_measured():
    assert targets.quantile([1, 2, 3, 4], 0.5) == 2 and targets.quantile(list(range(100)), 0.99) == 98


def test_text_that_is_left_out_where_it_is_timed_is_caught():
    """Gates look at the text of other shapes; a server could leave it out of exactly those that are timed."""
    place = Path(__file__).resolve().parents[2] / "engine" / "tiny_qwen3"
    tokenizer = tokenizer_of(place)
    ids = (300, 301, 302)
    good = Stream((1, 2), ids, tokenizer.decode(list(ids)), "length", 0, (1, 2, 3), None)
    oracle = SimpleNamespace(score=lambda streams: [Score(True, None, 0.0, "equal")] * len(streams))

    def arms(a: Stream, b: Stream) -> Any:
        return {name: SimpleNamespace(timed=[SimpleNamespace(streams=[s])]) for name, s in (("b", b), ("a", a))}

    silent = replace(good, text="")
    assert measure.verify(arms(good, good), oracle, tokenizer) == {"reorder": 0, "tolerance": 0, "largest": 0.0}
    assert measure.verify(arms(silent, silent), oracle)["tolerance"] == 0, "no tokenizer: nothing to say"
    with pytest.raises(CandidateFailed, match="text differs from its tokens") as caught:
        measure.verify(arms(good, silent), oracle, tokenizer)
    assert caught.value.reason is RejectReason.TOKEN_ACCOUNTING
    with pytest.raises(InfrastructureError, match="incumbent's text"):
        measure.verify(arms(silent, silent), oracle, tokenizer)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_16_bit_engine_may_differ_by_is_not_the_luck_of_fewer_tokens_than_a_pair_judges(device) -> None:
    protocol = protocol_for(PROTOCOLS["quick"], device=device)
    judged = sum(cell.concurrency * cell.requests * cell.new_tokens for cell in (protocol.cell, *protocol.guard_cells))
    assert len(bands.LENGTHS) * bands.NEW_TOKENS >= 2 * judged
