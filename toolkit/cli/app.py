"""The `toolkit` command: its commands are put together here, and each has a file of its own.

A command's file imports torch only inside the function that needs it, so that wrong arguments are told at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import toolkit
from toolkit.cli.commands.checkpoints import checkpoints
from toolkit.cli.commands.compare import compare
from toolkit.cli.commands.configs import configs_app
from toolkit.cli.commands.data import data
from toolkit.cli.commands.doctor import doctor
from toolkit.cli.commands.export import export
from toolkit.cli.commands.generate import generate
from toolkit.cli.commands.init import init
from toolkit.cli.commands.plan import plan
from toolkit.cli.commands.recipes import recipes_app
from toolkit.cli.commands.reproduce import reproduce
from toolkit.cli.commands.sample import sample
from toolkit.cli.commands.status import status
from toolkit.cli.commands.train import train
from toolkit.cli.commands.validate import validate
from toolkit.cli.commands.verify import verify
from toolkit.cli.shared.arguments import wrong_value
from toolkit.cli.shared.console import address_problem, prepare_process, print_error, print_interrupt, require_files
from toolkit.cli.shared.signals import INTERRUPTED
from toolkit.errors import ToolkitError


class Commands(TyperGroup):
    """The group of all commands. A wrong value of an option is an error in the toolkit's words."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise wrong_value(error) or error from error


app = typer.Typer(cls=Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
for command in (
    init,
    train,
    status,
    plan,
    data,
    validate,
    verify,
    generate,
    sample,
    checkpoints,
    export,
    reproduce,
    compare,
    doctor,
):
    app.command()(command)
app.add_typer(recipes_app, name="recipes")
app.add_typer(configs_app, name="configs")


def main() -> None:
    """Entry point of the `toolkit` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C."""
    prepare_process()
    try:
        require_files()
        app(standalone_mode=True)
    except ToolkitError as error:
        sys.exit(print_error(error))
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if (told := address_problem(error)) is None:
            raise
        sys.exit(print_error(ToolkitError(told)))
    except SystemExit as end:
        # typer ends so without a word. Ranks that a command has started say it themselves.
        if end.code == INTERRUPTED and _is_by_keyboard(end):
            print_interrupt()
        raise


def _is_by_keyboard(end: BaseException | None) -> bool:
    """Returns whether this process itself was interrupted, of which typer makes an exit with the same code."""
    return end is not None and (isinstance(end, KeyboardInterrupt) or _is_by_keyboard(end.__cause__ or end.__context__))


def _version(asked: bool) -> None:
    if asked:
        print(f"toolkit {toolkit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune Hugging Face models by recipe."""


if __name__ == "__main__":
    main()
