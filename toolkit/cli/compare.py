"""`toolkit compare`: runs beside each other."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from toolkit.cli.arguments import AsJson
from toolkit.cli.console import print_table
from toolkit.terminal import Terminal


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN ...", help="Folders of runs, or their stores (s3://bucket/runs/first)."),
    ],
    as_json: AsJson = False,
) -> None:
    """Show two or more runs beside each other: what came of each, and what differs in their recipes and versions.

    A run may be under way, unfinished, failed or damaged: what there is of it is shown, and what is missing is said.
    """
    from toolkit.pages.compared import as_values, difference_table, problem_lines, result_table, setup_table
    from toolkit.run.beside import read_runs

    found = read_runs(runs)
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
