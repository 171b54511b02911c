"""Text to tokens and back: tokenizer.json, the chat template, and detokenisation token by token.

Not for: stop strings (`core.py`).
"""

from __future__ import annotations

import codecs
import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

from engine.config import ConfigError


class TemplateError(ValueError):
    """The messages do not suit the chat template; the message says why."""


class Tokenizer:
    """A byte-level BPE tokenizer, as Qwen's are."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        decoder = (raw.get("decoder") or {}).get("type")
        if decoder != "ByteLevel":
            raise ConfigError(f"{path}: decoder is {decoder!r}; only 'ByteLevel' is supported")
        self._bpe: BpeTokenizer = BpeTokenizer.from_file(str(path))
        self._special = {t["id"] for t in raw.get("added_tokens", ()) if t.get("special")}
        self._template = _chat_template(model_dir)

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens of the conversation, ending where the assistant speaks. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template")
        from jinja2 import TemplateError as JinjaError  # slow to import, and only chats need it
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            text = environment.from_string(self._template).render(messages=messages, add_generation_prompt=True)
        except JinjaError as error:
            raise TemplateError(f"chat template: {error}") from error
        return self.encode(text)

    def token_text(self, token_id: int) -> str:
        """One token alone, for log-probabilities; bytes that are no UTF-8 show as U+FFFD."""
        return self.token_bytes(token_id, keep_special=True).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, keep_special: bool = False) -> bytes:
        """The bytes a token stands for; none for special tokens and for ids beyond the vocabulary."""
        if token_id in self._special and not keep_special:
            return b""
        token = self._bpe.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in token)
        except KeyError:  # an added token outside the byte alphabet stands for its own text
            return token.encode()


class Detokenizer:
    """Text of a growing token sequence. A character is emitted when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _chat_template(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    path = model_dir / "tokenizer_config.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    return None
