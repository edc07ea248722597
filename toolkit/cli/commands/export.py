"""`toolkit export`: make a Hugging Face folder of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import AsJson, RunPlace, parse_dtype
from toolkit.errors import BadInputError
from toolkit.recipe.schema import ExportSection

MAX_SHARD_GIB = ExportSection().max_shard_gib
"""The same default as in a recipe (GiB)."""


def export(
    run: RunPlace,
    to: Annotated[Path, typer.Option(help="New folder, which `from_pretrained` loads.")],
    checkpoint: Annotated[
        int | None, typer.Option(help="Export the checkpoint of this step. By default the last.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Store the weights in this type: float32, bfloat16 (bf16) or float16 (fp16).")
    ] = "float32",
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Reload the folder and compare its logits.")
    ] = True,
    max_shard_gib: Annotated[
        float, typer.Option(help="Split the weights into files of at most this size (GiB).")
    ] = MAX_SHARD_GIB,
    average: Annotated[
        bool,
        typer.Option("--average/--no-average", help="Export the averaged weights (training.ema) if there are any."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder, in one process, with one of its files in memory at a time."""
    type_name = parse_dtype(dtype)
    from toolkit.checkpoint.manifest import place_named

    place = place_named(run)
    if not place.is_dir():  # before torch is imported
        raise BadInputError(f"there is no folder {run!r}; name the training.output_dir or the store of a run")
    from toolkit.checkpoint.consolidate import export_run

    done = export_run(str(place), to, checkpoint, type_name, check, max_shard_gib, average)
    if as_json:
        print(json.dumps({**dataclasses.asdict(done), "folder": str(done.folder), "dtype": type_name}, indent=1))
        return
    checked = ""
    if done.logits_difference is not None:
        checked = f"; logits differ by {done.logits_difference:.1e} of the largest"
    elif check and done.is_adapter:
        checked = "; an adapter, whose logits were not compared"
    later = "" if done.unfinished is None else f"; the later checkpoint of step {done.unfinished} was not finished"
    for note in done.notes:
        print(note)
    print(f"{to}: step {done.step} in {type_name}{checked}{later}")
