"""One damaged JSON value to well-formed JSON text, by a tolerant scanner that knows how writers go wrong.

Not for: finding where values begin (repair), the speed of the common case (decode).
"""

from __future__ import annotations

import codecs
import re

_SPACE = re.compile(r"[ \t\r\n\x00\x0b\x0c]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![^\s,:\]}])", re.ASCII)
_BARE = re.compile(r'[^\s,:{}\[\]"]+(?: +[^\s,:{}\[\]"]+)*', re.ASCII)
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_NOTHING = {"nan", "inf", "infinity", "none", "undefined", "nil", "nan(ind)", "-nan(ind)", "1.#inf", "1.#qnan", "-1.#ind"}
# What may follow a string, by its place. A quote followed by anything else is part of the text.
_AFTER_KEY = re.compile(r"\s*:", re.ASCII)
_AFTER_VALUE = re.compile(r'\s*(?:,\s*(?:"[^"\\]*"\s*:|\})|\}\s*(?:[,}\]]|$)|$)', re.ASCII)
_AFTER_ITEM = re.compile(r'\s*(?:,\s*(?:"|[-\d\[{\]tfn])|\]\s*(?:[,}\]]|$)|$)', re.ASCII)
_FIX = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|[\\"\x00-\x1f]')
_BAD_ESCAPE = re.compile(r'(?<!\\)(?:\\\\)*\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_UNESCAPED = re.compile(r'\\(?!")')
_BAD_ESCAPE_BYTES = re.compile(_BAD_ESCAPE.pattern.encode())
_UNESCAPED_BYTES = re.compile(_UNESCAPED.pattern.encode())
_WITH_BACKSLASH = re.compile(rb'"[^"\\]*(?:\\[^\r\n][^"\\]*)+"')


class Unmendable(ValueError):
    """The text cannot be read as one value."""


def mend(text: bytes) -> tuple[bytes, int, int]:
    """Read one object at the start of `text`.

    Returns (well-formed JSON as UTF-8, offset of the end in `text`, number of strings and values mended).
    Raises Unmendable.
    """
    scanner = _Scanner(text.decode("latin-1"))
    scanner.value("\x00")
    return "".join(scanner.out).encode("latin-1"), scanner.at, scanner.count


def escape_backslashes(text: bytes) -> tuple[bytes | None, int]:
    """`text` with its unescaped backslashes escaped, and in how many strings; (None, 0) where there are none.

    Right only where quotes are in order: whoever uses it checks that the result parses.
    """
    count = 0

    def fix(match: re.Match[bytes]) -> bytes:
        nonlocal count
        string = match.group()
        if not _BAD_ESCAPE_BYTES.search(string):
            return string
        count += 1
        return _UNESCAPED_BYTES.sub(rb"\\\\", string)

    fixed = _WITH_BACKSLASH.sub(fix, text)
    return (fixed, count) if count else (None, 0)


class _Scanner:
    """Characters are bytes (latin-1), so offsets hold; strings become UTF-8 when they are written."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.count = 0
        self.out: list[str] = []
        self.depth = 0

    def _peek(self) -> str:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def value(self, place: str) -> None:
        """One value; `place` is the bracket that it stands in."""
        head = self._peek()
        if head == "{":
            self._object()
        elif head == "[":
            self._array()
        elif head == '"':
            self._string(_AFTER_VALUE if place == "{" else _AFTER_ITEM)
        elif head in ",}]" and head:
            self.count += 1
            self.out.append("null")
        elif not head:
            raise Unmendable("the text ends where a value should be")
        else:
            self._bare()

    def _enter(self, bracket: str) -> None:
        self.depth += 1
        if self.depth > 200:
            raise Unmendable("nested too deeply")
        self.at += 1
        self.out.append(bracket)

    def _object(self) -> None:
        self._enter("{")
        first = True
        while self._another("}", first):
            if self._peek() != '"':
                raise Unmendable(f"no key at {self.at}")
            first = False
            self._string(_AFTER_KEY)
            if self._peek() != ":":
                raise Unmendable(f"no colon at {self.at}")
            self.at += 1
            self.out.append(":")
            self.value("{")
        self._leave("}")

    def _array(self) -> None:
        self._enter("[")
        first = True
        while self._another("]", first):
            if self._peek() in ("", "}"):
                raise Unmendable(f"array does not close at {self.at}")
            first = False
            self.value("[")
        self._leave("]")

    def _another(self, closing: str, first: bool) -> bool:
        """Step over the comma, one of several, or none; False at the closing bracket."""
        commas = 0
        while self._peek() == ",":
            self.at += 1
            commas += 1
        head = self._peek()
        last = head == closing
        self.count += commas != (0 if first or last else 1)
        if not last and not first:
            self.out.append(",")
        return not last

    def _leave(self, bracket: str) -> None:
        self.at += 1
        self.depth -= 1
        self.out.append(bracket)

    def _string(self, after: re.Pattern[str]) -> None:
        match = _STRING.match(self.text, self.at)
        if match and after.match(self.text, match.end()):
            self.at = match.end()
            raw = match.group()
            good = _utf8(raw)
            self.count += good is not raw
            self.out.append(good)
            return
        end = self.at + 1
        while True:
            end = self.text.find('"', end)
            if end < 0:
                raise Unmendable(f"string at {self.at} does not end")
            if after.match(self.text, end + 1):
                break
            end += 1
        inside = self.text[self.at + 1 : end]
        backslashes = len(inside) - len(inside.rstrip("\\"))
        if backslashes % 2 or _BAD_ESCAPE.search(inside):
            # the writer did not escape: C:\new\dir\ means its backslashes, all of them
            inside = _UNESCAPED.sub(r"\\\\", inside)
        self.at = end + 1
        self.count += 1
        self.out.append(_utf8('"' + _FIX.sub(_escape, inside) + '"'))

    def _bare(self) -> None:
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            self.out.append(number.group())
            return
        bare = _BARE.match(self.text, self.at)
        if bare is None:
            raise Unmendable(f"nothing readable at {self.at}")
        word = bare.group()
        self.at = bare.end()
        if word in _LITERALS:
            self.out.append(word)
            return
        self.count += 1
        if word.lower().lstrip("+-") in _NOTHING or word.lower() in _NOTHING:
            self.out.append("null")
        elif word in ("True", "False"):
            self.out.append(word.lower())
        else:
            self.out.append(_utf8('"' + _FIX.sub(_escape, word) + '"'))


def _escape(match: re.Match[str]) -> str:
    text = match.group()
    if len(text) > 1:
        return text
    if text in '\\"':
        return "\\" + text
    return f"\\u{ord(text):04x}"


def _utf8(text: str) -> str:
    """The same characters-as-bytes when they are UTF-8; else each foreign byte as the latin-1 letter it most likely was."""
    if text.isascii():
        return text
    raw = text.encode("latin-1")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8", errors="latin1-bytes").encode().decode("latin-1")
    return text


def _as_latin1(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("latin-1"), error.end


codecs.register_error("latin1-bytes", _as_latin1)
