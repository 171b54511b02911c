"""Admission, preemption, abort and the page pool."""

from __future__ import annotations

import numpy as np
import pytest
from engine_local import LocalEngine

from engine.config import Limits
from engine.kv_cache import BlockManager
from engine.request import SamplingParams, Sequence
from engine.scheduler import RequestTooLarge, Scheduler


def test_a_full_cache_preempts_and_the_text_is_the_same(tiny, reference, random_prompts):
    engine = LocalEngine(tiny, num_kv_blocks=9)  # room for 144 positions; the requests need 4 * 60
    prompts = random_prompts([20, 18, 22, 20], seed=5)
    results = engine.generate(prompts, max_tokens=40)
    assert engine.core.scheduler.preemptions > 0
    assert all(reference.accepts(p, r.tokens) for p, r in zip(prompts, results, strict=True))
    assert all(r.finish_reason == "length" for r in results)
    assert engine.free_blocks == 9


def test_preemption_does_not_change_what_is_sampled(tiny, local, random_prompts):
    prompts = random_prompts([20, 18, 22], seed=6)
    sampling = {"max_tokens": 30, "temperature": 1.0, "seed": 11}
    small = LocalEngine(tiny, num_kv_blocks=7)
    squeezed = small.generate(prompts, **sampling)
    assert small.core.scheduler.preemptions > 0
    assert [r.tokens for r in squeezed] == [r.tokens for r in local.generate(prompts, **sampling)]


def test_a_request_that_can_never_fit_is_refused_and_hurts_nobody(tiny, reference, random_prompts):
    engine = LocalEngine(tiny, num_kv_blocks=4)
    (prompt,) = random_prompts([30], seed=7)
    running = engine.add(prompt, max_tokens=34)  # 63 positions to cache: just fits
    engine.step()
    with pytest.raises(RequestTooLarge, match=r"needs 5 KV cache blocks; the whole cache has 4"):
        engine.add(random_prompts([40])[0], max_tokens=26)
    with pytest.raises(RequestTooLarge, match="maximum length is 1024"):
        engine.add(random_prompts([1000])[0], max_tokens=25)
    engine.run()
    assert reference.accepts(prompt, engine.results[running].tokens)


def test_requests_aborted_running_waiting_or_unknown_leave_no_trace(tiny, reference, random_prompts):
    engine = LocalEngine(tiny, num_kv_blocks=64, max_num_seqs=2)
    prompts = random_prompts([20, 20, 20, 20], seed=8)
    ids = [engine.add(prompt, max_tokens=20) for prompt in prompts]
    for _ in range(5):
        engine.step()
    engine.abort(ids[0])  # running
    engine.abort(ids[3])  # waiting
    engine.abort(12345)
    engine.run()
    assert [len(engine.results[i].tokens) for i in ids] == [5, 20, 20, 0]
    for i in (1, 2):
        assert reference.accepts(prompts[i], engine.results[ids[i]].tokens)
    assert engine.free_blocks == 64
    assert not engine.core.scheduler.has_work


def test_after_200_requests_the_page_pool_is_whole(tiny):
    engine = LocalEngine(tiny, num_kv_blocks=24, max_num_seqs=16)
    rng = np.random.default_rng(9)
    ids = []
    for n in range(200):
        prompt = rng.integers(3, 2048, int(rng.integers(1, 50))).tolist()
        ids.append(engine.add(prompt, max_tokens=int(rng.integers(1, 12))))
        if n % 10 == 9:
            engine.step()
            engine.abort(int(rng.choice(ids)))
    engine.run()
    reasons = [engine.results[i].finish_reason for i in ids]
    assert reasons.count("length") + engine.core.counters.finished["abort"] == 200
    assert engine.core.counters.finished["abort"] > 0
    assert sorted(engine.core.scheduler.blocks._free) == list(range(24))
    assert engine.core._sequences == {} and engine.core._texts == {}
    engine.generate([[5]], max_tokens=1)  # the next plan tells the ranks who ended
    assert len(engine.core.worker.runner.newest) <= 1


def test_prompts_are_admitted_in_order_within_the_token_budget():
    scheduler = Scheduler(Limits(100, 8, 100), BlockManager(64, 16))
    for n, length in enumerate((60, 30, 20, 10)):
        scheduler.add(Sequence(n, [1] * length, SamplingParams(max_tokens=4)))
    plan, _ = scheduler.schedule()
    assert [item.seq_id for item in plan.context] == [0, 1]  # 20 more would exceed 100; 10 must wait its turn
    assert plan.name == "execute_context_2(90)_generation_0(0)"


def test_the_youngest_is_preempted_and_returns_first():
    scheduler = Scheduler(Limits(64, 8, 64), BlockManager(3, 4))
    sequences = [Sequence(n, [1] * 4, SamplingParams(max_tokens=8)) for n in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    for sequence in sequences:
        sequence.output_ids.append(7)
    plan, _ = scheduler.schedule()
    assert [item.seq_id for item in plan.generation] == [0]
    assert [sequence.id for sequence in scheduler.waiting] == [1, 2]
    assert scheduler.preemptions == 2
    scheduler.finish(sequences[0], "length")
    plan, _ = scheduler.schedule()
    assert [(item.seq_id, len(item.token_ids)) for item in plan.context] == [(1, 5)]
    assert plan.finished == [0]
