"""From logits to tokens, on rank 0: greedy, temperature, top-k, top-p, and log-probabilities.

The uniform number of each draw comes from the request's own generator on the host, so a seed gives the
same tokens whatever else is in the batch, at every TP and on every device.
"""

from __future__ import annotations

import torch

from engine.request import Sequence, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures that would overflow the scaled logits mean greedy, as in vLLM


def sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    """logits [N, vocab] of the N sequences -> token ids [N] int64."""
    logits = _forbid_eos(logits.float(), sequences, eos_token_ids)
    greedy = logits.argmax(dim=-1)
    if all(s.params.temperature < GREEDY_BELOW for s in sequences):
        return greedy
    device = logits.device
    temperature = torch.tensor([s.params.temperature for s in sequences], device=device)
    top_k = torch.tensor([s.params.top_k or logits.shape[-1] for s in sequences], device=device)
    top_p = torch.tensor([s.params.top_p for s in sequences], device=device)
    draws = torch.tensor([s.draws.random() for s in sequences], device=device)
    is_greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    drawn = draw(torch.softmax(scaled, dim=-1), top_k, top_p, draws)
    return torch.where(is_greedy, greedy, drawn)


def draw(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Invert the cumulative distribution of the kept tokens at `uniforms` [N] in [0, 1) -> ids [N].

    probs [N, vocab]. Kept are the `top_k` [N] likeliest, and of those, renormalised, the smallest set whose
    mass reaches `top_p` [N] (Holtzman et al., arXiv 1904.09751).
    """
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    probs = torch.where(ranks < top_k.unsqueeze(1), probs, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    mass_before = probs.cumsum(dim=-1) - probs
    probs = torch.where((mass_before < top_p.unsqueeze(1)) | (ranks == 0), probs, 0.0)
    cumulative = probs.cumsum(dim=-1)
    reached = cumulative > uniforms.unsqueeze(1) * cumulative[:, -1:]
    picked = reached.int().argmax(dim=-1, keepdim=True)  # the first that exceeds it
    return order.gather(1, picked).squeeze(1)


def logprobs_of(
    logits: torch.Tensor, tokens: list[int], sequences: list[Sequence]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the raw logits for those sequences that asked for them."""
    if all(s.params.logprobs is None for s in sequences):
        return [None] * len(sequences)
    table = torch.log_softmax(logits.float(), dim=-1)
    result: list[TokenLogprobs | None] = []
    for row, token, sequence in zip(table, tokens, sequences, strict=True):
        wanted = sequence.params.logprobs
        if wanted is None:
            result.append(None)
            continue
        count = row.shape[0] if wanted == -1 else wanted
        values, ids = row.topk(count)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        result.append(TokenLogprobs(row[token].item(), top))
    return result


def _forbid_eos(
    logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: tuple[int, ...]
) -> torch.Tensor:
    """Take the end-of-text tokens away from sequences that have not reached `min_tokens`."""
    early = [len(s.output_ids) < s.params.min_tokens for s in sequences]
    if not any(early) or not eos_token_ids:
        return logits
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    rows = torch.tensor([i for i, is_early in enumerate(early) if is_early], device=logits.device)
    for token in eos_token_ids:
        forbidden[rows, token] = True
    return logits.masked_fill(forbidden, float("-inf"))
