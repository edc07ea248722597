"""Chat templates are programs of strangers: no single operation of theirs may take for ever, or all of the memory.

Python raises nothing inside a call in C, so that a time limit cannot end `'a' * 10**10`: it is refused instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 2**24
"""Characters or items of what one operation makes: 16 times as many as a conversation of a million tokens has words."""

MOST_BITS = 2**16
"""Of a number: 20,000 digits."""

WIDEST = 1000
"""Spaces of an indent, digits of a rounded number."""

_PERCENT = re.compile(r"%(?:\(.*?\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_BRACES = re.compile(r"\{[^{}]*:[^{}]*?(\d{7,}|\{)")


class TooLargeError(Exception):  # no jinja.TemplateError: those are of a single row
    """What a template makes is larger than any conversation."""


def _require(size: int, most: int = LONGEST) -> None:
    if abs(size) > most:
        raise TooLargeError


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _require_product(left: Any, right: Any) -> None:
    for sequence, number in ((left, right), (right, left)):
        if isinstance(number, int):
            _require(_length(sequence) * number)
    if isinstance(left, int) and isinstance(right, int):
        _require(left.bit_length() + right.bit_length(), MOST_BITS)


def _require_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _require(left.bit_length() * right, MOST_BITS)


def _require_format(text: Any, *values: Any, **named: Any) -> None:
    """Widths in a format string, or among what it formats, where it takes them from there."""
    if not isinstance(text, str):
        return
    widths = [width for found in _PERCENT.findall(text) for width in found] + _BRACES.findall(text)
    _require(max((int(width) for width in widths if width.isdigit()), default=0))
    if "*" in widths or "{" in widths:
        given = [item for value in values for item in (value if isinstance(value, tuple) else [value])]
        _require(max((value for value in [*given, *named.values()] if isinstance(value, int)), default=0))


def _require_replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _require(_length(text) + str(text).count(str(old)) * len(str(new)))


def _require_joined(separator: Any, items: Any) -> None:
    if isinstance(items, list | tuple):
        _require(sum(map(_length, items)) + len(items) * _length(separator))


def _require_width(*values: Any, **named: Any) -> None:
    for value in [*values, *named.values()]:
        if isinstance(value, int):
            _require(value)


def _require_narrow(text: Any, *values: Any, **named: Any) -> None:
    for value in [*values, *named.values()]:
        if isinstance(value, int):
            _require(value, WIDEST)
            _require(_length(text) * value)


_OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "+": lambda left, right: _require(_length(left) + _length(right)),
    "*": _require_product,
    "**": _require_power,
    "%": _require_format,
}
_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _require_width),
    "expandtabs": _require_narrow,
    "format": _require_format,
    "format_map": lambda text, values: _require_format(text, **values),
    "replace": _require_replaced,
    "join": _require_joined,
}
_FILTERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "batch", "slice"), _require_width),
    **dict.fromkeys(("indent", "round", "tojson"), _require_narrow),
    "format": _require_format,
    "replace": lambda _, *values, **named: _require_replaced(*values, **named),
    "join": lambda _, items, d="", *rest, **named: _require_joined(d, items),
}


class _Filters(dict[str, Any]):
    """Filters by name, each with what it requires; transformers replaces some of jinja's."""

    def __setitem__(self, name: str, function: Any) -> None:
        require = _FILTERS.get(name)
        super().__setitem__(name, function if require is None else _requiring(require, function))


def _requiring(require: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with jinja's mark of those that take the environment first
    def bounded(*values: Any, **named: Any) -> Any:
        require(*values, **named)
        return function(*values, **named)

    return bounded


def _joined(pieces: Iterable[str]) -> str:
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        _require(length)
    return "".join(found)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja's name)
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which each operation ends soon, in bounded memory. Raises `TooLargeError`."""

    intercepted_binops = frozenset(_OPERATORS)
    code_generator_class = _Generator
    concat = staticmethod(_joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps those that format
        require = _METHODS.get(getattr(method, "__name__", ""))
        owner = getattr(method, "__self__", None)
        if require is not None and isinstance(owner, str):
            # Those with an underscore are jinja's, for callables that take the context.
            require(owner, *args, **{name: value for name, value in kwargs.items() if not name.startswith("_")})
        return super().call(__context, __obj, *args, **kwargs)


def use_in_transformers() -> None:
    """transformers compiles chat templates in this environment from now on; it takes no other as an argument."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
