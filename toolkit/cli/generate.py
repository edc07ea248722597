"""`toolkit generate`: write with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import parse_dtype

Prompt = Annotated[str | None, typer.Option(help="Write what follows this text.", show_default=False)]
PromptFile = Annotated[
    Path | None, typer.Option(help="Complete the prompts of a .txt or .jsonl file.", show_default=False)
]
Evaluation = Annotated[
    Path | None, typer.Option("--eval", help="Count right answers to a .jsonl file.", show_default=False)
]
Output = Annotated[
    Path | None, typer.Option(help="File for --file's completions; by default stdout.", show_default=False)
]
TopP = Annotated[float | None, typer.Option(help="Draw from the tokens of this probability.", show_default="0.95")]
BatchSize = Annotated[int | None, typer.Option(help="Prompts of a file completed at a time.", show_default="8")]


def generate(
    source: Annotated[
        str, typer.Argument(help="Folder of a run, of an export or of an adapter, or a hub name.", show_default=False)
    ],
    prompt: Prompt = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation; /reset forgets it, /quit ends.")] = False,
    file: PromptFile = None,
    evaluation: Evaluation = None,
    output: Output = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are plain text; no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System text of the conversation.", show_default=False)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="With --eval: case and whitespace matter.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --eval: print JSON.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of one completion.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token.", show_default="0.7")] = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option(help="Of drawing.", show_default="0")] = None,
    batch_size: BatchSize = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as saved), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Write with a model: give one of --prompt, --chat, --file, --eval."""
    from toolkit.generate.command import run
    from toolkit.generate.options import Options

    options = Options(
        source,
        prompt=prompt,
        chat=chat,
        file=file,
        evaluation=evaluation,
        output=output,
        raw=raw,
        system=system,
        strict=strict,
        as_json=as_json,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        dtype=dtype if dtype == "auto" else parse_dtype(dtype),
        device=device,
    )
    run(options)
