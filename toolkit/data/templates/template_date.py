"""Fixes the date that chat templates write into conversations for a whole run, whatever its ranks' day or host is."""

from __future__ import annotations

from datetime import date, datetime, time
from functools import cache

from transformers import PreTrainedTokenizerBase

from toolkit.errors import BadInputError

CALL = "strftime_now"
"""The function by which a chat template gets the present time; transformers' name."""

DIRECTIVES = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfjUWcxXe"] + ["%-d", "%-m"]
"""Directives in the format of a date, as Python's `strftime` takes them."""

_ATTRIBUTE = "template_date"


def today() -> date:
    """Returns the day on this host, in its own time zone, as transformers passes it to templates."""
    return datetime.now().date()


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer's chat template, or one of several, uses the present time."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return any(CALL in text for text in (template.values() if isinstance(template, dict) else [template]))


def set_date(tokenizer: PreTrainedTokenizerBase, day: date | None) -> None:
    """Sets the day that `rendered` makes the tokenizer's chat template write, or today if it is None.

    Raises:
        BadInputError: if a day is given, and the chat template writes none.
    """
    if writes_date(tokenizer):
        setattr(tokenizer, _ATTRIBUTE, day or today())
    elif day is not None:
        raise BadInputError("data.template_date has no effect: the chat template writes no date; remove it")


def date_of(tokenizer: PreTrainedTokenizerBase) -> date | None:
    """Returns the date that was set, or None if the chat template writes none or no date was set."""
    found: date | None = getattr(tokenizer, _ATTRIBUTE, None)
    return found if writes_date(tokenizer) else None


@cache
def with_date(template: str, day: date) -> str:
    """Returns the chat template with this day's midnight as the present time.

    The date is written into the template, because transformers turns functions passed to a template into texts. The
    export keeps the original template.
    """
    midnight = datetime.combine(day, time())
    replaced = "".join(f".replace({d!r}, {midnight.strftime(d)!r})" for d in DIRECTIVES)
    # `%%` writes a percent sign and does not begin a directive.
    written = f"format.replace('%%', '\\0'){replaced}.replace('\\0', '%')"
    return f"{{%- macro {CALL}(format) -%}}{{{{ {written} }}}}{{%- endmacro +%}}{template}"
