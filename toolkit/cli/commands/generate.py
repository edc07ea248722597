"""`toolkit generate`: generate text with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import parse_dtype
from toolkit.cli.shared.hub import settle_names

Source = Annotated[
    str, typer.Argument(help="Folder of a run, of an export or of an adapter, or a hub name.", show_default=False)
]
Prompt = Annotated[str | None, typer.Option(help="Continue this text.", show_default=False)]
Image = Annotated[
    list[Path] | None,
    typer.Option("--image", help="With --prompt: show the model this image. May be given again.", show_default=False),
]
PromptFile = Annotated[
    Path | None, typer.Option(help="Answer each prompt of a .txt or .jsonl file.", show_default=False)
]
Evaluation = Annotated[
    Path | None,
    typer.Option(
        "--eval", help="Answer the prompts of a .jsonl file and count the correct answers.", show_default=False
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write the answers for --file to this file. By default: standard output.", show_default=False),
]
Extract = Annotated[
    str | None,
    typer.Option(
        help="With --eval: compare the last match of this regular expression (or of its first group).",
        show_default=False,
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Take prompts as plain text, without the chat template.")]
System = Annotated[str | None, typer.Option(help="System prompt for messages that have none.", show_default=False)]
Numeric = Annotated[bool, typer.Option("--numeric", help="With --eval: compare the last number, as a number.")]
Structured = Annotated[
    bool,
    typer.Option("--structured", help="With --eval: compare as JSON; order of keys and whitespace do not count."),
]
Score = Annotated[
    str | None,
    typer.Option(
        help="With --eval: score with this function (file.py:function, or module:function on Python's path), which "
        "needs no answers.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Sampling seed.", show_default="0")]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens that together have this probability.", show_default="0.95"),
]
BatchSize = Annotated[int | None, typer.Option(help="Answer this many prompts of a file at a time.", show_default="8")]
Dtype = Annotated[
    str,
    typer.Option(help="Load the weights in this type: auto (as saved), float32, bfloat16 (bf16) or float16 (fp16)."),
]


def generate(
    source: Source,
    prompt: Prompt = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation; /reset clears it, /quit ends.")] = False,
    image: Image = None,
    file: PromptFile = None,
    evaluation: Evaluation = None,
    output: Output = None,
    raw: Raw = False,
    system: System = None,
    strict: Annotated[bool, typer.Option("--strict", help="With --eval: compare case and whitespace, too.")] = False,
    extract: Extract = None,
    numeric: Numeric = False,
    structured: Structured = False,
    score: Score = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --eval: print JSON.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop each answer after this many tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature. 0: always take the most likely token.", show_default="0.7"),
    ] = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_size: BatchSize = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="Run on this device: auto, cpu or cuda.")] = "auto",
) -> None:
    """Generate text with a model: give one of --prompt, --chat, --file and --eval."""
    from toolkit.generation.text.command import run
    from toolkit.generation.text.load import find_model
    from toolkit.generation.text.options import Options

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
        extract=extract,
        numeric=numeric,
        structured=structured,
        score=score,
        as_json=as_json,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        dtype=parse_dtype(dtype, "auto"),
        device=device,
        images=tuple(image or ()),
    )
    if find_model(source).on_hub:
        settle_names({"SOURCE": source}, [], {})  # before the hub's library is imported, which tries for a minute
    run(options)
