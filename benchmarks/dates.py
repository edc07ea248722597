"""Rows of the second task of outcomes.py: the date in a sentence, in whatever way it is written, as ISO 8601.

They are drawn from a seed, so every run has the same. No date of a held-out row is in a row to train on.
"""

from __future__ import annotations

import datetime
import random
from typing import Any

SEED, TRAINED, HELD_OUT = 20261127, 96, 60
TENS = {20: "twent", 30: "thirt"}
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
]
SENTENCES = (
    "The invoice is due on {}.",
    "She was born on {}.",
    "Our lease ends on {}, I think.",
    "They met on {} in Lisbon.",
    "On {} the bridge was closed.",
    "Please book the room for {}.",
    "The parcel of {} never arrived.",
    "I filed the claim on {}, as you asked.",
)
ASKED = "Which date is meant? Answer in the form YYYY-MM-DD."


def ordinal_word(day: int) -> str:
    if day < 20:
        return ORDINALS[day - 1]
    tens = day // 10 * 10
    return f"{TENS[tens]}ieth" if day == tens else f"{TENS[tens]}y-{ORDINALS[day - tens - 1]}"


def ordinal(day: int) -> str:
    ending = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def written(date: datetime.date, form: int) -> str:
    """Returns the date in one of six ways of writing."""
    month = date.strftime("%B")
    return (
        f"{date.day} {month} {date.year}",
        f"{month} {date.day}, {date.year}",
        f"the {ordinal_word(date.day)} of {month} {date.year}",
        f"{month[:3]} {ordinal(date.day)} {date.year}",
        f"{date.day:02}.{date.month:02}.{date.year}",
        f"the {ordinal(date.day)} of {month}, {date.year}",
    )[form]


def date_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows to train on, and those held out."""
    draw = random.Random(SEED)
    first = datetime.date(1950, 1, 1).toordinal()
    days = draw.sample(range(first, datetime.date(2040, 1, 1).toordinal()), TRAINED + HELD_OUT)
    rows = []
    for number, day in enumerate(days):
        date = datetime.date.fromordinal(day)
        sentence = draw.choice(SENTENCES).format(written(date, number % 6))
        turns = [{"role": "user", "content": f"{sentence} {ASKED}"}, {"role": "assistant", "content": date.isoformat()}]
        rows.append({"messages": turns})
    return rows[:TRAINED], rows[TRAINED:]
