"""Where a run comes from: a file in its export, to train it again, and the command that starts it again."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from toolkit.errors import BadInputError, first_line
from toolkit.pages.card import recipe_for_readers
from toolkit.paths import (
    ORIGIN,
    file_name,
    is_file_source,
    is_hub_name,
    read_foreign,
    shipped_folder,
    shown_path,
)
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.sharding.plan.strategy import parse_strategy

MOST_BYTES = 2**20
"""The largest file that is read. A long recipe has some 10 KiB."""

MOST_RANKS = 65_536

Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A fingerprint, a word, a version: one line."""


@dataclass(frozen=True)
class Origin:
    """The inputs and the environment of a run. Folders and files are named without their paths, as in the model card.

    Attributes:
        recipe: the resolved recipe, as YAML for readers.
        ranks: number of processes.
        device: cpu or cuda.
        strategy: the sharding strategy, as `toolkit train --strategy` takes it.
        precision: Accelerate's mixed precision: no, bf16 or fp16.
        data: fingerprint of the rows, the tokenizer and how samples are made of them.
        content: digest of a stream's files, or None without a stream.
        base: fingerprint of the weights that training began with, or None for random weights.
        teacher: fingerprint of the model that was learned from, or None.
        versions: versions of packages, and the machine.
        adapter: fingerprint of the adapter that training went on from, or None.
        scorer: fingerprint of the source of the user's function that scored answers, or None.
        code: fingerprint of the source of each of the user's own functions, by its field.
        folders: names in the recipe that were folders or files of the run's machine, and not on the hub. None in
            exports of older versions, which did not record them.
    """

    recipe: str
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    device: Literal["cpu", "cuda"]
    strategy: Text
    precision: Literal["no", "bf16", "fp16"]
    data: Text
    content: Text | None
    base: Text | None
    teacher: Text | None
    versions: Annotated[dict[Text, Text], Field(max_length=100)]
    # Earlier versions did not write these.
    adapter: Text | None = None
    scorer: Text | None = None
    folders: Annotated[list[Text], Field(max_length=1000)] | None = None
    code: Annotated[dict[Text, Text], Field(max_length=100)] = dataclasses.field(default_factory=dict)

    def write(self, export: Path) -> None:
        """Writes the origin into an export."""
        (export / ORIGIN).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, export: Path) -> Origin:
        """Reads the origin of an export, which somebody else may have written.

        Raises:
            BadInputError: if it has none, or one that no run has written.
        """
        path = export / ORIGIN
        try:
            found = TypeAdapter(cls).validate_json(read_foreign(path, MOST_BYTES), strict=True)
        except FileNotFoundError:
            raise BadInputError(
                f"{str(export)!r} has no {ORIGIN}, which a run writes into its export; name the export of a run that "
                "this version trained (what `toolkit export` makes of a checkpoint has none)"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise _damaged(path, f"{where}: {first['msg']}") from None
        except OSError as error:
            raise _damaged(path, first_line(error)) from error
        parse_strategy(found.strategy, f"{path}: strategy")
        return found


def _damaged(path: Path, why: str) -> BadInputError:
    return BadInputError(f"{str(path)!r} is not what a run writes: {why}; name another export")


def named_sources(recipe: Recipe) -> list[tuple[str, str, bool]]:
    """Returns field, name, and whether the name is one on the hub, of each model and source of rows."""
    models = (
        ("model.name_or_path", recipe.model.name_or_path),
        ("model.tokenizer", recipe.model.tokenizer),
        ("objective.teacher", recipe.objective.teacher),
    )
    found = [(field, name, is_hub_name(name)) for field, name in models if name is not None]
    for field, sources in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation or [])):
        found += [(field, source.path, not is_file_source(source.path)) for source in sources]
    return found


def origin_of(opened: OpenedRun, run: PreparedRun, versions: dict[str, str]) -> Origin:
    """Returns the origin of the run's export."""
    return Origin(
        recipe_for_readers(opened.recipe),
        opened.accelerator.num_processes,
        "cpu" if opened.device.type == "cpu" else "cuda",
        opened.plugin.text,
        opened.accelerator.mixed_precision,
        run.data.fingerprint,
        run.data.content,
        run.fit.origin,
        run.teacher_fingerprint,
        versions,
        run.fit.adapter,
        run.asked.scorer,
        sorted({file_name(name) for _, name, on_hub in named_sources(opened.recipe) if not on_hub}),
        run.code,
    )


def own_command(opened: OpenedRun) -> str:
    """Returns the command line for the recipe in the run's folder, as many ranks, strategy and precision.

    Empty for a run on several hosts, which each have a command of their own.
    """
    ranks, on_cpu = opened.accelerator.num_processes, opened.device.type == "cpu"
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))) < ranks:
        return ""
    recipe = shown_path(opened.output_dir / "recipe.yaml")
    strategy, precision = opened.plugin.text, opened.accelerator.mixed_precision
    # Without an option `toolkit train` takes the config of this precision.
    if opened.recipe.training.mixed_precision is not None or precision == ("no" if on_cpu else "bf16"):
        number = f"--{'cpu' if on_cpu else 'gpus'}={ranks}"
        return shlex.join(["toolkit", "train", recipe, number, f"--strategy={strategy}"])
    config = shown_path(shipped_folder("accelerate_configs") / f"{'cpu_2' if on_cpu else 'zero3'}.yaml")
    words = ["accelerate", "launch", f"--config_file={config}", f"--num_processes={ranks}"]
    words += [f"--fsdp_sharding_strategy={strategy}", f"--mixed_precision={precision}"]
    return shlex.join([*words, shown_path(shipped_folder("recipes") / "finetune.py"), recipe])
