"""Step annotations of the engines we know, as text patterns. Not for: placing steps in time (windows)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from trace_diff.types import Phase


@dataclass(frozen=True, slots=True)
class StepName:
    """What an annotation says about its step. `grade`: 3 an engine's step, 2 an engine's inner step, 1 ProfilerStep."""

    phase: Phase
    requests: int | None
    tokens: int | None
    grade: int
    empty: bool = False
    context: int | None = None  # cached tokens per sequence


# vLLM >= 0.11: execute_context_1(12)_generation_0(0); also execute_context_1(888_788544)_generation_0(0) (tokens_squares)
# and AMD's execute_8192_context_9(sq8155sk8430sqsq747sqsk76)_generation_37(sq37sk34489sqsq37sqsk34489).
_VLLM = re.compile(r"execute(?:_(?P<all>\d+))?_context_(?P<nc>\d+)\((?P<c>[^)]*)\)_generation_(?P<ng>\d+)\((?P<g>[^)]*)\)")
# vLLM 0.8-0.10: execute_new_1_cached_3
_VLLM_OLD = re.compile(r"execute(?:_model)?_new_(?P<new>\d+)_cached_(?P<cached>\d+)")
# SGLang: step[DECODE bs=32], step[EXTEND bs=1 toks=12]; ATOM: prefill[bs=1 tok=7], decode[bs=8]
_SGLANG = re.compile(r"step\[\s*(?P<mode>[A-Z_]+)(?P<rest>[^\]]*)\]")
_ATOM = re.compile(r"(?P<mode>prefill|decode|mixed)\[(?P<rest>[^\]]*)\]", re.IGNORECASE)
# TensorRT-LLM: [Executor] _forward_step 12: 1 ctx reqs, 3 gen reqs  (also "1 ctx reqs, 100 ctx tokens, 3 gen reqs")
_TRTLLM = re.compile(r"_forward_step \d+: *(?P<nc>\d+) ctx reqs(?:, *(?P<c>\d+) ctx tokens)?, *(?P<ng>\d+) gen reqs")
# Plain names: step_3_decode, decode_step_3, prefill, decode 7, generate_step
_PLAIN = re.compile(r"(?:(?:model_?|engine_?)?step[_ #:.-]*\d*[_ #:.-]*(?P<a>prefill|decode|mixed|extend)|(?P<b>prefill|decode)(?:[_ ]?step)?)[_ #:.-]*\d*", re.IGNORECASE)
_BARE = re.compile(r"(?:engine[_ ]?step|iteration|iter|step)[_ #:.-]*\d+", re.IGNORECASE)
_PROFILER = re.compile(r"ProfilerStep#\d+")
_BATCH = re.compile(r"(?:bs|batch|batch_size|reqs?|num_reqs)\s*[=:]\s*(\d+)", re.IGNORECASE)
_TOKENS = re.compile(r"(?:toks?|tokens|num_tokens|seqlen|q)\s*[=:]\s*(\d+)", re.IGNORECASE)
_CACHED = re.compile(r"(?:seq_lens_sum|kv|sk)\s*[=:]?\s*(\d+)", re.IGNORECASE)  # of all sequences together
_MODES = {
    "decode": Phase.DECODE,
    "target_verify": Phase.DECODE,
    "draft_extend": Phase.DECODE,
    "extend": Phase.PREFILL,
    "prefill": Phase.PREFILL,
    "mixed": Phase.MIXED,
    "split_prefill": Phase.PREFILL,
    "idle": Phase.UNKNOWN,
    "dummy_first": Phase.UNKNOWN,
}


@lru_cache(maxsize=4096)
def parse(name: str) -> StepName | None:
    """What `name` says of a step, or None where it is no step annotation."""
    for reader in (_vllm, _vllm_old, _trtllm, _sglang, _plain, _profiler):
        found = reader(name)
        if found is not None:
            return found
    return None


def _phase(contexts: int, generations: int) -> Phase:
    if contexts and generations:
        return Phase.MIXED
    if contexts:
        return Phase.PREFILL
    return Phase.DECODE if generations else Phase.UNKNOWN


def _first_number(text: str) -> int | None:
    """12 of "12", of "888_788544", of "sq8155sk8430..."."""
    match = re.search(r"\d+", text)
    return int(match.group()) if match else None


def _vllm(name: str) -> StepName | None:
    match = _VLLM.search(name)
    if match is None:
        return None
    contexts, generations = int(match["nc"]), int(match["ng"])
    tokens = [(_first_number(match[k]) or 0) for k in ("c", "g") if int(match["n" + k])]
    total = sum(tokens) or (int(match["all"]) if match["all"] else 0)
    cached = _CACHED.search(match["g"]) if generations else None
    return StepName(
        _phase(contexts, generations), contexts + generations, total, 3, contexts + generations == 0,
        int(cached.group(1)) // generations if cached else None,
    )  # fmt: skip


def _vllm_old(name: str) -> StepName | None:
    match = _VLLM_OLD.search(name)
    if match is None:
        return None
    new, cached = int(match["new"]), int(match["cached"])
    tokens = cached if new == 0 else None
    return StepName(_phase(new, cached), new + cached, tokens, 3, new + cached == 0)


def _trtllm(name: str) -> StepName | None:
    match = _TRTLLM.search(name)
    if match is None:
        return None
    contexts, generations = int(match["nc"]), int(match["ng"])
    tokens = int(match["c"]) + generations if match["c"] else (generations if not contexts else None)
    return StepName(_phase(contexts, generations), contexts + generations, tokens, 3, contexts + generations == 0)


def _sglang(name: str) -> StepName | None:
    match = _SGLANG.fullmatch(name) or _ATOM.fullmatch(name)
    if match is None:
        return None
    mode = match["mode"].lower()
    batch, tokens = _BATCH.search(match["rest"]), _TOKENS.search(match["rest"])
    phase = _MODES.get(mode, Phase.UNKNOWN)
    requests = int(batch.group(1)) if batch else None
    count = int(tokens.group(1)) if tokens else (requests if phase is Phase.DECODE else None)
    cached = _CACHED.search(match["rest"])
    each = int(cached.group(1)) // requests if cached and requests and phase is Phase.DECODE else None
    return StepName(phase, requests, count, 2, mode == "idle", each)


def _plain(name: str) -> StepName | None:
    match = _PLAIN.fullmatch(name)
    if match is not None:
        return StepName(_MODES[(match["a"] or match["b"]).lower()], None, None, 2)
    return StepName(Phase.UNKNOWN, None, None, 2) if _BARE.fullmatch(name) else None


def _profiler(name: str) -> StepName | None:
    return StepName(Phase.UNKNOWN, None, None, 1) if _PROFILER.fullmatch(name) else None
