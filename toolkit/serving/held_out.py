"""Which rows a server is asked: those that a run held out, as the toolkit reads them and as OpenAI's protocol has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.data.kinds.recognise import recognise
from toolkit.data.rows.examples import Answer, Conversation, Example
from toolkit.data.rows.files import paths_of
from toolkit.data.rows.sources import map_of, named_rows, open_source, short_names
from toolkit.data.rows.values import RowProblem
from toolkit.errors import BadInputError
from toolkit.generation.text.rows import PromptRow
from toolkit.pages.data_page import DATA_REPORT
from toolkit.paths import parse_json, read_foreign
from toolkit.recipe.recipe import Recipe

TEXT_ASKED = 80
"""Characters of a text that has no prompt which a server continues."""


def held_out_rows(source: str, count: int) -> list[PromptRow]:
    """Returns the first of a run's held-out rows that its data report shows, up to the answer.

    Raises:
        BadInputError: if the source is in no run's folder, or the run has no such rows.
    """
    folder = Path(source).expanduser()
    run = next((each for each in (folder, folder.parent) if (each / DATA_REPORT).is_file()), None)
    if run is None:
        raise BadInputError(f"--rows: {source!r} is in no run's folder, which says what was held out; name a file")
    shown = parse_json(read_foreign(run / DATA_REPORT)).get("examples") or []
    wanted = dict.fromkeys(each["row"] for each in shown if each["split"] == "validation")
    # Paths that are not absolute are those of the command line, which start from the current folder.
    recipe = Recipe.from_yaml((run / "recipe.yaml").read_text(encoding="utf-8"), Path(), str(run / "recipe.yaml"))
    data, found = recipe.data, dict[str, PromptRow]()
    names = short_names(paths_of(data))
    for section in (data.validation or data.train) if wanted else []:
        opened = open_source(section, "data.validation", data.streaming, map_of(data))
        layout = recognise(opened, data.columns, recipe.objective.kind)
        for name, row in named_rows(opened.shards, names):
            try:
                if name in wanted and (asked := _asked(name, layout.example(row))) is not None:
                    found[name] = asked
            except RowProblem:  # a row with images
                continue
    if not found:
        raise BadInputError(f"--rows: {str(run)!r} held out no rows of text that ask something; name a file of prompts")
    return [found[name] for name in wanted if name in found][:count]


def _asked(name: str, example: Example) -> PromptRow | None:
    """Returns what a row asks, without its answer; of a pair the chosen side; None if it asks nothing."""
    said = next((each for each in vars(example).values() if isinstance(each, Answer | Conversation)), example)
    if not isinstance(said, Conversation):
        text = said.question() if isinstance(said, Answer) else said.question()[:TEXT_ASKED]
        return PromptRow(name, text, text) if text.strip() else None
    end = max((place for place, each in enumerate(said.messages) if each["role"] == "assistant"), default=0)
    while end and said.messages[end - 1]["role"] == "assistant":
        end -= 1  # Harmony's answer is in several messages
    asked = said.messages[:end]
    return PromptRow(name, asked, asked, said.tools, said.arguments) if asked else None


def in_protocol(row: PromptRow, is_plain: bool) -> str | dict[str, Any]:
    """Returns a row as OpenAI's protocol has it: a text, or fields of a request."""
    if is_plain:
        return str(row.asked(True))
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    body: dict[str, Any] = {"messages": [_with_text_of_calls(message) for message in messages]}
    # Answers are compared as they are written, so that no server needs to look for calls in them.
    body |= {"tools": row.tools, "tool_choice": "none"} if row.tools else {}
    return body | ({"chat_template_kwargs": dict(row.arguments)} if row.arguments else {})


def _with_text_of_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have their arguments as JSON's text."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        given = call["function"].get("arguments", {})
        call["function"]["arguments"] = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**message, "tool_calls": calls}
