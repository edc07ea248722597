"""`toolkit sample`: several completions of each prompt, scored, as rows to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.commands.generate import Dtype, Raw, Seed, Source, System, TopP
from toolkit.cli.shared.arguments import AsJson, CpuOption, GpusOption, parse_dtype

Samples = Annotated[int, typer.Option("--samples", "-n", help="Write this many completions of each prompt.")]
Reward = Annotated[
    str | None,
    typer.Option(
        help="Score by this reward model: a run or an export of the objective reward. By default completions are "
        "compared with the rows' answers, as by generate --eval.",
        show_default=False,
    ),
]

Extract = Annotated[
    str | None,
    typer.Option(help="Compare the last match of this regular expression (or of its first group).", show_default=False),
]
Structured = Annotated[
    bool, typer.Option("--structured", help="Compare as JSON; order of keys and whitespace do not count.")
]
Score = Annotated[
    str | None,
    typer.Option(
        help="Score with this function (file.py:function, or module:function on Python's path), which needs no "
        "answers.",
        show_default=False,
    ),
]


def sample(
    source: Source,
    prompts: Annotated[Path, typer.Argument(help="A .txt or .jsonl file of prompts.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Write into this folder, or continue what is in it.", show_default=False)],
    samples: Samples = 8,
    reward: Reward = None,
    strict: Annotated[bool, typer.Option("--strict", help="Compare case and whitespace, too.")] = False,
    extract: Extract = None,
    numeric: Annotated[bool, typer.Option("--numeric", help="Compare the last number, as a number.")] = False,
    structured: Structured = False,
    score: Score = None,
    raw: Raw = False,
    system: System = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop each completion after this many tokens.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.", show_default="0.7")] = None,
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
    from toolkit.generation.sampling.sample_options import SampleOptions

    options = SampleOptions(
        source,
        prompts,
        to,
        samples=samples,
        reward=reward,
        raw=raw,
        system=system,
        strict=strict,
        extract=extract,
        numeric=numeric,
        structured=structured,
        score=score,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        dtype=parse_dtype(dtype, "auto"),
        device="cpu" if cpu is not None else "cuda" if gpus is not None else "auto",
    )
    from toolkit.cli.ranks.sample_rank import start

    start(options, gpus, cpu, as_json)
