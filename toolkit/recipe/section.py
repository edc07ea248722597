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
"""Above it floats, in which ranks exchange counts, skip whole numbers."""


class Section(BaseModel):
    """Base of every section: unknown keys and values of another type are errors; frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        """Refuses what no setting can be, before a library fails at it."""
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("impossible", "it holds a NUL character; remove it")
        if isinstance(value, int) and abs(value) > MOST:
            raise PydanticCustomError("impossible", "it is larger than any machine counts; lower it")
        return value


FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def function_problem(name: str) -> str:
    """What is wrong with the name of a function of the user's; empty if nothing is. It is not looked for."""
    return "" if FUNCTION.fullmatch(name) else f"{name!r} names no function; write module:function, as in scores:length"


def contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})
