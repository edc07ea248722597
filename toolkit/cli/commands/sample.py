"""`toolkit sample`: several completions of each prompt, scored, as rows to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.commands.generate import Compare, Dtype, MaxNewTokens, Raw, Seed, Source, System, Temperature, TopP
from toolkit.cli.shared.arguments import AsJson, CpuOption, GpusOption, parse_dtype

Samples = Annotated[int, typer.Option("--samples", "-n", help="Write this many completions of each prompt.")]
Reward = Annotated[
    str | None,
    typer.Option(
        help="Score by this reward model: a run or an export of the objective reward. By default completions are "
        "compared with the rows' answers, as by generate --eval.",
        rich_help_panel="Scoring",
    ),
]


def sample(
    source: Source,
    prompts: Annotated[Path, typer.Argument(help="A .txt or .jsonl file of prompts.")],
    to: Annotated[Path, typer.Option(help="Write into this folder, or continue what is in it.")],
    samples: Samples = 8,
    reward: Reward = None,
    compare: Compare = None,
    raw: Raw = False,
    system: System = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_size: Annotated[int, typer.Option(help="Write this many completions at a time.")] = 8,
    dtype: Dtype = "auto",
    gpus: GpusOption = None,
    cpu: CpuOption = None,
    as_json: AsJson = False,
) -> None:
    """Write several completions of each prompt, score them, and turn them into rows for SFT, DPO and KTO.

    Writes samples.jsonl (all, with their scores), sft.jsonl (the best of each prompt), pairs.jsonl (the best and the
    worst) and labels.jsonl (all, labelled good or bad). Run the same command again to continue.
    """
    given = {name: value for name, value in locals().items() if name not in ("gpus", "cpu", "as_json")}
    from toolkit.generation.sampling.sample_options import SampleOptions

    device = "cpu" if cpu is not None else "cuda" if gpus is not None else "auto"
    options = SampleOptions(**given | {"dtype": parse_dtype(dtype, "auto"), "device": device})
    from toolkit.cli.ranks.sample_rank import start

    start(options, gpus, cpu, as_json)
