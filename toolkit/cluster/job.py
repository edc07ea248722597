"""A job: a recipe on several nodes, and its file for Slurm."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from toolkit.recipe.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """A recipe on nodes of a Slurm cluster.

    Attributes:
        recipe: the recipe with its overrides.
        source: the recipe's name or path, as it was given.
        overrides: the overrides, as they were given.
        least, most: the number of nodes; a range lets Slurm start on what is there.
        ranks: ranks of each node.
        on_cpu: whether they use the CPU, and not a GPU each.
        strategy: the sharding strategy, or None to leave it to the recipe.
        minutes: the time limit of each start, or None for that of the partition.
        partition: the partition, or None for the default.
        image: the container's image, or None for none.
    """

    recipe: Recipe
    source: str
    overrides: tuple[str, ...]
    least: int
    most: int
    ranks: int
    on_cpu: bool = False
    strategy: str | None = None
    minutes: int | None = None
    partition: str | None = None
    image: str | None = None

    @property
    def name(self) -> str:
        """Returns a name after the output folder, in letters, digits and hyphens."""
        letters = [letter if letter.isalnum() and letter.isascii() else "-" for letter in self._folder.name.lower()]
        name = "".join(letters).strip("-")[:40].strip("-") or "train"
        return name if name[0].isalpha() else f"run-{name}"

    @property
    def _folder(self) -> Path:
        return Path(self.recipe.training.output_dir)

    @property
    def node_counts(self) -> range:
        """Returns the numbers of nodes on which the job may start."""
        return range(self.least, self.most + 1)

    @property
    def micro_batches(self) -> int:
        """Returns the micro-batches of a step for each rank of a node: those of all nodes, on any number of nodes."""
        return self.recipe.training.gradient_accumulation_steps * self.most

    def train_words(self) -> str:
        """Returns the part of the `toolkit train` command that every node has, quoted for the shell."""
        device = ["--cpu" if self.on_cpu else "--gpus", str(self.ranks)]
        strategy = [] if self.strategy is None else ["--strategy", self.strategy]
        return shlex.join(["toolkit", "train", self.source, *self.overrides, *device, *strategy])

    def text(self, command: str) -> str:
        """Returns the job's file.

        Args:
            command: the command that writes it, for its first lines.
        """
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 (no HTML)
        )
        environment.filters["quote"] = shlex.quote
        return environment.get_template("slurm.sh.jinja").render(job=self, command=command, **_of_here())

    @property
    def time_limit(self) -> str | None:
        """Returns the time limit as Slurm writes it: days-hours:minutes:seconds."""
        if self.minutes is None:
            return None
        days, minutes = divmod(self.minutes, 24 * 60)
        return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"


def _of_here() -> dict[str, Any]:
    """Returns what a job's file holds of this process: where its programs and the working folder are."""
    return {"programs": str(Path(sys.executable).parent), "here": str(Path.cwd())}
