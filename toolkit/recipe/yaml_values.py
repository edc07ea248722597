"""Reads and writes YAML so that each value is what is written.

PyYAML reads YAML 1.1, in which `0100` is 64, `1:30` is 90, `no` is false, and `1e-4` is text. Here numbers are those of
Python, and text that neither YAML 1.2 nor Python takes for such a number is refused with its line.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

NOT_YAML = (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError, RecursionError)
"""What reading YAML raises: its own errors, and Python's about keys, numbers and depth."""

YAML_HINT = "Use UTF-8, spaces and no tabs, each key once, and quotes around text with signs such as : # * ! { ["
"""How to fix it."""

_TAG = "tag:yaml.org,2002:"
_TAGS = {f"{_TAG}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")}
_MERGE = f"{_TAG}merge"


class _Loader(yaml.SafeLoader):
    """Reads floats as YAML 1.2 does (`3e-4` is a number), and dates and `=` as text."""


class _WordsLoader(_Loader):
    """Reads only true and false as boolean values; yes, no, on and off are text, as in YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that a reader of YAML 1.1 or 1.2 would take for something else."""

    def choose_scalar_style(self) -> Any:
        # PyYAML writes them as they are, and reads them as the end of a line.
        text: str = self.event.value  # type: ignore[union-attr] # of a scalar
        return '"' if set(text) & set("\x85\u2028\u2029") else super().choose_scalar_style()


_EXPONENT = (f"{_TAG}float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789."))


def _without(kind: Any, tag: str, signs: str) -> None:
    """Makes a loader take text that begins with one of `signs` as text, where it would take it for `tag`."""
    kind.yaml_implicit_resolvers = {
        sign: [found for found in resolvers if sign not in signs or found[0] != f"{_TAG}{tag}"]
        for sign, resolvers in kind.yaml_implicit_resolvers.items()
    }


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(*_EXPONENT)
_without(_Loader, "timestamp", "0123456789")
_without(_Loader, "value", "=")
_WordsLoader.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_without(_WordsLoader, "bool", "yYnNoO")


def yaml_value(text: str, booleans_as_words: bool = False) -> Any:
    """Parses a YAML text.

    Args:
        booleans_as_words: whether yes, no, on and off are true and false, as Accelerate reads them in its configs.

    Raises:
        NOT_YAML: one of these errors, if the text is not YAML, or a value would not be what is written.
    """
    return _read(text, _Loader if booleans_as_words else _WordsLoader, is_override=False)


def override_value(text: str) -> Any:
    """Parses the YAML of a single value, without a comment. Raises as `yaml_value`."""
    return _read(text, _WordsLoader, is_override=True)


def _read(text: str, kind: type[_Loader], is_override: bool) -> Any:
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if is_override:
            _require_all_read(text, node)
        if node is None:
            return None
        _Check(loader).visit(node)
        return _unshared(loader.construct_document(node))
    finally:
        loader.dispose()


def lines_of_keys(text: str) -> dict[str, int]:
    """Returns dotted path -> line, from 1, of each key and list item of a text that `yaml_value` reads."""
    lines: dict[str, int] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        items: list[tuple[Any, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            items = [(key.value, key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            items = [(index, value, value) for index, value in enumerate(node.value)]
        for name, marked, value in items:
            lines[f"{path}{name}"] = marked.start_mark.line + 1
            visit(value, f"{path}{name}.")

    visit(yaml.compose(text, Loader=_WordsLoader), "")
    return lines


def _require_all_read(text: str, node: yaml.Node | None) -> None:
    """Raises AmbiguousError if YAML takes a part of an override for a comment, an anchor or a sign for more lines."""
    if node is None and not text.strip():
        return
    is_lost = node is None or (
        isinstance(node, yaml.ScalarNode) and not node.value and text.strip() not in ("''", '""')
    )
    if is_lost or (node is not None and text[node.end_mark.index :].strip()):
        raise AmbiguousError(
            None, None, "YAML takes a part of it for a comment or an anchor; put quotes around it", None
        )


class AmbiguousError(yaml.constructor.ConstructorError):
    """A value would not be read as it is written. The message says how to write it."""


def _error(node: yaml.Node, problem: str) -> AmbiguousError:
    return AmbiguousError(None, None, problem, node.start_mark)


class _Check:
    """Refuses what would not be read as it is written."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def visit(self, node: yaml.Node) -> None:
        if node.tag not in _TAGS:
            raise _error(node, f"the tag {node.tag.replace(_TAG, '!!')} is not read; remove it")
        if isinstance(node, yaml.MappingNode):
            self._require_unique(node)
            for key, value in node.value:
                if key.tag != _MERGE:
                    self.visit(key)
                self.visit(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.visit(item)
        else:
            self._require_as_written(node)

    def _require_unique(self, node: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == _MERGE else self._loader.construct_object(key_node, deep=True)
            if key in seen:
                raise _error(key_node, f"the key {key!r} appears twice; leave one out")
            seen.add(key)

    def _require_as_written(self, node: yaml.Node) -> None:
        if node.tag == f"{_TAG}str":
            return
        if node.tag != self._loader.resolve(yaml.ScalarNode, node.value, (True, False)):  # type: ignore[no-untyped-call]
            raise _error(node, f"{node.value!r} is not a value of {node.tag.replace(_TAG, '!!')}; remove the tag")
        if node.tag not in (f"{_TAG}int", f"{_TAG}float"):
            return
        try:
            number = int(node.value, 0) if node.tag == f"{_TAG}int" else float(node.value)
            is_plain = isinstance(number, int) or math.isfinite(number)
        except ValueError:
            is_plain = False
        if not is_plain:
            read = self._loader.construct_object(node)
            mend = "write a finite number in plain decimal digits, or put quotes around it if it is text"
            raise _error(node, f"{node.value} would be read as {read}; {mend}")


def _unshared(value: Any) -> Any:
    """Returns the value without an object in two places: a change of one must not change the other."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def yaml_problem(error: Exception) -> str:
    """Returns the line, what is wrong there and how to fix it, of one of `NOT_YAML`."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error).rstrip(".")
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return f"not readable as YAML: {where}{problem}" + ("" if isinstance(error, AmbiguousError) else f". {YAML_HINT}")


def yaml_text(value: Any, **layout: Any) -> str:
    """Writes a value as YAML that `yaml_value` reads back as it is. `layout` are settings of `yaml.dump`."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout))
