"""A run of half an hour holds at its end what it held at its beginning, and its checkpoints are as exact."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.ranks import run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from test_repeated_runs import held

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
LOOK_SECONDS = 60 * MINUTES / 60
EVERY = 200
CACHES_BYTES, BYTES_A_STEP = 2**24, 2_500
"""The records of metrics.jsonl stay in memory until the run's end, for the report."""


def recipe_of(home: Path, output: str, **checkpoint: Any) -> dict[str, Any]:
    training = {"max_steps": 10**7, "micro_batch_size": 4, "eval_every_steps": 1000}
    values = recipe_values(home / "model", home / "texts.jsonl", home / output, home / "cache", **training)
    values["data"] |= {"shuffle": True, "validation_fraction": 0.1}
    values["schedule"] = {"kind": "constant", "warmup_steps": 4}
    values["sharding"] = {"strategy": "zero3", "offload": "optimizer", "offload_executor": "cpu_torch"}
    values["checkpoint"] = {"every_steps": EVERY, "keep_last": 2, **checkpoint}
    return values


def soak(home: Path) -> list[dict[str, int]]:
    """What this rank holds now and then, until the run's time is over."""
    from toolkit import Recipe, finetune
    from toolkit.errors import StoppedError
    from toolkit.training.trainer import Trainer

    looks: list[dict[str, int]] = []
    step, last = Trainer.train_step, [time.monotonic()]

    def watched(self: Any, window: Any) -> Any:
        result = step(self, window)
        if time.monotonic() - last[0] > LOOK_SECONDS:
            last[0] = time.monotonic()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            looks.append({"step": self.global_step, "bytes": pages * resource.getpagesize(), **held()})
        return result

    Trainer.train_step = watched  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        finetune(Recipe.from_mapping(recipe_of(home, "soaked", time_limit_minutes=MINUTES)))
    return looks


def go_on(home: Path, steps: int) -> None:
    from toolkit import Recipe, finetune

    values = recipe_of(home, "again")
    values["training"]["max_steps"] = steps
    finetune(Recipe.from_mapping(values))


def losses(run: Path, steps: int) -> list[tuple[Any, ...]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    names = ("step", "samples", "tokens", "loss", "grad_norm")
    return [tuple(r[name] for name in names) for r in records if r["split"] == "train" and r["step"] <= steps]


@pytest.mark.grid
def test_a_run_of_half_an_hour(tmp_path: Path) -> None:
    from toolkit import export
    from toolkit.checkpoint import list_checkpoints

    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in make_texts(2000)))
    save_llama(tmp_path / "model", make_texts(60), tied=True, layers=3)
    found = run_on_ranks(soak, 2, tmp_path, seconds=60 * MINUTES + 600)
    for rank, looks in enumerate(found):
        for look in looks:
            print(rank, look, flush=True)
        early, late = looks[len(looks) // 6 : len(looks) // 2], looks[len(looks) // 2 :]
        # A save under way holds a copy of the state and threads: what stays is in the least of many looks.
        for name in ("tensors", "threads", "threads of the system", "descriptors"):
            assert min(look[name] for look in late) <= min(look[name] for look in early), name
        grown = min(look["bytes"] for look in late[-5:]) - min(look["bytes"] for look in early)
        assert grown < CACHES_BYTES + BYTES_A_STEP * (late[-1]["step"] - early[0]["step"]), grown

    before, last = list_checkpoints(tmp_path / "soaked")
    assert before.step % EVERY == 0
    assert before.step < last.step
    shutil.copytree(tmp_path / "soaked", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / last.folder.name)
    run_on_ranks(go_on, 2, tmp_path, last.step)
    assert losses(tmp_path / "again", last.step) == losses(tmp_path / "soaked", last.step)
    export(tmp_path / "soaked", tmp_path / "exported")
    soaked, again = (load_file(f / "model.safetensors") for f in (tmp_path / "exported", tmp_path / "again" / "export"))
    assert soaked.keys() == again.keys()
    assert all(soaked[name].equal(again[name]) for name in soaked)
