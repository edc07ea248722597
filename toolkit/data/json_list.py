"""The values of a JSON file that is one list, one at a time: a file of a few kB may unpack to more than the memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from toolkit.errors import DataError

WRAPPERS = ("data", "rows", "examples")
"""Keys under which a JSON file may hold its list of rows."""

CHUNK_BYTES = 2**20
MAX_KEYS = 100_000
"""Of an object, before it is taken for none that holds a list."""

_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 32
"""Characters at the end of what has been read that may be the beginning of a number or a word of JSON's."""


def values_of(file: IO[bytes], path: str, max_bytes: int) -> Iterator[Any]:
    """The values of the list, bare or under one of `WRAPPERS`.

    Args:
        path: for errors.
        max_bytes: of one value.

    Raises:
        DataError: where it holds no such list, where it is not JSON, and where a value is larger.
    """
    text = _Text(file, path, max_bytes)
    first = text.peek()
    if first == "[":
        yield from _list(text)
    elif first == "{":
        yield from _under_key(text)
    else:
        text.value()
        raise DataError(f"data: {path!r} is neither a list of objects nor an object on each line; write one of them")
    text.expect("")


def _list(text: _Text) -> Iterator[Any]:
    text.expect("[")
    if text.peek() != "]":
        while True:
            text.row += 1
            yield text.value()
            if text.peek() != ",":
                break
            text.expect(",")
    text.expect("]")


def _under_key(text: _Text) -> Iterator[Any]:
    keys: list[str] = []
    found = None
    text.expect("{")
    while text.peek() != "}" or keys:
        keys.append(text.key())
        if keys[-1] in WRAPPERS and text.peek() == "[":
            if found is not None:
                raise DataError(f"data: {text.path!r} holds two lists, {found} and {keys[-1]}; leave one of them")
            found = keys[-1]
            yield from _list(text)
        else:
            text.value()
        if text.peek() != "," or len(keys) > MAX_KEYS:
            break
        text.expect(",")
    if len(keys) <= MAX_KEYS:
        text.expect("}")
    if found is None:
        from toolkit.data.readers import listed

        raise DataError(
            f"data: {text.path!r} holds one object with the keys {listed(keys)}; allowed: a list of objects, "
            f"bare or under one of {', '.join(WRAPPERS)}, or an object on each line"
        )


class _Text:
    """What has been read of a file, and not yet been used.

    Attributes:
        row: number of the list's value under way.
    """

    def __init__(self, file: IO[bytes], path: str, max_bytes: int) -> None:
        self.path = path
        self.row = 0
        self._file = file
        self._max_bytes = max_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._num_bytes = 0
        self._text = ""
        self._at = 0
        self._has_ended = False

    def peek(self) -> str:
        """The next character that is no whitespace; empty at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def expect(self, character: str) -> None:
        """Goes past that character; the empty one is the end of the file."""
        if (found := self.peek()) != character:
            what = repr(character) if character else "the end of the file"
            raise self._wrong(f"{repr(found) if found else 'the end of the file'} instead of {what}")
        self._at += len(character)

    def key(self) -> str:
        if self.peek() != '"':
            raise self._wrong("a key that is no text")
        key = str(self.value())
        self.expect(":")
        return key

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                if self._has_ended or len(self._text) - end > _LONGEST_WORD:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._has_ended or not self._may_be_cut(error):
                    raise self._wrong(error.msg) from error
            except (ValueError, RecursionError) as error:  # Python reads whole numbers of up to 4300 digits
                raise self._wrong("nested too deeply, or with a number that is too long") from error
            if len(self._text) - self._at > self._max_bytes:
                limit = f"{self._max_bytes / 2**20:g} MiB{self._place()}"
                raise DataError(
                    f"data: {self.path!r} holds a value of more than {limit}, the limit of a row; divide it"
                )
            self._read_on()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether what follows in the file may make it right."""
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos <= _LONGEST_WORD

    def _read_on(self) -> None:
        # Twice as much for a long value: each time it is parsed from its beginning.
        chunk = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        self._num_bytes += len(chunk)
        self._has_ended = not chunk
        try:
            self._text = self._text[self._at :] + self._decoder.decode(chunk, final=self._has_ended)
        except UnicodeDecodeError as error:
            place = self._num_bytes - len(error.object) + error.start
            raise DataError(f"data: {self.path!r} is not UTF-8 (byte {place}); save it as UTF-8") from error
        self._at = 0

    def _wrong(self, why: str) -> DataError:
        return DataError(f"data: {self.path!r} is not JSON: {why}{self._place()}; correct it there")

    def _place(self) -> str:
        return f" in row {self.row}" if self.row else ""
