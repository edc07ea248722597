"""`toolkit compare`: runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.shared.arguments import AsJson
from toolkit.cli.shared.console import print_table
from toolkit.errors import BadInputError
from toolkit.terminal import Terminal

if TYPE_CHECKING:
    from toolkit.compare.compared import ComparedRun


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN ...",
            help="Folders of runs, or their stores (s3://bucket/runs/first); or one folder of runs.",
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="Write a page with overlaid curves to this new file (.html)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show two or more runs side by side: their results, and what differs in their recipes and versions.

    A run may be under way, unfinished, failed or damaged: what there is of it is shown, and what is missing is said.
    """
    if to is not None:
        _require_new(to)
    from toolkit.compare.compared import as_values, difference_table, problem_lines, result_table, setup_table
    from toolkit.compare.read_runs import read_runs

    found = read_runs(runs)
    if to is not None:
        _write_page(to, found)
    if as_json:
        print(json.dumps(as_values(found), indent=2, default=str))
        return
    results, *others = result_table(found), difference_table(found), setup_table(found)
    print_table(list(results.head), [list(row) for row in results.rows])
    for table in others:
        if table.rows:
            print(f"\n{table.title}")
            print_table(list(table.head), [list(row) for row in table.rows])
    if not others[0].rows:
        print("\nThe recipes do not differ.")
    for line in problem_lines(found):
        Terminal().warn(line)
    if to is not None:
        print(f"\npage: {to}")


def _require_new(to: Path) -> None:
    """Raises BadInputError for a file that is there, or whose name a browser would not take for a page's."""
    if to.suffix not in (".html", ".htm"):
        raise BadInputError(f"--to: {str(to)!r} must end in .html")
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new file, or delete it")


def _write_page(to: Path, runs: Sequence[ComparedRun]) -> None:
    from toolkit.compare.compare_page import write_comparison

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(to, runs)
    except OSError as error:
        raise BadInputError(f"--to: {str(to)!r} cannot be written: {error.strerror}; name another file") from error
