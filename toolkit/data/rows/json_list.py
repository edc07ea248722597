"""Reads a JSON file that is one list value by value, because a file of a few kB may unpack to more than the memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from toolkit.data.rows.values import listed
from toolkit.errors import DataError

WRAPPERS = ("data", "rows", "examples")
"""Keys under which a JSON file may hold its list of rows."""

CHUNK_BYTES = 2**20
MAX_KEYS = 100_000
"""The most keys of an object before it counts as one without a list."""

_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 32
"""Characters at the end of the text read so far that may begin a number or a word of JSON."""


def values_of(file: IO[bytes], path: str, max_bytes: int) -> Iterator[Any]:
    """Yields the values of the list, bare or under one of `WRAPPERS`.

    Args:
        path: name of the file in errors.
        max_bytes: the most bytes of one value.

    Raises:
        DataError: if the file holds no such list, it is not JSON, or a value is larger.
    """
    text = _Text(file, path, max_bytes)
    first = text.peek()
    if first == "[":
        yield from _list_values(text)
    elif first == "{":
        yield from _values_under_key(text)
    else:
        text.value()
        raise DataError(f"data: {path!r} is neither a list of objects nor an object on each line; write one of them")
    text.expect("")


def _list_values(text: _Text) -> Iterator[Any]:
    text.expect("[")
    if text.peek() != "]":
        while True:
            text.row += 1
            yield text.value()
            if text.peek() != ",":
                break
            text.expect(",")
    text.expect("]")


def _values_under_key(text: _Text) -> Iterator[Any]:
    keys: list[str] = []
    found = None
    text.expect("{")
    while text.peek() != "}" or keys:
        keys.append(text.key())
        if keys[-1] in WRAPPERS and text.peek() == "[":
            if found is not None:
                raise DataError(f"data: {text.path!r} holds two lists, {found} and {keys[-1]}; leave one of them")
            found = keys[-1]
            yield from _list_values(text)
        else:
            text.value()
        if text.peek() != "," or len(keys) > MAX_KEYS:
            break
        text.expect(",")
    if len(keys) <= MAX_KEYS:
        text.expect("}")
    if found is None:
        raise DataError(
            f"data: {text.path!r} holds one object with the keys {listed(keys)}; allowed: a list of objects, "
            f"bare or under one of {', '.join(WRAPPERS)}, or an object on each line"
        )


class _Text:
    """The part of a file that has been read but not yet parsed.

    Attributes:
        row: number of the list's current value.
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
        """Returns the next character that is not whitespace, or an empty text at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def expect(self, character: str) -> None:
        """Skips that character; an empty text stands for the end of the file.

        Raises:
            DataError: if another one follows.
        """
        if (found := self.peek()) != character:
            what = repr(character) if character else "the end of the file"
            raise self._not_json(f"{repr(found) if found else 'the end of the file'} instead of {what}")
        self._at += len(character)

    def key(self) -> str:
        if self.peek() != '"':
            raise self._not_json("a key that is no text")
        key = str(self.value())
        self.expect(":")
        return key

    def value(self) -> Any:
        """Parses the next value.

        Raises:
            DataError: if it is not JSON, or too large.
        """
        self.peek()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                if self._has_ended or len(self._text) - end > _LONGEST_WORD:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._has_ended or not self._may_be_cut(error):
                    raise self._not_json(error.msg) from error
            except (ValueError, RecursionError) as error:  # Python reads whole numbers of up to 4300 digits
                raise self._not_json("nested too deeply, or with a number that is too long") from error
            if len(self._text) - self._at > self._max_bytes:
                limit = f"{self._max_bytes / 2**20:g} MiB{self._in_row()}"
                raise DataError(
                    f"data: {self.path!r} holds a value of more than {limit}, the limit of a row; divide it"
                )
            self._read_on()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Returns whether the rest of the file may make the value valid."""
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos <= _LONGEST_WORD

    def _read_on(self) -> None:
        # A long value doubles the chunk, because it is parsed from its beginning each time.
        chunk = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        self._num_bytes += len(chunk)
        self._has_ended = not chunk
        try:
            self._text = self._text[self._at :] + self._decoder.decode(chunk, final=self._has_ended)
        except UnicodeDecodeError as error:
            place = self._num_bytes - len(error.object) + error.start
            raise DataError(f"data: {self.path!r} is not UTF-8 (byte {place}); save it as UTF-8") from error
        self._at = 0

    def _not_json(self, why: str) -> DataError:
        return DataError(f"data: {self.path!r} is not JSON: {why}{self._in_row()}; correct it there")

    def _in_row(self) -> str:
        return f" in row {self.row}" if self.row else ""
