"""Renders one chat template in a process of its own, within limits that the system keeps.

A chat template is a program of a stranger: it can loop for years, and a single operation of it, such as
`'a' * 10**10`, can take all of the memory, which no exception ends. `templates.py` runs this file by its path. So it
imports jinja2 alone, which takes a tenth of a second; importing transformers would take several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has none; who started the trial ends it after some minutes
    resource = None  # type: ignore[assignment]

LONGEST = 2**24
"""The most characters of a text: 16 times the words of a conversation of a million tokens."""

NUM_MESSAGES = 100
"""Messages of each conversation: enough to find a template that doubles its text with every message."""

TOO_MUCH_MEMORY, TOO_LONG = "memory", "text"
"""Printed if the template takes more memory than it may, or makes a text of more than `LONGEST` characters."""

USER = {"role": "user", "content": "What is three plus four?"}
ANSWER = {"thinking": "3 + 4 = 7", "role": "assistant", "content": "Seven.", "reasoning_content": "3 + 4 = 7"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "a1b2c3d4e", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}},
    ],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "7"}
NUMBER = {"type": "integer", "description": "A number."}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    },
}


class Generation(Extension):
    """transformers' tag `{% generation %}`, which writes what it holds."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> Any:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment like the one in which transformers compiles chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def conversations() -> Iterator[dict[str, Any]]:
    """Yields variables of renderings: with and without a system message, tools, and contents in parts."""
    plain = [USER, ANSWER] * (NUM_MESSAGES // 2)
    called = [USER, CALL, RESULT, ANSWER] * (NUM_MESSAGES // 4)
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
    for messages, tools in (
        (plain, None),
        ([{"role": "system", "content": "You add numbers."}, *plain], None),
        (called, [ADD]),
        (in_parts, None),
    ):
        yield {"messages": messages, "tools": tools, "add_generation_prompt": False}
        yield {"messages": [*messages, USER], "tools": tools, "add_generation_prompt": True}


def limit(kind: int, value: int) -> None:
    """Sets a limit of this process, or keeps a lower one that it has."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def trial(template: str, special_tokens: dict[str, str]) -> str | None:
    """Returns what a template that ends takes too much of, or None."""
    try:
        compiled = environment().from_string(template)
    except MemoryError:
        return TOO_MUCH_MEMORY
    except Exception:  # it cannot be compiled, which rows of plain text need not know
        return None
    for variables in conversations():
        try:
            length = len(compiled.render(**special_tokens, documents=None, **variables))
        except MemoryError:
            return TOO_MUCH_MEMORY
        except Exception:  # a template is a program, and may refuse a conversation in any way
            length = 0
        if length > LONGEST:
            return TOO_LONG
    return None


def main() -> None:
    """Prints what the template takes too much of; stdin has `template`, `special_tokens`, `seconds` and `bytes`."""
    job = json.load(sys.stdin)
    if resource is not None:
        limit(resource.RLIMIT_CORE, 0)  # a process that the limit ends leaves no file
        limit(resource.RLIMIT_CPU, job["seconds"])
        limit(resource.RLIMIT_DATA, job["bytes"])
    print(trial(job["template"], job["special_tokens"]) or "")


if __name__ == "__main__":
    main()
