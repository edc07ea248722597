"""A disk that is full when the model is exported: told with bytes and place, and the next start exports alone."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.disturbances import small_disk
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.texts import make_texts
from support.tiny import recipe_values, save_llama

from toolkit.errors import ToolkitError


def recipe_of(home: Path, output: Path) -> dict[str, Any]:
    values = recipe_values(home / "model", home / "texts.jsonl", output, home / "cache", max_steps=4)
    return values | {"checkpoint": {"every_steps": 2, "keep_last": 1}}


def fill(folder: Path, left: int) -> Path:
    """A file that leaves so many bytes of the file system."""
    stat = os.statvfs(folder)
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - left)))
    return ballast


def starts(home: Path) -> dict[str, Any]:
    """A run on a disk that is full from its export on, started three times; what is there after each.

    And one that nothing disturbs, in `home / "run"`.
    """
    from toolkit.checkpoint import list_checkpoints
    from toolkit.run import export
    from toolkit.training import durable_writes
    from toolkit.training.trainer import Trainer

    durable_writes.PATIENCE_SECONDS, durable_writes.RETRY_SECONDS = 0.2, 0.1
    disk, require_room, train_step = home / "disk", export.require_room, Trainer.train_step
    run = disk / "run"
    steps: list[int] = []
    told: list[str] = []
    there: list[list[str]] = []

    def count(self: Any, window: Any) -> Any:
        steps.append(self.global_step)
        return train_step(self, window)

    def start(left: int, is_seen: bool) -> None:
        """Room for `left` bytes from the export on, seen before it begins, or only while it is written."""

        def full(*args: Any) -> None:
            if int(os.environ["RANK"]) == 0 and not ballast:  # once: the export is tried again
                ballast.append(fill(disk, left))
            if is_seen:
                require_room(*args)

        ballast: list[Path] = []
        export.require_room = full
        with pytest.raises(ToolkitError) as caught:
            finetuned(recipe_of(home, run))
        assert caught.value.exit_code == 1
        told.append(str(caught.value))
        # The other rank waits here until nothing is left to look at.
        for path in ballast:
            path.unlink(missing_ok=True)
        there.append(sorted(path.name for path in run.iterdir()))

    Trainer.train_step = count  # type: ignore[method-assign]
    start(4096, is_seen=True)
    start(180_000, is_seen=False)
    checkpoints = [(found.step, found.problem) for found in list_checkpoints(run)]
    export.require_room = require_room
    finetuned(recipe_of(home, run))
    Trainer.train_step = train_step  # type: ignore[method-assign]
    finetuned(recipe_of(home, home / "run"))
    return {"steps": steps, "told": told, "there": there, "checkpoints": checkpoints}


def test_an_export_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in make_texts(60)))
    save_llama(tmp_path / "model", make_texts(60), tied=True)
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("this system lets nobody mount a file system")
        first, second = run_on_ranks(starts, 2, tmp_path)
        exported = load_file(tmp_path / "disk" / "run" / "export" / "model.safetensors")
        assert first["told"][0].startswith("the export could not be written (it needs 228,288 bytes in '")
        assert f"'{tmp_path / 'disk' / 'run'}', where " in first["told"][0]
        assert f"the export could not be written to '{tmp_path / 'disk' / 'run'}': " in first["told"][1]
        assert "No space left on device" in first["told"][1]
        assert second["told"] == first["told"]
        assert all("make room" in text and "start the same command again" in text for text in first["told"])
        assert [name for names in first["there"] for name in names if name.startswith(".") or name == "export"] == []
        assert first["checkpoints"] == [(4, None)]
        assert first["steps"] == [0, 1, 2, 3], "no later start trains again"
        undisturbed = load_file(tmp_path / "run" / "export" / "model.safetensors")
        assert exported.keys() == undisturbed.keys()
        assert all(exported[name].equal(tensor) for name, tensor in undisturbed.items())
