"""`toolkit merge`: an adapter that exists becomes a whole model."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import AsJson, NewModel, StoredDtype, parse_dtype


def merge(
    adapter: Annotated[str, typer.Argument(help="Folder of an adapter, or of the run that exported it.")],
    to: NewModel,
    base: Annotated[
        str | None, typer.Option(help="Folder of the base, or its hub name. By default what the adapter names.")
    ] = None,
    dtype: StoredDtype = None,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base, and compare the logits of the new folder with theirs.

    The sums are computed in float32, in this machine's memory, which has to hold the model twice.
    """
    type_name = None if dtype is None else parse_dtype(dtype)
    from toolkit.generation.text.load import find_model

    find_model(adapter)  # before torch is imported
    from toolkit.serving.merge import merge_adapter

    done = merge_adapter(adapter, to, base, type_name)
    if as_json:
        print(json.dumps({"folder": str(to), **dataclasses.asdict(done)}, indent=1))
        return
    print(f"{to}: {adapter} in {done.base}, {done.dtype}; logits differ by {done.logits_difference:.1e} of the largest")
    print(f"next: {shlex.join(['toolkit', 'generate', str(to), '--prompt', 'TEXT'])}")
