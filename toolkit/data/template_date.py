"""The date that chat templates write into conversations: one for a whole run, whatever day or host its ranks are on."""

from __future__ import annotations

from datetime import date, datetime, time
from functools import cache

from transformers import PreTrainedTokenizerBase

from toolkit.errors import BadInputError

CALL = "strftime_now"
"""How a chat template asks for the present time; transformers' name."""

DIRECTIVES = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfjUWcxXe"] + ["%-d", "%-m"]
"""What the format of a date can hold, as Python's `strftime` takes it."""

_ATTRIBUTE = "template_date"


def today() -> date:
    """The day on this host, in its own time zone, as transformers gives it to templates."""
    return datetime.now().date()


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template, or one of several, asks for the present time."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return any(CALL in text for text in (template.values() if isinstance(template, dict) else [template]))


def set_date(tokenizer: PreTrainedTokenizerBase, day: date | None) -> None:
    """Settles what `rendered` lets the tokenizer's chat template write; None: today.

    Raises:
        BadInputError: a day is given, and the chat template writes none.
    """
    if writes_date(tokenizer):
        setattr(tokenizer, _ATTRIBUTE, day or today())
    elif day is not None:
        raise BadInputError("data.template_date has no effect: the chat template writes no date; remove it")


def date_of(tokenizer: PreTrainedTokenizerBase) -> date | None:
    """The date that was settled; None if the chat template writes none, or whatever day it is."""
    found: date | None = getattr(tokenizer, _ATTRIBUTE, None)
    return found if writes_date(tokenizer) else None


@cache
def with_date(template: str, day: date) -> str:
    """The chat template, in which this day's midnight is the present time.

    It is written into the text, as transformers turns functions that are handed to a template into texts. What is
    exported keeps the template as it was.
    """
    midnight = datetime.combine(day, time())
    replaced = "".join(f".replace({d!r}, {midnight.strftime(d)!r})" for d in DIRECTIVES)
    # `%%` writes a percent sign, and begins no directive.
    written = f"format.replace('%%', '\\0'){replaced}.replace('\\0', '%')"
    return f"{{%- macro {CALL}(format) -%}}{{{{ {written} }}}}{{%- endmacro +%}}{template}"
