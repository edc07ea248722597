"""Records the losses and gradient norms of the shipped recipes, and compares them with those recorded before.

    python tests/traces/update.py            # record all again: on purpose, after a change that is meant to change them
    python tests/traces/update.py --exact    # compare bit by bit on the machine that recorded them; writes nothing

`RECIPE.jsonl` holds a line per evaluation and optimizer step on one rank, then the same on two ranks over gloo. Models
compute in float32. Every figure stands in Python's shortest form, which reads back to the same bits.

Another machine sums in another order and so differs in the last digits: `test_traces.py` compares within 1e-6. To prove
that a change leaves the bits alone on yours, record on the commit before it and compare on the commit after it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parent
RECIPES = sorted((FOLDER.parents[1] / "recipes").rglob("*.yaml"))
RANKS = (1, 2)
FIGURES = ("loss", "grad_norm")
OVERRIDES = (
    "training.max_steps=6",
    "training.num_epochs=null",
    "training.eval_every_steps=null",
    "training.mixed_precision='no'",
    "data.max_validation_samples=8",
    # With 1e-8 AdamW makes whole steps of gradients that are rounding noise: norms then differ by 3e-6 between
    # AVX-512 and SSE; with 1e-4 by 3e-7.
    "optimizer.eps=1e-4",
)
"""Shorten a recipe: a few steps, evaluated at the start and the end."""

OVERRIDES_OF = {
    # Its loss is a small difference of large sums, times beta: 2e-6 between AVX-512 and SSE with the recipe's 0.1.
    # Without samples of text: quickstart shows that they leave training alone.
    "dpo": ("objective.beta=0.01", "logging.held_out_samples=0"),
    "kto": ("objective.beta=0.01", "logging.held_out_samples=0"),
    "vision_dpo": ("objective.beta=0.01", "logging.held_out_samples=0"),
    # A model of six steps writes no right answer, and from equal rewards nothing is learned.
    "grpo": (
        "objective.rewards=[{name: e, match: e}]",
        "data.max_validation_samples=null",
        "objective.max_new_tokens=12",
        "training.micro_batch_size=16",
        "answers.max_new_tokens=2",
    ),
}

AFTER = {
    **dict.fromkeys(("distill", "dpo", "grpo", "kto", "lora", "qlora", "reward"), "quickstart"),
    "vision_dpo": "vision",
}
"""Recipe -> the one whose export it begins with, which runs before it."""

NUM_ROWS = 200
"""Rows kept of each data file: the runs read no more, and the others would only be tokenised."""

Trace = list[dict[str, Any]]
"""Records of metrics.jsonl, cut down to `ranks`, `split`, `step` and `FIGURES`."""


def record(rank_counts: Sequence[int] = RANKS, names: Sequence[str] | None = None) -> dict[str, Trace]:
    """Name of each shipped recipe -> its trace on one rank and then on two, or of and on those that are named.

    A recipe of `AFTER` needs the one that it begins with among the names.
    """
    from support.ranks import run_on_ranks

    traces: dict[str, Trace] = {path.stem: [] for path in RECIPES if names is None or path.stem in names}
    with TemporaryDirectory() as folder:
        recipes = [path for path in _copied(Path(folder)) if path.stem in traces]
        for num_ranks in rank_counts:
            first, *others = run_on_ranks(_losses, num_ranks, recipes)
            assert all(other == first for other in others), "the ranks tell different losses"
            for name, trace in first.items():
                traces[name] += [{"ranks": num_ranks, **line} for line in trace]
    return traces


def recorded() -> dict[str, Trace]:
    """The committed traces, by recipe."""
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(FOLDER.glob("*.jsonl"))
    }


def differences(expected: dict[str, Trace], found: dict[str, Trace], tolerance: float = 0.0) -> Iterator[str]:
    """The first line of each recipe and number of ranks that differs by more than `tolerance`, relative."""
    for name in sorted({*expected, *found}):
        for num_ranks in RANKS:
            pair = [
                [line for line in traces.get(name, []) if line["ranks"] == num_ranks] for traces in (expected, found)
            ]
            yield from _first_difference(f"{name} on {num_ranks} ranks", *pair, tolerance)


def _copied(folder: Path) -> list[Path]:
    """Copies of the recipes, beside the first rows of their data."""
    for source in (RECIPES[0].parent / "data").glob("*.jsonl"):
        rows = source.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / source.name).write_text("".join(rows[:NUM_ROWS]), encoding="utf-8")
    shutil.copytree(RECIPES[0].parent / "data/shapes_tokenizer", folder / "data/shapes_tokenizer")
    return [Path(shutil.copy(path, folder)) for path in RECIPES]


def _losses(recipes: list[Path]) -> dict[str, Trace]:
    """This rank's records of a run of each recipe."""
    import os

    from support.ranks import meet

    from toolkit import Recipe, finetune

    traces = {}
    for path in sorted(recipes, key=lambda path: path.stem in AFTER):
        meet()
        output = path.with_name(f"{path.stem}-{os.environ['WORLD_SIZE']}")
        folders = (f"training.output_dir={output}", f"data.cache_dir={path.with_name('cache')}")
        chosen = [*OVERRIDES, *OVERRIDES_OF.get(path.stem, ()), *folders]
        if path.stem in AFTER:
            export = path.with_name(f"{AFTER[path.stem]}-{os.environ['WORLD_SIZE']}") / "export"
            fields = ("objective.teacher", "model.tokenizer") if path.stem == "distill" else ("model.name_or_path",)
            chosen += [f"{field}={export}" for field in fields]
        records = finetune(Recipe.load(path, chosen)).metrics
        planned = all(line["planned_peak_bytes"] for line in records if line["split"] == "train")
        assert planned, "the run has a plan"
        kept = ("split", "step", *FIGURES)
        traces[path.stem] = [{key: line[key] for key in kept if key in line} for line in records]
    meet()
    return traces


def _first_difference(where: str, expected: Trace, found: Trace, tolerance: float) -> Iterator[str]:
    for before, now in zip(expected, found, strict=False):
        if not _equal(before, now, tolerance):
            yield f"{where}, {before['split']} step {before['step']}: recorded {before}, found {now}"
            return
    if len(expected) != len(found):
        yield f"{where}: {len(expected)} lines recorded, {len(found)} found"


def _equal(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> bool:
    if before.keys() != now.keys():
        return False
    exact = all(before[key] == now[key] for key in before if key not in FIGURES)
    figures = [(before[key], now[key]) for key in FIGURES if key in before]
    # The loss of fresh samples is a mean of advantages, which cancel out.
    least = tolerance / 10
    return exact and all(
        found is not None and math.isclose(told, found, rel_tol=tolerance, abs_tol=least) for told, found in figures
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the losses of the shipped recipes again, or compare them.")
    parser.add_argument("--exact", action="store_true", help="Compare bit by bit and write nothing.")
    exact = parser.parse_args().exact
    sys.path.insert(0, str(FOLDER.parent))
    traces = record()
    told = list(differences(recorded(), traces))
    print("\n".join(told) or "bit-identical with what was recorded")
    if exact:
        return 1 if told else 0
    for name, trace in traces.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
