"""`toolkit reproduce`: train an export once more, and compare the weights."""

from __future__ import annotations

import json
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.commands.train import require_finished, require_inputs
from toolkit.cli.ranks.launch_options import ON_CPU, launcher_options, shown_script
from toolkit.cli.shared.arguments import MACHINE, OVERRIDES, AsJson
from toolkit.cli.shared.hub import settle_hub
from toolkit.errors import BadInputError
from toolkit.paths import STEP_FOLDER
from toolkit.recipe.recipe import Recipe
from toolkit.terminal import harmless, stdout_on_stderr

if TYPE_CHECKING:
    from toolkit.run.folder.export_origin import Origin
    from toolkit.run.folder.reproduction import Difference

NOT_AGAIN = ("export.push_to_hub=null", "export.hub_private=true", "logging.trackers=[]", "checkpoint.to=null")
"""Overrides that turn off what a run did besides its training."""


def reproduce(
    export: Annotated[Path, typer.Argument(help="An export, or the folder of its run.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=OVERRIDES,
            help="Paths of models and rows here, if the run's own folder is not beside the export.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option(help="New folder for the new run.")] = ...,  # type: ignore[assignment]
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Train on this many GPUs. By default as many as before.", rich_help_panel=MACHINE),
    ] = None,
    cpu: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train on the CPU with this many processes. By default as many as before.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            help="Run the Python code that the recipe names: the user's own functions, and model.trust_remote_code.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train an export once more with the recipe, rows and models that it names, and compare the weights.

    It is trained on as many processes as before, on the same kind of device. Rows or models that have changed are
    refused before anything is trained. On one machine with the same versions the weights are equal bit for bit.

    Exit codes: 0 equal bit for bit, 1 different, 2 bad input, and those of `toolkit train`.
    """
    if given := [value for value in values or [] if value.startswith("training.output_dir=")]:
        raise BadInputError(f"{given[0]}: --to names the folder of the new run; leave this out")
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new folder")
    from toolkit.run.folder.export_origin import Origin  # torch is imported only for options that are right
    from toolkit.run.folder.reproduction import difference, require_same_inputs, require_weights

    folder = export / "export" if (export / "export").is_dir() else export
    origin = Origin.read(folder)
    recipe = _recipe_of(origin, folder, to, list(values or []))
    if not trust_code:
        _require_no_code(recipe)
    if gpus is None and cpu is None:
        _require_few(origin)
        gpus, cpu = (None, origin.ranks) if origin.device == "cpu" else (origin.ranks, None)
    options = launcher_options(recipe, gpus, cpu, origin.strategy, None)
    require_inputs(recipe)
    settle_hub(recipe)
    require_same_inputs(origin, recipe)
    require_weights(folder)
    code = _train_again(recipe, options, cpu is not None, to, as_json)
    if code:
        raise typer.Exit(code)
    require_finished(recipe, to)
    found, again = difference(folder, to / "export"), Origin.read(to / "export")
    _print_difference(found, to / "export", _changed_settings(origin, again), as_json)
    if found.different:
        raise typer.Exit(1)


RANKS_PER_CORE = 4
"""More processes than this make a machine stand still."""


def _require_few(origin: Origin) -> None:
    """Raises BadInputError if the file asks for more processes than this machine can bear. GPUs are counted later."""
    from toolkit.ranks import usable_cores

    if origin.device == "cpu" and origin.ranks > RANKS_PER_CORE * usable_cores():
        raise BadInputError(
            f"the export was trained on {origin.ranks:,} processes on the CPU, and this machine has {usable_cores()} "
            f"cores; choose a number, for example --cpu {usable_cores()}"
        )


def _require_no_code(recipe: Recipe) -> None:
    """Raises BadInputError if the recipe, which may be a stranger's, would run Python code."""
    named = {**recipe.own_code(), **({"model.trust_remote_code": True} if recipe.model.trust_remote_code else {})}
    if found := [f"{field} ({value})" for field, value in named.items()]:
        raise BadInputError(
            f"the recipe runs Python code: {' and '.join(found)}; read that code, and add --trust-code to run it"
        )


def _recipe_of(origin: Origin, folder: Path, to: Path, values: list[str]) -> Recipe:
    """Returns the recipe of the run with a new folder; if the export lies in the run's own folder, from there.

    Raises:
        BadInputError: if a folder of another machine is not named, whose name would be taken for one on the hub.
    """
    from toolkit.pages.card import recipe_for_readers
    from toolkit.paths import ORIGIN

    own, name = folder.resolve().parent / "recipe.yaml", str(folder / ORIGIN)
    fixed = [f"training.mixed_precision={origin.precision}", *NOT_AGAIN, *values]
    # Last, and quoted, so that nothing replaces it, and it stays the text that it is.
    fixed.append(f"training.output_dir={json.dumps(str(to), ensure_ascii=False)}")
    if own.is_file() and recipe_for_readers(Recipe.load(own)) == origin.recipe:
        found = Recipe.load(own, fixed)
    else:
        # The file may be a stranger's, who does not decide where this machine writes.
        found = Recipe.from_yaml(origin.recipe, Path.cwd(), name, ["data.cache_dir=null", *fixed])
        _require_named(origin, found, {value.partition("=")[0].strip() for value in values})
    _require_one_beginning(found)
    # Once more, as the paths in `values` are relative to this folder, and the recipe is handed on in another one.
    return Recipe.from_yaml(found.to_yaml(), Path.cwd(), name)


def _require_one_beginning(recipe: Recipe) -> None:
    """Raises BadInputError if the run went on from the last checkpoint of a run, which may have later ones by now."""
    place = recipe.checkpoint.resume
    if place in ("auto", "never") or STEP_FOLDER.fullmatch(Path(place).name):
        return
    raise BadInputError(
        f"checkpoint.resume: the run went on from the last checkpoint of {place!r}, which may be a later one by now; "
        f"name the one that it began at (checkpoint.resume={place}/checkpoints/step_00000100), or train from the first "
        "step (checkpoint.resume=never)"
    )


def _require_named(origin: Origin, recipe: Recipe, given: set[str]) -> None:
    """Raises BadInputError for a name of another machine's folder: on the hub it would be a stranger's."""
    from toolkit.run.folder.export_origin import named_sources

    for field, name, on_hub in named_sources(recipe):
        if not on_hub or field in given:
            continue
        if origin.folders is not None and name in origin.folders:
            raise BadInputError(
                f"{field}: the export was trained from the folder {name!r} of its own machine; name it here: {field}="
                f"/path/to/{name}"
            )
        if origin.folders is None and "/" not in name:  # of an older version
            raise BadInputError(
                f"{field}: {name!r} was a folder of the machine that trained the export, or is a name on the hub; name "
                f"the folder here: {field}=/path/to/{name}, or the hub's: {field}={name}"
            )


def _train_again(recipe: Recipe, options: list[str], on_cpu: bool, to: Path, as_json: bool) -> int:
    from toolkit.cli.ranks.launcher import run_launcher

    if on_cpu:
        os.environ[ON_CPU] = "true"
    with tempfile.TemporaryDirectory() as place, stdout_on_stderr() if as_json else nullcontext():
        file = Path(place, "recipe.yaml")
        file.write_text(recipe.to_yaml(), encoding="utf-8")
        return run_launcher([*options, shown_script(), str(file)], to, recipe=recipe)


def _changed_settings(origin: Origin, again: Origin) -> dict[str, list[str]]:
    """Returns what differs in the two runs, in addition to their weights: name -> before, now."""
    pairs = {
        "ranks": (str(origin.ranks), str(again.ranks)),
        "device": (origin.device, again.device),
        **{name: (told, again.versions.get(name, "")) for name, told in origin.versions.items()},
    }
    return {what: [before, now] for what, (before, now) in pairs.items() if before != now}


def _print_difference(found: Difference, export: Path, changed: dict[str, list[str]], as_json: bool) -> None:
    if as_json:
        largest = found.largest if math.isfinite(found.largest) else None  # JSON knows no infinity
        print(json.dumps({**asdict(found), "largest": largest, "export": str(export), "changed": changed}, indent=1))
        return
    if not found.different:
        print(f"reproduced: all {found.tensors:,} tensors are equal bit for bit")
    else:
        print(
            f"different: {found.different:,} of {found.tensors:,} tensors, by at most {found.largest:.1e} of the "
            f"largest value ({found.where})"
        )
    for what, (before, now) in changed.items():
        print(harmless(f"  {what}: {before} before, {now} now"))
