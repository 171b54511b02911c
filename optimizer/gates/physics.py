"""G17, G16: nothing is faster than reading the weights once for each forward pass; and no answer from memory.

Judged per pass (one moment at which tokens arrive), not per token, so that lossless speculation is not punished.
The bound is what this machine was measured to read and multiply at best. Too good is quarantined (parked): a person
looks. By the parent's clock. Not for: how fast is fast enough (`accept.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.gates import shapes, streams
from optimizer.gates.context import Lab, ask, failed, parked, passed
from optimizer.gates.model_math import Model
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

SLACK = 0.5  # a pass may take half of the bound: caches, a better kernel than ours
MOST_PER_PASS = 16  # tokens that one pass may bring by speculation
NEW_TOKENS = 16
PROMPTS = 3
PREFILL = 384
REPEAT_SHARE = 0.35  # a repeated prompt may save its prefill, not its decode passes


@dataclass(frozen=True, slots=True)
class Floor:
    decode_s: float
    prefill_s: float


def floor(lab: Lab, tp: int) -> Floor:
    """Least seconds of a one-stream decode pass and of a prefill of PREFILL tokens, all ranks working."""
    key = f"floor{tp}"
    if key not in lab.notes:
        model = Model.of(lab.ctx.candidate.model_dir)
        width = 4 if lab.ctx.target.dtype.get(lab.ctx.candidate.device, "float32") == "float32" else 2
        size = model.pass_bytes(width)
        rate, flops = lab.ctx.oracle.machine(int(size / tp))
        lab.notes[key] = Floor(size / (rate * tp), model.product_flops(PREFILL, 1) / (flops * tp))
    return lab.notes[key]


def check(lab: Lab) -> GateResult:
    setup = shapes.secret(lab)
    server = lab.server(setup)
    least = floor(lab, setup.tp)
    *short, long = lab.draw("physics", PROMPTS + 1, [16] * PROMPTS + [PREFILL], kinds=("random",))
    fresh, again = [], []
    for prompt in short:
        fresh.append(ask(server, [Request(prompt, NEW_TOKENS)])[0])
        again.append(ask(server, [Request(prompt, NEW_TOKENS)])[0])
    prefill = ask(server, [Request(long, 2)])[0]
    # The fastest of several: other work on the machine only ever slows.
    pass_s, again_s = (min(passes(s)[0] for s in streams) for streams in (fresh, again))
    burst = max(passes(s)[1] for s in (*fresh, *again))
    ttft = (prefill.arrivals_ns[0] - prefill.sent_ns) / 1e9
    facts = {
        "pass_s": pass_s,
        "repeat_pass_s": again_s,
        "floor_s": least.decode_s,
        "prefill_s": ttft,
        "prefill_floor_s": least.prefill_s,
    }
    tokens = streams.judge(
        lab.oracle(setup).score([*fresh, *again, prefill]),
        "physics",
        "G20" if any(a.token_ids != b.token_ids for a, b in zip(fresh, again, strict=True)) else "G08",
        what="the same prompts twice",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    if not tokens.passed:
        return tokens
    if again_s < REPEAT_SHARE * pass_s:
        detail = f"a repeated prompt decodes at {again_s * 1e3:.3g} ms a pass, the first time at {pass_s * 1e3:.3g} ms"
        return failed("physics", "G09", RejectReason.PHYSICS, f"answers from memory: {detail}", **facts)
    if why := _too_good(least, pass_s, ttft, burst):
        return parked("physics", "G17", RejectReason.PHYSICS, why, **facts)
    return passed("physics", "G17 G09", **facts)


def _too_good(least: Floor, pass_s: float, ttft: float, burst: int) -> str | None:
    if pass_s < SLACK * least.decode_s:
        return f"{pass_s * 1e3:.3g} ms a pass; reading the weights takes {least.decode_s * 1e3:.3g} ms"
    if ttft < SLACK * least.prefill_s:
        return f"prefill in {ttft * 1e3:.3g} ms; its products take {least.prefill_s * 1e3:.3g} ms"
    if burst > MOST_PER_PASS:
        return f"{burst} tokens arrived at once, at most {MOST_PER_PASS} can come of one pass"
    return None


def passes(stream: Stream) -> tuple[float, int]:
    """(seconds a pass, most tokens at one moment) of a stream, its first pass not counted."""
    moments: dict[int, int] = {}
    for stamp in stream.arrivals_ns:
        moments[stamp] = moments.get(stamp, 0) + 1
    stamps = sorted(moments)
    if len(stamps) < 2:  # all at once: the whole answer is one pass
        return (stamps[0] - stream.sent_ns) / 1e9 / max(1, len(stream.arrivals_ns) - 1), len(
            stream.arrivals_ns
        )
    return (stamps[-1] - stamps[0]) / 1e9 / (len(stamps) - 1), max(moments.values())
