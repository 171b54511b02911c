"""G11: what a request asks for is what it gets: stop strings, least and most tokens, top-k of one, one piece, a chat.

A stopped answer must be a prefix of the unstopped one, cut exactly before the stop string. Natural ends of text are
`shapes.swap`'s. Not for: whether tokens are right (every stream is scored, but other gates look closer).
"""

from __future__ import annotations

from typing import Any

from optimizer.confine.launch import Server
from optimizer.gates import shapes, streams
from optimizer.gates.context import Failed, Lab, ask, passed
from optimizer.traffic.client import Request
from optimizer.truth import weights
from optimizer.types import GateResult, RejectReason, Stream

NEW_TOKENS = 24
LEAST = 12


def check(lab: Lab) -> GateResult:
    setup = shapes.secret(lab)
    server = lab.server(setup)
    prompts = lab.draw("accounting", 4, [14, 22, 31, 17], kinds=("document", "random"))
    whole = ask(server, [Request(p, NEW_TOKENS) for p in prompts])
    one = ask(server, [Request(prompts[0], 1), Request(prompts[1], NEW_TOKENS, temperature=1.0, top_k=1)])
    shapes.account([*whole, *one], [NEW_TOKENS] * len(whole) + [1, NEW_TOKENS])
    stopped = _stops(lab, server, whole)
    _least(lab, prompts[3])
    scored = [*whole, *one, *(s for s in stopped if s.token_ids), *_in_one_piece(lab, prompts[2])]
    result = streams.judge(
        lab.oracle(setup).score(scored),
        "accounting",
        "G11 G08",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    return (
        passed("accounting", "G11", **(result.facts | {"stops": len(stopped)})) if result.passed else result
    )


def _fail(detail: str) -> Failed:
    return Failed(RejectReason.TOKEN_ACCOUNTING, detail, "G11")


def _stops(lab: Lab, server: Server, whole: list[Stream]) -> list[Stream]:
    """The same prompts again, each with a stop string taken from its own answer."""
    if streams.tokenizer_of(lab.ctx.candidate.model_dir) is None:
        return []
    chosen = [(stream, stop) for stream in whole if (stop := stop_in(stream.text))]
    got = ask(server, [Request(s.prompt_ids, NEW_TOKENS, stop=(stop,)) for s, stop in chosen])
    for stream, (full, stop) in zip(got, chosen, strict=True):
        wanted = full.text[: full.text.find(stop)]
        if stream.finish_reason != "stop":
            raise _fail(f"a stop string was passed over: finish_reason {stream.finish_reason!r}")
        if stream.text != wanted:
            raise _fail(
                f"text with a stop string has {len(stream.text)} characters, the answer before it {len(wanted)}"
            )
        if stream.token_ids != full.token_ids[: len(stream.token_ids)]:
            raise _fail("a stop string changed the tokens before it")
        if (stream.usage or {}).get("completion_tokens") != len(stream.token_ids):
            raise _fail("usage of a stopped answer does not count its tokens")
    return got


def stop_in(text: str) -> str | None:
    """Four characters from the second half of a text; none where there is nothing to cut there."""
    for at in range(len(text) // 2, len(text) - 4):
        piece = text[at : at + 4]
        if "\ufffd" not in piece and piece.strip() and text.find(piece) >= 4:
            return piece
    return None


def _in_one_piece(lab: Lab, prompt: tuple[int, ...]) -> list[Stream]:
    """The same answers without streaming, as a completion and as a chat: tokens, text, reason and usage."""
    tokenizer = streams.tokenizer_of(lab.ctx.candidate.model_dir)
    request = Request(prompt, NEW_TOKENS)
    message = _message(lab, tokenizer) if tokenizer is not None else None
    found = []
    for what, text in (("completion", None), *((("chat", message),) if message else ())):
        got, stated = lab.server(shapes.secret(lab)).client.whole(request, text)  # asking the incumbent ends it
        if got.error is not None:
            if lab.incumbent_serves(what, lambda it, text=text: it.client.whole(request, text)[0].error is None):
                raise _fail(f"a {what} that is not streamed: {got.error}; the incumbent serves it")
            continue
        if not got.token_ids or (text is not None and not stated):
            continue  # another engine's form: nothing that could be scored
        if text is not None and tokenizer and text not in tokenizer.decode(list(stated), skip_special_tokens=False):
            raise _fail("the prompt of a chat does not hold the message that was sent")
        if wrong := streams.account(got, NEW_TOKENS) or streams.text_fault(got, tokenizer):
            raise _fail(f"a {what} that is not streamed: {wrong}")
        found.append(got)
    return found


def _message(lab: Lab, tokenizer: Any) -> str:
    """A secret message of plain words."""
    text = tokenizer.decode(list(lab.draw("message", 1, 24, kinds=("document",))[0]))
    return " ".join("".join(c if c.isascii() and c.isalnum() else " " for c in text).split()) or "words"


def refused(stream: Stream) -> bool:
    return stream.error is not None and 400 <= (stream.status or 0) < 500


def _least(lab: Lab, prompt: tuple[int, ...]) -> None:
    """`min_tokens` forbids end-of-text before it. An extension: a server may refuse it with a 4xx."""
    ends = weights.eos_ids(lab.model_dir("secret"))
    server = lab.server(shapes.secret(lab))
    got = server.client.complete([Request(prompt, NEW_TOKENS, ignore_eos=False, min_tokens=LEAST)], 60.0)[0]
    if refused(got):
        least = [Request(prompt, 1, min_tokens=1)]
        if lab.incumbent_serves("min_tokens", lambda it: not refused(it.client.complete(least, 60.0)[0])):
            raise _fail("min_tokens is refused; the incumbent serves it")
        return
    if wrong := streams.account(got, streams.Expected(NEW_TOKENS, ends)):
        raise _fail(f"with min_tokens: {wrong}")
    early = [i for i, token in enumerate(got.token_ids) if token in ends and i < LEAST]
    if early or len(got.token_ids) < LEAST:
        raise _fail(f"{len(got.token_ids)} tokens came with min_tokens {LEAST}; end-of-text at {early}")
