"""`toolkit generate`: generate text with a model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.shared.arguments import MACHINE, Checkpoint, parse_dtype
from toolkit.cli.shared.hub import settle_names
from toolkit.recipe.objectives.section import COMPARED

Source = Annotated[str, typer.Argument(help="Folder of a run, of an export or of an adapter, or a hub name.")]
Raw = Annotated[bool, typer.Option("--raw", help="Take prompts as plain text, without the chat template.")]
System = Annotated[str | None, typer.Option(help="System prompt for messages that have none.")]


def _scoring(*names: str, about: str, **settings: Any) -> Any:
    return typer.Option(*names, help=about, rich_help_panel="Scoring", **settings)


def _sampling(*names: str, about: str, **settings: Any) -> Any:
    return typer.Option(*names, help=about, rich_help_panel="Sampling", **settings)


Compare = Annotated[
    str | None,
    _scoring(
        about=f"Compare answers as {COMPARED} Or score them with a function, file.py:function or module:function, "
        "which needs no answers.",
        show_default="text",
    ),
]
MaxNewTokens = Annotated[int, _sampling(about="Stop each answer after this many tokens.")]
Temperature = Annotated[
    float | None,
    _sampling(about="Sampling temperature. 0: always take the most likely token.", show_default="0.7"),
]
TopP = Annotated[
    float | None,
    _sampling(about="Sample from the most likely tokens that together have this probability.", show_default="0.95"),
]
Seed = Annotated[int | None, _sampling(about="Sampling seed.", show_default="0")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Load the weights in this type: auto (as saved), float32, bfloat16 (bf16) or float16 (fp16).",
        rich_help_panel=MACHINE,
    ),
]


def generate(
    source: Source,
    checkpoint: Checkpoint = None,
    prompt: Annotated[str | None, typer.Option(help="Continue this text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation; /reset clears it, /quit ends.")] = False,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="With --prompt: show the model this image. May be given again.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Answer each prompt of a .txt or .jsonl file.")] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", help="Answer the prompts of a .jsonl file and score the answers."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--to", help="Write the answers for --file to this file. By default: standard output."),
    ] = None,
    raw: Raw = False,
    system: System = None,
    compare: Compare = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --eval: print JSON.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Answer this many prompts of a file at a time.", show_default="8")
    ] = None,
    dtype: Dtype = "auto",
    device: Annotated[
        str,
        typer.Option(help="Run on this device: auto (all GPUs if any), cpu or cuda.", rich_help_panel=MACHINE),
    ] = "auto",
) -> None:
    """Generate text with a model: give one of --prompt, --chat, --file and --eval.

    Of a run it is the export, or with --checkpoint one of its checkpoints. --compare needs --eval.
    """
    given = {name: value for name, value in locals().items() if name != "checkpoint"}
    from toolkit.generation.text.command import run
    from toolkit.generation.text.load import find_model
    from toolkit.generation.text.options import Options

    options = Options(**given | {"dtype": parse_dtype(dtype, "auto"), "images": tuple(images or ())})
    if checkpoint is not None:
        from toolkit.checkpoint.consolidate import exported_for_now

        with exported_for_now(source, checkpoint) as exported:
            print(f"{source}: step {exported.step}", file=sys.stderr)
            run(replace(options, source=str(exported.folder)))
        return
    if find_model(source).on_hub:
        settle_names([source], [])  # before the hub's library is imported, which tries for a minute
    run(options)
