"""A checkpoint counts if its marker fits, its files are those named, and each is as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint.consolidate import export_run
from toolkit.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    METRICS,
    Manifest,
    check_files,
    file_entry,
    latest,
    list_checkpoints,
    read_checkpoint,
    step_folder,
)
from toolkit.errors import BadInputError

PLAIN = Manifest(
    step=0,
    samples=8,
    world_size=2,
    strategy="zero3",
    precision="no",
    recipe={"training": {"seed": 1}},
    data="d",
    trainer={"epoch": 0.5},
    scaler=None,
    eval_loss=2.5,
    date="2026-11-22",
    versions={"torch": "2.13"},
    loads=(3, [[0.1, 2.9]]),
    tensors={"weight": ("int8", [3, 2])},
)


def publish(folder: Path, manifest: Manifest) -> None:
    text = manifest.to_json()
    (folder / MANIFEST).write_text(text)
    (folder / COMPLETE).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def written(run: Path, step: int, **recipe: Any) -> Path:
    """A checkpoint of small files that counts."""
    folder = step_folder(run, step)
    folder.mkdir(parents=True)
    for name in ("a.json", "b.json", METRICS, "rank_00000.json", "rank_00001.json", "shard.safetensors"):
        (folder / name).write_text(f"{name} {step}")
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    publish(folder, replace(PLAIN, step=step, files=files, recipe=recipe or PLAIN.recipe))
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = written(tmp_path, 7)
    manifest = read_checkpoint(folder)
    assert (manifest.step, manifest.tensors, manifest.eval_loss) == (7, {"weight": ("int8", [3, 2])}, 2.5)
    assert manifest.loads == (3, [[0.1, 2.9]])
    content = (folder / "a.json").read_bytes()
    assert manifest.files["a.json"].bytes == len(content)
    assert manifest.files["a.json"].sha256 == hashlib.sha256(content).hexdigest()
    assert check_files(folder, manifest, manifest.files) is None


def test_another_format_is_refused() -> None:
    values = json.loads(PLAIN.to_json()) | {"format": 99}
    with pytest.raises(ValueError, match="format 99, but this version reads"):
        Manifest.from_json(json.dumps(values))


def test_checkpoints_are_listed_by_step_and_the_last_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (100_000_000, 20, 3):
        written(tmp_path, step)
    (step_folder(tmp_path, 100_000_000) / COMPLETE).unlink()
    (tmp_path / "checkpoints/step_00000005.unfinished").mkdir()
    found = list_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in found] == [3, 20, 100_000_000]
    assert found[-1].problem == f"{COMPLETE} is missing: it was not finished"
    last = latest(tmp_path)
    assert last is not None
    assert last.step == 20


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    assert latest(tmp_path) is None


def lead_out_of_the_folder(folder: Path) -> None:
    manifest = read_checkpoint(folder)
    publish(folder, replace(manifest, files={"../a.json": manifest.files["a.json"]}))


def forge(**changed: Any) -> Callable[[Path], None]:
    """Writes a manifest with other values, and a marker that fits it."""

    def act(folder: Path) -> None:
        forge_text(folder, json.dumps(json.loads((folder / MANIFEST).read_text()) | changed))

    return act


def nest(folder: Path) -> None:
    forge_text(folder, '{"recipe":' + '{"a":' * 200_000 + "1" + "}" * 200_001)


def forge_text(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    (folder / COMPLETE).write_text(hashlib.sha256(text.encode()).hexdigest())


def link(folder: Path) -> None:
    (folder / "a.json").rename(folder.parent / "a.json")
    (folder / "a.json").symlink_to(folder.parent / "a.json")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "marker": (lambda folder: (folder / COMPLETE).write_text("0" * 64), "COMPLETE does not fit manifest.json"),
    "manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
    "file gone": (lambda folder: (folder / "b.json").unlink(), "b.json is missing, but named in manifest.json"),
    "file too many": (lambda folder: (folder / "c.json").touch(), "c.json is not named in manifest.json"),
    "file cut": (lambda folder: (folder / "a.json").write_text("a"), "a.json has 1 bytes instead of 8"),
    "file too long": (lambda folder: (folder / "a.json").write_text("a" * 9), "a.json has 9 bytes instead of 8"),
    "way out": (lead_out_of_the_folder, "names '../a.json', which is not a regular file"),
    "link": (link, "names 'a.json', which is not a regular file"),
    "marker empty": (lambda folder: (folder / COMPLETE).write_text(""), "COMPLETE does not fit manifest.json"),
    "marker no text": (lambda folder: (folder / COMPLETE).write_bytes(b"\xff\0"), "COMPLETE does not fit"),
    "manifest empty": (lambda folder: (folder / MANIFEST).write_text(""), "COMPLETE does not fit manifest.json"),
    "deep": (nest, "manifest.json cannot be read"),
    "no object": (lambda folder: forge_text(folder, "[]"), "manifest.json cannot be read"),
    "step": (forge(step="7"), "manifest.json cannot be read: step: Input should be a valid integer"),
    "trainer": (forge(trainer=[]), "trainer: Input should be an object"),
    "entry": (forge(files={"a.json": {"bytes": "8"}}), "files.a.json.bytes: Input should be a valid integer"),
    "shape": (forge(tensors={"weight": ["float32", ["1"]]}), "tensors.weight.1.0: Input should be a valid integer"),
    "not finite": (forge(non_finite="lm_head.weight holds values"), "lm_head.weight holds values"),
}


def test_what_an_older_version_did_not_write_has_its_default(tmp_path: Path) -> None:
    folder = written(tmp_path, 7)
    values = json.loads((folder / MANIFEST).read_text())
    del values["non_finite"], values["stream"], values["loads"]
    forge_text(folder, json.dumps(values | {"of_a_later_version": 1}))
    assert read_checkpoint(folder).non_finite is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    damage, told = DAMAGE[kind]
    folder = written(tmp_path, 7)
    damage(folder)
    with pytest.raises(BadInputError, match="is not a complete checkpoint") as found:
        read_checkpoint(folder)
    assert told in str(found.value)
    assert latest(tmp_path) is None


def test_a_damaged_last_checkpoint_is_not_left_out_of_an_export(tmp_path: Path) -> None:
    """Of however it is damaged the same sentence, with the step of the complete one before it."""

    def flip(folder: Path) -> None:
        (folder / "b.json").write_text("b.json 8")  # of the same size

    wrong, recipe = {}, {"model": {"name_or_path": None, "revision": None}, "adapter": {"kind": "none"}}
    for number, (kind, (damage, told)) in enumerate({**DAMAGE, "byte": (flip, "its checksum differs")}.items()):
        run = tmp_path / str(number)
        for step in (3, 5):
            written(run, step, **recipe)
        last = written(run, 7, **recipe)
        damage(last)
        with pytest.raises(BadInputError) as found:
            export_run(run, run / "export")
        said = str(found.value)
        is_right = said.startswith(f"'{last}' is not a complete checkpoint: ") and told in said
        is_right = is_right and said.endswith("; export another, for example with --checkpoint 5")
        if not is_right or (run / "export").exists():
            wrong[kind] = said
    assert not wrong


def test_a_changed_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    folder = written(tmp_path, 7)
    (folder / "b.json").write_text("b.json 8")  # of the same size
    manifest = read_checkpoint(folder)
    assert check_files(folder, manifest, ["a.json"]) is None
    assert check_files(folder, manifest, manifest.files) == "b.json is not what was written: its checksum differs"
