"""Requests and responses of the HTTP surface: strict parsing, and the shapes of OpenAI's and vLLM's bodies.

An unknown field is an error, as is a value of the wrong type: a misspelt option must not be ignored.
Not for: transport (`server.py`) or limits that depend on the model (`scheduler.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.profiling import ProfileOptions
from engine.request import Output, SamplingParams, TokenLogprobs

MAX_LOGPROBS = 20
MAX_STOP = 16


class BadRequest(ValueError):
    """A 4xx: `param` is the field at fault, None when it is the body as a whole."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A parsed /v1/completions or /v1/chat/completions body."""

    prompt: str | list[int] | None  # completions
    messages: list[dict[str, Any]] | None  # chat
    model: str | None
    params: SamplingParams
    max_tokens_given: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool  # name tokens "token_id:N" in logprobs

    @property
    def chat(self) -> bool:
        return self.messages is not None


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises BadRequest for anything else."""
    try:
        value = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def parse_generation(body: dict[str, Any], *, chat: bool, vocab_size: int) -> GenerationRequest:
    """Check every field of `body`. Raises BadRequest naming the first that is wrong."""
    fields = _CHAT_FIELDS if chat else _COMPLETION_FIELDS
    values = _checked(body, fields)
    if values.get("n", 1) != 1:
        raise BadRequest("n must be 1; send several requests instead", "n")
    prompt = _prompt(body, vocab_size) if not chat else None
    messages = _messages(body) if chat else None
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    params = _sampling(values, max_tokens, chat)
    options = _checked(values.get("stream_options", {}), _STREAM_OPTIONS, "stream_options.")
    return GenerationRequest(
        prompt=prompt,
        messages=messages,
        model=values.get("model"),
        params=params,
        max_tokens_given=max_tokens is not None,
        stream=values.get("stream", False),
        include_usage=options.get("include_usage", False),
        return_token_ids=values.get("return_token_ids", False),
        tokens_as_ids=values.get("return_tokens_as_token_ids", False),
    )


def parse_profile(body: dict[str, Any]) -> ProfileOptions:
    """Body of /start_profile."""
    return ProfileOptions(**_checked(body, _PROFILE_FIELDS))


# --- responses -------------------------------------------------------------------------------------------


def error_body(message: str, param: str | None, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def head(request: GenerationRequest, request_id: str, created: int, model: str) -> dict[str, Any]:
    """What every body and chunk of one response begins with."""
    if request.chat:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
    else:
        kind = "text_completion"
    return {"id": request_id, "object": kind, "created": created, "model": model}


def choice(
    request: GenerationRequest, output: Output, name_token: Callable[[int], str], *, first: bool = False
) -> dict[str, Any]:
    """One choice: of a chunk, or (for an Output that holds everything) of a whole response."""
    result: dict[str, Any] = {"index": 0}
    if not request.chat:
        result["text"] = output.text
    elif request.stream:
        result["delta"] = {"role": "assistant"} if first else {}
        result["delta"]["content"] = output.text
    else:
        result["message"] = {"role": "assistant", "content": output.text}
    if output.logprobs is not None:
        shape = _chat_logprobs if request.chat else _completion_logprobs
        result["logprobs"] = shape(output.token_ids, output.logprobs, name_token)
    if request.return_token_ids:
        result["token_ids"] = output.token_ids
    result["finish_reason"] = output.finish_reason
    return result


def _completion_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs], name_token: Callable[[int], str]
) -> dict[str, Any]:
    return {
        "tokens": [name_token(token) for token in token_ids],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [{name_token(token): value for token, value in entry.top} for entry in logprobs],
    }


def _chat_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs], name_token: Callable[[int], str]
) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": name_token(token),
                "logprob": entry.logprob,
                "top_logprobs": [{"token": name_token(t), "logprob": value} for t, value in entry.top],
            }
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]
    }


# --- field checks ----------------------------------------------------------------------------------------

Check = Callable[[Any], Any]  # returns the value, or raises ValueError with what it must be


def _is(kind: type, what: str) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(what)
        return value

    return check


def _number(low: float, high: float, what: str, *, whole: bool = False, open_low: bool = False) -> Check:
    def check(value: Any) -> Any:
        kinds = (int,) if whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(what)
        if not low <= value <= high or (open_low and value == low):
            raise ValueError(what)
        return value

    return check


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOP
        or any(not isinstance(s, str) or not s for s in stops)
    ):
        raise ValueError(f"a non-empty string or a list of at most {MAX_STOP} of them")
    return tuple(stops)


def _any(value: Any) -> Any:
    return value


_BIG = 2**31 - 1
_FLAG = _is(bool, "true or false")
_COUNT = _number(1, _BIG, "a positive integer", whole=True)
_COMMON: dict[str, Check] = {
    "model": _is(str, "a string"),
    "n": _number(1, _BIG, "1", whole=True),
    "stream": _FLAG,
    "stream_options": _is(dict, "an object"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": _number(0, _BIG, "an integer >= 0", whole=True),
    "temperature": _number(0, 100, "a number from 0 to 100"),
    "top_p": _number(0, 1, "a number above 0, at most 1", open_low=True),
    "top_k": _number(-1, _BIG, "an integer >= 1, or 0 or -1 for all tokens", whole=True),
    "seed": _number(-(2**63), 2**63 - 1, "a 64-bit integer", whole=True),
    "stop": _stop,
    "ignore_eos": _FLAG,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "user": _is(str, "a string"),
}
_COMPLETION_FIELDS: dict[str, Check] = _COMMON | {
    "prompt": _any,
    "logprobs": _number(-1, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or -1 for all", whole=True),
}
_CHAT_FIELDS: dict[str, Check] = _COMMON | {
    "messages": _any,
    "logprobs": _FLAG,
    "top_logprobs": _number(
        -1, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or -1 for all", whole=True
    ),
}
_STREAM_OPTIONS: dict[str, Check] = {"include_usage": _FLAG}
_PROFILE_FIELDS: dict[str, Check] = {"with_stack": _FLAG, "record_shapes": _FLAG, "max_steps": _COUNT}


def _checked(body: dict[str, Any], fields: dict[str, Check], prefix: str = "") -> dict[str, Any]:
    """The fields of `body` that are set (null counts as absent), each checked."""
    values = {}
    for name, value in body.items():
        if name not in fields:
            raise BadRequest(
                f"unknown field {prefix}{name}; valid fields: {', '.join(sorted(fields))}", prefix + name
            )
        if value is None:
            continue
        try:
            values[name] = fields[name](value)
        except ValueError as error:
            raise BadRequest(f"{prefix}{name} must be {error}; got {_shown(value)}", prefix + name) from None
    return values


def _sampling(values: dict[str, Any], max_tokens: int | None, chat: bool) -> SamplingParams:
    names = ("min_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos")
    known = {name: values[name] for name in names if name in values}
    if chat:
        logprobs = values.get("top_logprobs", 0) if values.get("logprobs") else None
        if "top_logprobs" in values and not values.get("logprobs"):
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    else:
        logprobs = values.get("logprobs")
    if max_tokens is not None:
        known["max_tokens"] = max_tokens
    params = SamplingParams(top_k=max(0, values.get("top_k", 0)), logprobs=logprobs, **known)
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {params.min_tokens}; it must not exceed max_tokens ({max_tokens})", "min_tokens"
        )
    return params


def _prompt(body: dict[str, Any], vocab_size: int) -> str | list[int]:
    """A string or a list of token ids; a list holding one of either is taken as that one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return _text(prompt, "prompt")
    if isinstance(prompt, list) and prompt:
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise BadRequest(
                    f"prompt holds {_shown(token)}; token ids are integers from 0 to {vocab_size - 1}",
                    "prompt",
                )
        return prompt
    raise BadRequest(
        f"prompt must be a non-empty string or list of token ids; got {_shown(prompt)}", "prompt"
    )


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a non-empty list; got {_shown(messages)}", "messages")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f"messages[{i}] must be an object", "messages")
        known = {"role": message.get("role"), "content": _content(message.get("content"))}
        for key, value in known.items():
            if not isinstance(value, str):
                raise BadRequest(f"messages[{i}].{key} must be a string", "messages")
            _text(value, "messages")
        plain.append(message | known)
    return plain


def _content(value: Any) -> Any:
    """A list of text parts is the text they make."""
    if not isinstance(value, list):
        return value
    parts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return None
        parts.append(part["text"])
    return "".join(parts)


def _text(value: str, field: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} is not valid Unicode: {error.reason}", field) from None
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
