"""A job: a recipe on several nodes, and its file for a batch system."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from toolkit.recipe.recipe import Recipe

SLURM, KUBERNETES, SKYPILOT = "slurm", "kubernetes", "skypilot"

FILES = {SLURM: "slurm.sh", KUBERNETES: "kubernetes.yaml", SKYPILOT: "skypilot.yaml"}
"""Batch system -> its template, and the ending of a job's file."""

SUBMIT = {SLURM: "sbatch {}", KUBERNETES: "kubectl apply --filename {}", SKYPILOT: "sky jobs launch {}"}
"""Batch system -> the command that submits a file."""

SKY_NAMES = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200": "B200",
    "a100_40": "A100",
    "a100_80": "A100-80GB",
    "l40s": "L40S",
    "rtx4090": "RTX4090",
    "rtx5090": "RTX5090",
    "l4": "L4",
    "a10g": "A10G",
    "a6000": "RTXA6000",
    "v100_16": "V100",
    "v100_32": "V100-32GB",
    "mi300x": "MI300X",
}
"""Preset of hardware.yaml -> SkyPilot's name of its GPU."""


@dataclass(frozen=True)
class Job:
    """A recipe on nodes of a batch system.

    Attributes:
        system: one of `FILES`.
        recipe: the recipe with its overrides.
        source: the recipe's name or path, as it was given.
        overrides: the overrides, as they were given.
        least, most: the number of nodes; a range lets the batch system start on what is there.
        ranks: ranks of each node.
        on_cpu: whether they use the CPU, and not a GPU each.
        strategy: the sharding strategy, or None to leave it to the recipe.
        minutes: the time limit of each start, or None for that of the partition.
        partition: Slurm's partition, or None for the default.
        image: the container's image, or None for none.
        volume: a claim and where it is mounted (`claim:/path`), or None for none.
        gpu: SkyPilot's name of the GPU, or None.
    """

    system: str
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
    volume: str | None = None
    gpu: str | None = None

    @property
    def name(self) -> str:
        """Returns a name that every batch system allows, after the output folder. JobSet's begin with a letter."""
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

    @property
    def extra(self) -> str | None:
        """Returns the extra of the package with the driver of the store, or None."""
        protocol = (self.recipe.checkpoint.to or "").partition(":")[0]
        return protocol if protocol in ("s3", "gs") else None

    def train_words(self, source: str | None = None) -> str:
        """Returns the part of the `toolkit train` command that every node has, quoted for the shell."""
        device = ["--cpu" if self.on_cpu else "--gpus", str(self.ranks)]
        strategy = [] if self.strategy is None else ["--strategy", self.strategy]
        given = [self.source, *self.overrides] if source is None else [source]
        return shlex.join(["toolkit", "train", *given, *device, *strategy])

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
        return environment.get_template(f"{FILES[self.system]}.jinja").render(job=self, command=command, **_of_here())

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
