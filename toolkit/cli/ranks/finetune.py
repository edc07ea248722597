"""The entry of recipes/finetune.py, which runs on every rank."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable

from toolkit.cli.shared.arguments import DEFAULT_RECIPE, split_arguments
from toolkit.cli.shared.console import (
    prepare_process,
    print_error,
    print_failure,
    print_interrupt,
    require_files,
)
from toolkit.cli.shared.hub import settle_hub
from toolkit.cli.shared.shipped import recipe_rows
from toolkit.cli.shared.signals import ignore_save_requests, is_forked, leave_launcher
from toolkit.errors import ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import Terminal


def finetune_command(arguments: list[str]) -> int:
    """`recipes/finetune.py [RECIPE] [section.key=value ...]`; returns the exit code."""
    ignore_save_requests()
    prepare_process()
    options = _argument_parser().parse_intermixed_args(arguments)

    def run() -> None:
        recipe = Recipe.load(*split_arguments(options.arguments, options.recipe))
        if not is_forked():
            settle_hub(recipe)
            _print_started()
        from toolkit.run.run import finetune, rehearse  # torch is imported only for a recipe that is right

        gc.freeze()  # the search for garbage before the first step takes 0.3 s less
        if options.dry_run:
            rehearse(recipe)
        else:
            finetune(recipe)

    code = as_rank(run)
    if code == 0 and is_forked():
        leave_launcher()
    return code


def as_rank(action: Callable[[], object]) -> int:
    """Runs the action of a rank. Returns the exit code, or ends the rank if it fails alone."""
    try:
        require_files()
        action()
    except ToolkitError as error:
        code = print_error(error)
        return code if error.is_shared else _exit_rank(code)
    except KeyboardInterrupt:  # outside training, whose own end saves the state
        return _exit_rank(print_interrupt())
    except BaseException as error:  # sys.exit in a library must not end a run as if it was done
        return _exit_rank(print_failure(error))
    return 0


def _print_started() -> None:
    """Prints, once for all ranks, why some seconds of silence follow."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if os.environ.get("RANK", "0") == "0":
        Terminal().print(f"started {ranks}; importing torch and transformers ...")


def _exit_rank(code: int) -> int:
    """Ends this rank at once if it may have failed alone; a single process ends as usual, with `code`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Python's own end would take the process group down, which waits for ranks that know nothing of the error.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune a model by a recipe.",
        epilog="recipes:\n" + "\n".join(f"  {row['name']:<16} {row['description']}" for row in recipe_rows()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE section.key=value",
        help=f"name or path of a recipe (default: {DEFAULT_RECIPE}), and values that replace the recipe's, "
        "for example training.max_steps=50",
    )
    parser.add_argument("--recipe", metavar="RECIPE", help="another way to give RECIPE")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan and the first batch, train nothing"
    )
    return parser
