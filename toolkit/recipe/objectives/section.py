"""The base of every section of a recipe, and the types of its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


TemplateName = Literal["chatml", "alpaca"]
TEMPLATE_NAMES: tuple[str, ...] = get_args(TemplateName)
"""The chat templates that come with the toolkit."""


class Section(BaseModel):
    """The base of every section. Unknown keys and values of another type are errors; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^\n]*\.py):[A-Za-z_]\w*")


def function_problem(name: str) -> str:
    """Returns what is wrong with the name of a user's function, or an empty text. The function is not imported."""
    if FUNCTION.fullmatch(name):
        return ""
    return f"{name!r} names no function; write file.py:function or module:function, as in scores.py:length"


def contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})


HOWS = ("text", "strict", "numeric", "structured")
"""Ways in which a completion is compared with an answer."""


@dataclass(frozen=True)
class Comparison:
    """How a completion is scored, as recipes and commands write it: `numeric`, `text=REGEX` or `file.py:function`.

    Attributes:
        how: one of HOWS. text: case, and whitespace except between words, do not count; strict: as it is; numeric: the
            last number; structured: as JSON.
        extract: what is compared is its last match, or the first group of that if it has one; None: the whole text.
        score: a user's function, which scores instead.
    """

    how: str = "text"
    extract: str | None = None
    score: str | None = None

    @classmethod
    def of(cls, text: str | None) -> Comparison:
        """Reads a comparison; None compares texts. Raises ValueError, which says what is wrong with it."""
        how, equals, pattern = (text or "text").partition("=")
        if how in HOWS:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a Python regular expression: {error}; correct it") from None
            if equals and not pattern:
                raise ValueError(f"{text!r} has no regular expression after =; write one, or leave = out")
            return cls(how, pattern or None)
        if text is None or function_problem(text):
            raise ValueError(
                f"unknown {text!r}; allowed: {', '.join(HOWS)}, each alone or as {HOWS[0]}=REGEX, or a function: "
                "file.py:function or module:function"
            )
        return cls(score=text)


def _checked(text: str) -> str:
    try:
        Comparison.of(text)
    except ValueError as problem:
        raise PydanticCustomError("impossible", "{message}", {"message": str(problem)}) from None
    return text


Compare = Annotated[str, AfterValidator(_checked)]
"""A comparison in a recipe."""


def _named(function: str) -> str:
    if problem := function_problem(function):
        raise PydanticCustomError("impossible", "{message}", {"message": problem})
    return function


FunctionName = Annotated[str, AfterValidator(_named)]
"""A user's function in a recipe."""

COMPARED = (
    "text, without regard to case and whitespace; strict, as it is; numeric, the last number; structured, as JSON. "
    "Each may go on with =REGEX: then its last match is compared, or the first group of that."
)
"""What a comparison compares, for help."""
