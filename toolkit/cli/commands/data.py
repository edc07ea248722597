"""`toolkit data`: read and tokenise a recipe's data, and show what a run would train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.shared.arguments import AsJson, RecipeArguments, load_recipe
from toolkit.cli.shared.hub import settle_hub
from toolkit.terminal import Terminal

EXAMPLES_PRINTED = 20
"""The most decoded samples that `--json` prints; data_report.json has up to two thousand of each split."""


def data(
    arguments: RecipeArguments = None,
    output: Annotated[
        Path | None,
        typer.Option("--to", help="Folder for data_report.json and the page data_report.html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read and tokenise a recipe's data, and show what a run would train on; nothing is trained."""
    loaded = load_recipe(arguments)
    settle_hub(loaded)
    # torch is imported only for a recipe that is right
    from toolkit.data import build
    from toolkit.data.tokens import tokenizer
    from toolkit.pages.data_console import show_report
    from toolkit.pages.data_page import DATA_PAGE
    from toolkit.run.folder.folder import write_data_report
    from toolkit.run.stages.rows import as_trained

    tokens = tokenizer.load(loaded.model, loaded.data, loaded.objective.kind)
    found, told = as_trained(loaded, tokens, build.build(loaded.data, tokens, loaded.training.seed, loaded.objective))
    report = found.report.model_copy(update={"warnings": [*found.report.warnings, *told]})
    if output is not None:
        write_data_report(output, loaded, report)
    if as_json:
        few = report.model_copy(update={"examples": report.examples[:EXAMPLES_PRINTED]})
        print(json.dumps(few.to_dict(), indent=1))
        return
    console = Terminal(stderr=False, soft_wrap=False)
    show_report(console, report.to_dict())
    if output is not None:
        console.print(f"page: {output / DATA_PAGE}", markup=False, soft_wrap=True)
