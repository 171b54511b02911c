"""Text of a request as its tokens arrive: detokenisation and stop strings.

Text that could still become a stop string is held back, so what was emitted never has to be taken back.
Not for: stop tokens and lengths (`core.py`).
"""

from __future__ import annotations

from engine.tokenizer import Detokenizer, Tokenizer


class TextStream:
    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._keep = max((len(s) for s in stop), default=1) - 1  # longest start of a stop string
        self._unchecked = min_tokens  # stop strings do not count before
        self._held = ""

    def add(self, token_id: int) -> tuple[str, bool]:
        """-> text that can be emitted now, and whether a stop string ended it (it is cut off)."""
        text = self._held + self._detokenizer.add(token_id)
        self._unchecked -= 1
        if self._unchecked >= 1:
            self._held = ""
            return text, False
        text, stopped = self._cut(text)
        if stopped:
            self._held = ""
            return text, True
        split = len(text) - self._could_start_stop(text)
        self._held = text[split:]
        return text[:split], False

    def finish(self) -> tuple[str, bool]:
        """What was held back, at the end; a stop string may still show in it."""
        text, stopped = self._cut(self._held + self._detokenizer.flush())
        self._held = ""
        return text, stopped

    def _cut(self, text: str) -> tuple[str, bool]:
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    def _could_start_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._keep, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
