"""`toolkit serve-check`: does a server answer as the export?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.commands.generate import Dtype, MaxNewTokens
from toolkit.cli.shared.arguments import AsJson, parse_dtype


def serve_check(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://localhost:8000.")],
    source: Annotated[str, typer.Argument(help="Folder of the run, of the export or of the adapter that it serves.")],
    rows: Annotated[
        Path | None,
        typer.Option(help="Ask these prompts, a .txt or .jsonl file. By default rows that the run held out."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the server, if it has several.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Ask this many rows.")] = 8,
    max_new_tokens: MaxNewTokens = 32,
    gap: Annotated[
        float | None,
        typer.Option(
            min=0, help="Let log-probabilities differ by this many nats.", show_default="0.02; of 16 bits 0.1"
        ),
    ] = None,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare a server's answers with the export's: tokens of prompts, greedy answers, log-probabilities, the stop.

    The server speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, Ollama); its key is taken from OPENAI_API_KEY.

    Exit codes: 0 nothing differs, 1 something does, 2 bad input.
    """
    type_name = parse_dtype(dtype, "auto")
    from toolkit.generation.text.load import find_model

    find_model(source)  # before torch is imported
    from toolkit.serving.check import check

    found = check(url, source, rows, model, count, max_new_tokens, type_name, gap)
    print(json.dumps(dataclasses.asdict(found), indent=1) if as_json else "\n".join(found.lines()))
    if found.causes:
        raise typer.Exit(1)
