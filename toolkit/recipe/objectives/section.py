"""The base of every section of a recipe, and the types of its numbers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


MOST = 2**53
"""The largest count: ranks exchange counts as floats, which skip whole numbers above it."""


class Section(BaseModel):
    """The base of every section. Unknown keys and values of another type are errors; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_impossible(cls, value: Any) -> Any:
        """Refuses values that no setting can have, before a library fails on them."""
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("impossible", "it holds a NUL character; remove it")
        if isinstance(value, int) and abs(value) > MOST:
            raise PydanticCustomError("impossible", "it is larger than any machine counts; lower it")
        return value


FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^\n]*\.py):[A-Za-z_]\w*")


def function_problem(name: str) -> str:
    """Returns what is wrong with the name of a user's function, or an empty text. The function is not imported."""
    if FUNCTION.fullmatch(name):
        return ""
    return f"{name!r} names no function; write file.py:function or module:function, as in scores.py:length"


def contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})
