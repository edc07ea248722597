"""The record of a run (`run.json`): its starts and what they changed, its warnings, and what limits its figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import counted
from toolkit.pages.card import published_values
from toolkit.pages.parts.story import Start, Story
from toolkit.recipe.recipe import Recipe, dotted
from toolkit.run.folder.origin import versions
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.training.extension import Extension

UNLIKE_ANYWAY = ("training.output_dir", "checkpoint.resume", "logging.tracker_settings")
"""Settings that say nothing about what was trained."""


class Recorded(RunPart):
    """Keeps the record; the first part, so that others find it."""

    def before_rows(self) -> None:
        opened, resumed = self.opened, self.opened.resumed
        changed = [] if resumed is None else list(changes(resumed.recipe, self.recipe))
        step = 0 if resumed is None else resumed.step
        start = Start(step, opened.accelerator.num_processes, opened.plugin.text, versions(), changed)
        opened.story.begin(start, None if resumed is None else resumed.story)

    def prepared(self, run: PreparedRun) -> None:
        self.opened.story.of_rows(run.data.report.to_dict())

    def start(self, run: PreparedRun) -> None:
        if (resumed := self.opened.resumed) is not None:
            self.opened.console.print(resumed_fact(resumed, self.opened), markup=False)
        with contextlib.suppress(OSError):  # what must be written reports a full disk
            ranks.on_first_rank(lambda: self.opened.story.write(self.opened.output_dir))

    def extension(self, loop: Loop) -> Extension | None:
        return StoryInCheckpoints(self.opened.story)


class StoryInCheckpoints(Extension):
    def __init__(self, story: Story) -> None:
        self._story = story

    def state(self) -> dict[str, Any]:
        return {"story": self._story.values()}


def changes(before: Mapping[str, Any], recipe: Recipe) -> Iterator[list[str]]:
    """Yields key, old and new value of each setting that is not as in a checkpoint's recipe, as it may be published."""
    old, new = dotted(before), dotted(recipe.model_dump(mode="json"))
    shown = [dotted(published_values(values)) for values in (before, recipe.model_dump(mode="json"))]
    for key in new:
        # A setting that an older version did not have had its default.
        if key in old and old[key] != new[key] and not key.startswith(UNLIKE_ANYWAY):
            yield [key, *(str(values.get(key)) for values in shown)]


def resumed_fact(manifest: Manifest, opened: OpenedRun) -> str:
    """Says where the run goes on, and what a change in the number of ranks changes."""
    told = (
        f"   resumed: after step {manifest.step}, {counted(manifest.samples, 'sample')}, from {opened.found.origin} "
        f"(written by {counted(manifest.world_size, 'rank')}, {manifest.strategy})"
    )
    if manifest.world_size == ranks.world_size():
        return told
    training, sharding, now = manifest.recipe["training"], manifest.recipe["sharding"], opened.samples_per_step
    groups = manifest.world_size // sharding["sequence"] // sharding.get("tensor", 1)
    before = training["micro_batch_size"] * training["gradient_accumulation_steps"] * groups
    steps = "as many samples a step" if before == now else f"{now} samples a step, which were {before}"
    return f"{told}; {counted(ranks.world_size(), 'rank')} now: the same samples in the same order, {steps}"
