"""G13: sampling follows the oracle's distribution, and draws are independent between requests and between steps.

Every test has a false-alarm rate of ALPHA; the power against a temperature that is 10 % off is computed from the
oracle's own distribution and reported. Temperatures are chosen so that the oracle's distribution is broad enough to
tell. Not for: greedy decoding.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from optimizer.confine.launch import Server
from optimizer.gates import shapes
from optimizer.gates.context import Failed, Lab, ask, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

ALPHA = 1e-5
DRAWS = 96  # first tokens of one prompt
STREAMS, STEPS = 80, 24  # draws in context: 32 streams at each of two temperatures, 16 greedy ones
WARMER = 1.5  # the second temperature, in first ones
REPEAT_STEPS = 12
UNIFORM_BINS = 16
LEAST_EXPECTED = 5.0
BREADTH = 24.0  # e ** entropy that a temperature is chosen for
EDGE = 1e-4  # a token whose mass lies this near the edge of a top-p set may be in or out


def check(lab: Lab) -> GateResult:
    setup = shapes.secret(lab)
    server = lab.server(setup)
    prompts = lab.draw("sampling", 8, [11, 19, 14, 25, 9, 17, 30, 22], kinds=("random",))
    logits = lab.oracle(setup).logits(prompts)
    temperature = broad_temperature(logits)
    order = np.argsort([abs(breadth(row, temperature) - BREADTH) for row in logits])  # broadest of use first
    prompts, logits = [prompts[i] for i in order], logits[order]
    facts: dict[str, Any] = {"temperature": temperature}
    facts |= _first_tokens(lab, server, prompts[0], logits[0], temperature)
    facts |= _truncated(lab, server, prompts[1], logits[1], temperature)
    facts |= _seeds(lab, server, prompts[2], temperature)
    facts |= _in_context(lab, server, logits, temperature)
    return passed("sampling", "G13", **facts)


def _fail(detail: str) -> Failed:
    return Failed(RejectReason.SAMPLING, detail, "G13")


def _draws(lab: Lab, server: Server, prompt: tuple[int, ...], n: int, name: str, **options: Any) -> list[int]:
    """First tokens of `n` requests; seeds are secret, and every second request has none."""
    seeds = lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/seeds/{name}", n, 2**31)
    requests = [Request(prompt, 1, seed=seeds[i] if i % 2 else None, **options) for i in range(n)]
    answers = ask(server, requests)
    shapes.account(answers, [1] * n)
    return [s.token_ids[0] for s in answers]


def _first_tokens(
    lab: Lab, server: Server, prompt: tuple[int, ...], logits: np.ndarray, temperature: float
) -> dict[str, Any]:
    """One prompt, many requests at once: a generator that they share, or one seed for all, shows here."""
    drawn = _draws(lab, server, prompt, DRAWS, "first", temperature=temperature)
    probabilities = softmax(logits / temperature)
    worst = 1.0
    for kind, some in (("all", drawn), ("unseeded", drawn[0::2]), ("seeded", drawn[1::2])):
        p = chi_square_p(some, probabilities)
        worst = min(worst, p)
        if p < ALPHA:
            raise _fail(
                f"{kind} first tokens at temperature {temperature:.2g} do not follow the model (p = {p:.1g})"
            )
    return {"p_first": worst}


def _truncated(
    lab: Lab, server: Server, prompt: tuple[int, ...], logits: np.ndarray, temperature: float
) -> dict[str, Any]:
    """top-k and top-p: no token outside the set, and the right shares within."""
    worst = 1.0
    cases: tuple[tuple[str, dict[str, Any]], ...] = (("top_k", {"top_k": 6}), ("top_p", {"top_p": 0.6}))
    for name, options in cases:
        probabilities = softmax(logits / temperature)
        sure, possible = kept(probabilities, **options)
        drawn = _draws(lab, server, prompt, 64, name, temperature=temperature, **options)
        outside = [t for t in drawn if t not in possible]
        if outside:
            raise _fail(f"{len(outside)} of {len(drawn)} draws lie outside the {name} set")
        inside = np.where(np.isin(np.arange(len(probabilities)), list(sure)), probabilities, 0.0)
        worst = min(worst, p := chi_square_p([t for t in drawn if t in sure], inside / inside.sum()))
        if p < ALPHA:
            raise _fail(f"draws with {name} do not follow the model (p = {p:.1g})")
    return {"p_truncated": worst}


def _seeds(lab: Lab, server: Server, prompt: tuple[int, ...], temperature: float) -> dict[str, Any]:
    """The same seed gives the same tokens alone and in a batch; other seeds give others."""
    seeds = lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/seeds", 12, 2**31)
    requests = [Request(prompt, 10, temperature=temperature, seed=s) for s in seeds]
    together = ask(server, requests)
    alone = [ask(server, [request])[0] for request in requests[:4]]
    pairs = [(a, b) for a, b in zip(alone, together, strict=False) if a.token_ids != b.token_ids]
    unexplained = sum(not _near_tie(lab, a, b) for a, b in pairs)
    if unexplained > 1:  # one may be a draw that fell on the border between two tokens
        raise _fail(f"{unexplained} of {len(alone)} seeds give other tokens alone than in a batch")
    p = alike_p(together, lab.oracle(shapes.secret(lab)).mass(together, temperature))
    different = len({s.token_ids for s in together})
    if p < ALPHA:
        raise _fail(f"{len(seeds)} different seeds gave {different} different outputs (p = {p:.1g})")
    return {"different_seeds": different}


def alike_p(streams: list[Stream], mass: list[list[tuple[float, float]]]) -> float:
    """p that as many of independent streams are the same as the commonest of these is, by the chance of that one."""
    from scipy import stats

    ((tokens, times),) = Counter(s.token_ids for s in streams).most_common(1)
    at = next(i for i, s in enumerate(streams) if s.token_ids == tokens)
    chance = float(np.prod([own for _, own in mass[at]]))
    return 1.0 if times == 1 else float(stats.binom.sf(times - 2, len(streams) - 1, chance))


def _near_tie(lab: Lab, alone: Stream, batch: Stream) -> bool:
    """Whether the first difference is one of two tokens whose order another order of summation may turn."""
    at = next(i for i, (a, b) in enumerate(zip(alone.token_ids, batch.token_ids, strict=True)) if a != b)
    cut = Stream(alone.prompt_ids, alone.token_ids[: at + 1], "", None, 0, (), None)
    wanted = [[[token] for token in alone.token_ids[:at]] + [[alone.token_ids[at], batch.token_ids[at]]]]
    first, second = lab.oracle(shapes.secret(lab)).logprobs([cut], wanted)[0][at]
    return abs(first - second) <= 2 * lab.ctx.oracle.bands.reorder


def _in_context(lab: Lab, server: Server, logits: np.ndarray, temperature: float) -> dict[str, Any]:
    """Streams of several draws, greedy ones among them: each draw's place in its own distribution is uniform, and noise
    is fresh each step: a token repeats its predecessor as often as the model says, and no oftener."""
    groups = (temperature, WARMER * temperature, 0.0)  # in one batch: each request keeps its own
    prompts = lab.draw("in-context", STREAMS, 9, kinds=("random",))
    wanted = [groups[(0, 1, 0, 1, 2)[i % 5]] for i in range(STREAMS)]
    got = ask(server, [Request(p, STEPS, temperature=t) for p, t in zip(prompts, wanted, strict=True)], 120.0)
    shapes.account(got, [STEPS] * STREAMS)
    first, second, greedy = ([s for s, t in zip(got, wanted, strict=True) if t == group] for group in groups)
    oracle = lab.oracle(shapes.secret(lab))
    rng = np.random.default_rng(
        lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/places", 1, 2**62)[0]
    )
    worst = 1.0
    for group, some in ((groups[0], first), (groups[1], second)):
        p = places_p(oracle.mass(some, group), rng)
        worst = min(worst, p)
        if p < ALPHA:
            raise _fail(
                f"{len(some) * STEPS} draws in context do not follow the model at temperature {group:.2g} (p = {p:.1g})"
            )
    if any(score.band == "wrong" for score in oracle.score(greedy)):
        raise _fail("greedy requests beside sampled ones got other tokens")
    z, repeats = _repeats(lab, first, temperature)
    if z > 5.5:
        raise _fail(f"{repeats} tokens repeat their predecessor, {z:.1f} standard deviations too many")
    power = power_against(logits / temperature, logits / (1.1 * temperature), len(first) * STEPS)
    return {"p_in_context": worst, "repeat_z": z, "power_temperature_10pct": power}


def places_p(mass: list[list[tuple[float, float]]], rng: np.random.Generator) -> float:
    """p that draws follow their distributions. A draw's place: the mass of all likelier tokens plus a random share of
    its own (Rosenblatt 1952); places of right draws are uniform. `mass`: (likelier tokens' mass, own) per draw."""
    pairs = np.array([pair for stream in mass for pair in stream])
    places = pairs[:, 0] + rng.random(len(pairs)) * pairs[:, 1]
    return uniform_p(np.histogram(places, UNIFORM_BINS, (0.0, 1.0 + 1e-9))[0])


def _repeats(lab: Lab, streams: list[Stream], temperature: float) -> tuple[float, int]:
    """(z of the number of tokens that equal the one before, that number)."""
    shifted = [
        Stream(s.prompt_ids + s.token_ids[: i + 1], (s.token_ids[i],), "", None, 0, (), None)
        for s in streams
        for i in range(REPEAT_STEPS)
    ]
    chances = np.array([stream[0][1] for stream in lab.oracle(shapes.secret(lab)).mass(shifted, temperature)])
    repeats = sum(s.token_ids[i] == s.token_ids[i + 1] for s in streams for i in range(REPEAT_STEPS))
    spread = float(np.sqrt(np.sum(chances * (1 - chances)) + 1.0))  # plus one: rare repeats are Poisson
    return (repeats - float(chances.sum())) / spread, repeats


def broad_temperature(logits: np.ndarray) -> float:
    """The temperature, from 0.5 to 2, at which the typical distribution spreads over about BREADTH tokens."""
    grid = np.linspace(0.5, 2.0, 31)
    typical = [np.median([breadth(row, t) for row in logits]) for t in grid]
    return float(grid[int(np.argmin(np.abs(np.log(typical) - np.log(BREADTH))))])


def breadth(row: np.ndarray, temperature: float) -> float:
    """e ** entropy of one distribution: over how many tokens it spreads."""
    return float(np.exp(entropy(softmax(row / temperature))))


def entropy(probabilities: np.ndarray) -> float:
    some = probabilities[probabilities > 0]
    return float(-np.sum(some * np.log(some)))


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - float(logits.max()))
    return shifted / shifted.sum()


def kept(
    probabilities: np.ndarray, top_k: int | None = None, top_p: float | None = None
) -> tuple[set[int], set[int]]:
    """(tokens surely in the set, tokens possibly in it): they differ at ties and at the edge of the mass."""
    order = np.argsort(-probabilities, kind="stable")
    if top_k is not None:
        edge = probabilities[order[top_k - 1]]
        return set(np.flatnonzero(probabilities > edge * (1 + EDGE)).tolist()), set(
            np.flatnonzero(probabilities >= edge * (1 - EDGE)).tolist()
        )
    assert top_p is not None
    before = np.cumsum(probabilities[order]) - probabilities[order]
    sure, possible = order[before < top_p - EDGE], order[before < top_p + EDGE]
    return set(sure.tolist()), set(possible.tolist()) | {int(order[0])}


def bins(probabilities: np.ndarray, draws: int) -> list[np.ndarray]:
    """Groups of tokens, each expected at least LEAST_EXPECTED times: likely ones alone, the rest together."""
    order = np.argsort(-probabilities, kind="stable")
    groups: list[np.ndarray] = []
    start, mass = 0, 0.0
    for end, token in enumerate(order, 1):
        mass += probabilities[token]
        if mass * draws >= LEAST_EXPECTED:
            groups.append(order[start:end])
            start, mass = end, 0.0
    if start < len(order):
        rest = order[start:]
        groups = [*groups[:-1], np.concatenate([groups[-1], rest])] if groups else [rest]
    return groups


def chi_square_p(drawn: list[int], probabilities: np.ndarray) -> float:
    """p-value of Pearson's test; 1 where everything falls into one bin. A token of probability 0 gives 0."""
    from scipy import stats

    if any(probabilities[t] <= 0 for t in drawn):
        return 0.0
    groups = bins(probabilities, len(drawn))
    if len(groups) < 2:
        return 1.0
    counts = Counter(drawn)
    observed = np.array([sum(counts[int(t)] for t in group) for group in groups], dtype=float)
    expected = np.array([probabilities[group].sum() for group in groups]) * len(drawn)
    return float(stats.chi2.sf(np.sum((observed - expected) ** 2 / expected), len(groups) - 1))


def uniform_p(counts: np.ndarray) -> float:
    from scipy import stats

    return float(stats.chisquare(counts).pvalue)


def power_against(right: np.ndarray, wrong: np.ndarray, draws: int) -> float:
    """Chance that the test of uniform places at ALPHA rejects `draws` draws from `wrong`; logits [n, vocabulary].

    Each token's mass under `wrong` is spread over its interval under `right`; noncentral chi-square.
    """
    from scipy import stats

    shares = np.zeros(UNIFORM_BINS)
    edges = np.linspace(0.0, 1.0, UNIFORM_BINS + 1)
    for row, other in zip(right, wrong, strict=True):
        p, q = softmax(row), softmax(other)
        order = np.argsort(-p, kind="stable")
        reached = np.concatenate([[0.0], np.cumsum(p[order])])
        mass = np.concatenate([[0.0], np.cumsum(q[order])])
        shares += np.diff(np.interp(edges, reached, mass))
    shares /= len(right)
    critical = stats.chi2.isf(ALPHA, UNIFORM_BINS - 1)
    noncentral = draws * float(np.sum((shares - 1 / UNIFORM_BINS) ** 2) * UNIFORM_BINS)
    return float(stats.ncx2.sf(critical, UNIFORM_BINS - 1, noncentral))
