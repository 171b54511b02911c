"""Secret prompts, fresh for every evaluation, from a key that only the optimiser's process knows.

A prompt is a pure function of (key, evaluation id, its place, kind, length): a resumed run draws the same again, and
nobody without the key can foresee one. Not for: deciding when to draw (callers do, once the candidate is up).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from optimizer.traffic import texts

RANDOM = "random"
MARKED = "marked"  # random tokens with special ones between them, as in every chat
ALL_KINDS = (RANDOM, MARKED, *texts.KINDS)
# Most prompts are random tokens: text that a model knows well hides faults.
DEFAULT_KINDS = (RANDOM, "document", RANDOM, "languages", RANDOM, "code", RANDOM, "rare_scripts",
                 RANDOM, "numbers", RANDOM, "noise", RANDOM, "repetition")  # fmt: skip
MARK_EVERY = 8  # tokens to one special one, about
PAGE_LENGTHS = (15, 16, 17, 31, 32, 33, 255, 256, 257)


class PromptSource:
    """Draws prompts as token ids for the model in `tokenizer_dir` (tokenizer.json optional, config.json needed).

    Without a tokenizer every kind of text is `random`. Ids of special tokens occur in `marked` prompts only.
    """

    def __init__(self, key: bytes, tokenizer_dir: Path) -> None:
        if len(key) < 16:
            raise ValueError("the prompt key needs at least 16 bytes")
        self._key = key
        self.directory = Path(tokenizer_dir)

    @cached_property
    def _tokenizer(self):
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))

    @cached_property
    def _config(self) -> dict:
        return json.loads((self.directory / "config.json").read_text())

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """Every token id that may stand in a random prompt."""
        vocabulary = int(self._config["vocab_size"])
        if self._tokenizer is not None:
            vocabulary = min(vocabulary, self._tokenizer.get_vocab_size())
        special = set(self.special_ids.tolist())
        return np.array([i for i in range(vocabulary) if i not in special], dtype=np.int64)

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Token ids that mark places in a text, such as its end; may be empty."""
        special = {self._config.get("eos_token_id"), self._config.get("bos_token_id"), self._config.get("pad_token_id")}
        if self._tokenizer is not None:
            special |= set(self._tokenizer.get_added_tokens_decoder())
        flat = {i for item in special for i in (item if isinstance(item, list) else [item])}
        return np.array(sorted(i for i in flat if type(i) is int), dtype=np.int64)

    def draw(
        self, evaluation: str, n: int, tokens: int | Sequence[int], kinds: Iterable[str] = DEFAULT_KINDS
    ) -> list[tuple[int, ...]]:
        """`n` prompts of exactly `tokens` ids each (or one length per prompt), kinds in turn.

        ValueError names an unknown kind or a length below one.
        """
        chosen = list(kinds)
        unknown = sorted(set(chosen) - set(ALL_KINDS))
        if unknown or not chosen:
            raise ValueError(f"unknown prompt kinds {unknown}; known: {', '.join(ALL_KINDS)}")
        lengths = [tokens] * n if isinstance(tokens, int) else list(tokens)
        if len(lengths) != n or min(lengths, default=1) < 1:
            raise ValueError("tokens must be a length of at least one, or one for each prompt")
        return [self._one(evaluation, place, chosen[place % len(chosen)], lengths[place]) for place in range(n)]

    def _one(self, evaluation: str, place: int, kind: str, length: int) -> tuple[int, ...]:
        stream = SecretStream(self._key, f"{evaluation}/{place}/{kind}/{length}")
        ids: list[int] = []
        if kind not in (RANDOM, MARKED) and self._tokenizer is not None:
            while len(ids) < length:
                ids += self._tokenizer.encode(texts.KINDS[kind](stream.below), add_special_tokens=False).ids
        else:
            ordinary = self.ordinary_ids
            ids = [int(ordinary[stream.below(len(ordinary))]) for _ in range(length)]
        if kind == MARKED and len(self.special_ids):
            for _ in range(1 + length // MARK_EVERY):
                ids[stream.below(length)] = int(self.special_ids[stream.below(len(self.special_ids))])
        return tuple(ids[:length])

    def integers(self, evaluation: str, n: int, below: int) -> list[int]:
        """Other secret choices of an evaluation: positions, seeds, layers."""
        stream = SecretStream(self._key, f"{evaluation}/integers")
        return [stream.below(below) for _ in range(n)]

    @staticmethod
    def sha(prompts: Sequence[Sequence[int]]) -> str:
        """A digest that names a set of prompts in the ledger without revealing them."""
        return hashlib.sha256(json.dumps([list(p) for p in prompts], separators=(",", ":")).encode()).hexdigest()


class SecretStream:
    """Unpredictable numbers from SHAKE-256 of key and label: seeing some tells nothing of the others."""

    _BLOCK = 8192

    def __init__(self, key: bytes, label: str) -> None:
        self._seed = hashlib.blake2b(label.encode(), key=key[:64], digest_size=32).digest()
        self._block = 0
        self._words: list[int] = []

    def below(self, n: int) -> int:
        """A number in [0, n). The bias of the remainder is below n / 2**64."""
        if not self._words:
            data = hashlib.shake_256(self._seed + self._block.to_bytes(8, "big")).digest(self._BLOCK)
            self._words = np.frombuffer(data, dtype=np.uint64).tolist()
            self._block += 1
        return self._words.pop() % n
