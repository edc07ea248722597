"""The `toolkit` command: its commands are put together here, and each has a file of its own.

A command's file imports torch only inside the function that needs it, so that wrong arguments are reported at once.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

import toolkit
from toolkit.cli.commands.checkpoints import checkpoints
from toolkit.cli.commands.data import data
from toolkit.cli.commands.doctor import doctor
from toolkit.cli.commands.export import export
from toolkit.cli.commands.generate import generate
from toolkit.cli.commands.init import init
from toolkit.cli.commands.job import job
from toolkit.cli.commands.merge import merge
from toolkit.cli.commands.plan import plan
from toolkit.cli.commands.recipes import recipes_app
from toolkit.cli.commands.sample import sample
from toolkit.cli.commands.schema import schema
from toolkit.cli.commands.serve_check import serve_check
from toolkit.cli.commands.status import status
from toolkit.cli.commands.train import train
from toolkit.cli.commands.validate import validate
from toolkit.cli.commands.verify import verify
from toolkit.cli.shared.arguments import LOOK
from toolkit.cli.shared.console import prepare_process, print_error, print_interrupt, require_files
from toolkit.cli.shared.shipped import help_page
from toolkit.cli.shared.signals import INTERRUPTED
from toolkit.errors import BadInputError, ToolkitError
from toolkit.recipe.gone import GONE_COMMANDS, GONE_OPTIONS, gone_sentence


class Commands(TyperGroup):
    """The group of all commands. What cannot be parsed is an error like any other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments, after `help train` has become `train --help`; `help rows` prints that page."""
        if args[:1] == ["help"] and args[1:] and args[1] not in {*self.commands, *GONE_COMMANDS}:
            print(help_page(args[1], self.commands))
            raise typer.Exit
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the options before the name of a command."""
        with _usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parses the arguments of the command, and runs it."""
        with _usage_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command. Raises BadInputError for one of an earlier version, which says what to do instead."""
        if gone := gone_sentence(GONE_COMMANDS, args[0]):
            raise BadInputError(f"toolkit {args[0]}: {gone}")
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns an error of typer, or of a name, into a BadInputError, but not one that prints the help."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise BadInputError(f"'{error.filename:.60}...' is too long for the name of a file; correct it") from error
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        path = getattr(error.ctx, "command_path", "toolkit")
        name = f"{path.partition(' ')[2]} {getattr(error, 'option_name', '')}"
        if gone := gone_sentence(GONE_OPTIONS, name):
            raise BadInputError(f"toolkit {name}: {gone}") from None
        message, checked = error.format_message().rstrip("."), error.__cause__
        if isinstance(checked, ValidationError):
            message += f", and it is {checked.errors()[0]['input']!r}"
        raise BadInputError(f"{message}{' See' if message.endswith('?') else '; see'} `{path} -h`") from error


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""typer's base class of such errors, which some of its versions have of click and others of their own."""


app = typer.Typer(
    cls=Commands, **LOOK, no_args_is_help=True, epilog="Pages of help: toolkit help index. Start with: toolkit init"
)

COMMANDS: dict[str, dict[Any, str]] = {
    "Start": {
        init: "toolkit init Qwen/Qwen2.5-1.5B-Instruct chat.jsonl --gpus 8 --to mine.yaml",
        doctor: "toolkit doctor",
    },
    "Before a run": {
        validate: "toolkit validate mine.yaml training.max_steps=50",
        data: "toolkit data mine.yaml --to look",
        plan: "toolkit plan mine.yaml --gpus 8 --hardware h100_sxm",
        verify: "toolkit verify mine.yaml --cpu 2 --steps 3",
    },
    "Run": {
        train: "toolkit train mine.yaml --gpus 8 training.max_steps=50",
        job: "toolkit job mine.yaml --nodes 2 --gpus 8 --time 8h",
        status: "toolkit status outputs/chat",
        checkpoints: "toolkit checkpoints outputs/chat --verify",
    },
    "Afterwards": {
        generate: "toolkit generate outputs/chat --prompt 'Who goes there?'",
        sample: "toolkit sample outputs/chat questions.jsonl --to sampled --samples 4",
        merge: "toolkit merge outputs/lora --to merged --dtype bf16",
        export: "toolkit export outputs/chat --checkpoint 400 --to exported",
        serve_check: "toolkit serve-check http://localhost:8000 outputs/chat",
    },
}
"""Group of the list of commands -> command -> an example of it."""

for _group, _examples in COMMANDS.items():
    for _command, _example in _examples.items():
        app.command(rich_help_panel=_group, epilog=_example)(_command)
recipes_app.command("schema", epilog="toolkit recipes schema --to recipe.schema.json")(schema)
app.add_typer(recipes_app, name="recipes", rich_help_panel="Start")


def main() -> None:
    """Entry point of the `toolkit` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 ended by Ctrl-C."""
    prepare_process()
    try:
        require_files()
        app(prog_name="toolkit", standalone_mode=True)
    except ToolkitError as error:
        sys.exit(print_error(error))
    except SystemExit as end:
        # typer ends so without a word. Ranks that a command has started say it themselves.
        if end.code == INTERRUPTED and _is_by_keyboard(end):
            print_interrupt()
        raise


def _is_by_keyboard(end: BaseException | None) -> bool:
    """Returns whether this process itself was interrupted, which typer turns into an exit with the same code."""
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
