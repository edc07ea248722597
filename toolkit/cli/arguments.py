"""Arguments that several commands take, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(help="Name or path of a recipe.")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="Name or path of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Replaced values.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
