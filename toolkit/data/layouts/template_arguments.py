"""What chat templates get besides a conversation: arguments such as `enable_thinking`, and the date.

The recipe sets arguments for every row, and a row may override them.

The recipe's become defaults in the template itself. So rows, samples, the export and its server render alike without
further settings, and an explicit argument still overrides the default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.data.rows.values import RowProblem, is_absent, key_shown, parsed, type_of, writable
from toolkit.errors import BadInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "chat_template_kwargs"
"""Column of a row's own arguments; TRL's name."""

OF_ROW = f"{COLUMN} of the row: "
"""Prefix of the report's note about a row's arguments."""

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})

GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables that every template gets, apart from the special tokens."""

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def _parsed(template: str) -> nodes.Template:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))
    # transformers' own tag, which plain Jinja does not know.
    return environment.parse(_GENERATION.sub("", template))


@cache
def takes_tools(template: str) -> bool:
    """Returns whether a chat template reads the tools of a conversation."""
    return "tools" in meta.find_undeclared_variables(_parsed(template))


@cache
def variables(template: str) -> frozenset[str]:
    """Returns the variables that a chat template takes from outside, except those that it always gets."""
    parsed_template = _parsed(template)
    found = meta.find_undeclared_variables(parsed_template)
    # Jinja also counts what one branch sets and another reads. A template with a default tests if a name is defined.
    own = {name.name for name in parsed_template.find_all(nodes.Name) if name.ctx in ("store", "param")}
    tests = [test for test in parsed_template.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
    return frozenset(name for name in found - (own - asked) if name not in GIVEN and not name.endswith("_token"))


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """Returns the template with defaults for variables that are not passed."""
    # `+` keeps a line end at the beginning of the template.
    defaults = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif +%}}"
        for name, value in sorted(arguments.items())
    ]
    return "".join(defaults) + template


def _literal(value: Any) -> str:
    """Returns a JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value)


def set_defaults(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None) -> None:
    """Makes the recipe's arguments defaults of the tokenizer's chat template.

    Raises:
        BadInputError: if there is no template, or it takes no variable of that name.
    """
    if not arguments:
        return
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise BadInputError(
            "data.template_arguments has no effect: the tokenizer has no chat template; remove it, or name a file with "
            "one that takes them in data.chat_template"
        )
    # Some tokenizers have several templates, one of them for tools.
    each = template if isinstance(template, dict) else {"default": template}
    known = frozenset().union(*map(variables, each.values()))
    for name in arguments:
        if name not in known:
            raise BadInputError(f"data.template_arguments.{name}: {not_taken(known)}; remove it")
    changed = {kind: with_defaults(text, arguments) for kind, text in each.items()}
    tokenizer.chat_template = changed if isinstance(template, dict) else changed["default"]


def not_taken(known: frozenset[str]) -> str:
    """Returns why an argument has no effect on a template that takes others."""
    return f"the chat template takes no such argument; it takes {', '.join(sorted(known)) or 'none'}"


def arguments_of(value: Any) -> dict[str, Any]:
    """Returns a row's arguments.

    Raises:
        RowProblem: if its column does not hold an object.
    """
    found = None if is_absent(value) else parsed(value, COLUMN)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise RowProblem(f"{COLUMN} is {type_of(found)}, not an object")
    writable(found, COLUMN)
    # parquet fills in nulls for keys that only other rows have
    return {name: value for name, value in found.items() if value is not None}


def require_taken(arguments: Mapping[str, Any], template: str) -> None:
    """Checks that the chat template takes a row's arguments.

    Raises:
        RowProblem: if it does not take one.
    """
    if arguments and (idle := sorted(arguments.keys() - variables(template))):
        raise RowProblem(f"{COLUMN} has {key_shown(idle[0])}, which the chat template does not take")


def note_of(arguments: Mapping[str, Any]) -> str:
    """Describes a row's own arguments for the report."""
    told = ", ".join(f"{key_shown(name)}={key_shown(json.dumps(value))}" for name, value in sorted(arguments.items()))
    return OF_ROW + told


# ---- the date that a template writes, which is the same for a whole run, on every host ----

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
