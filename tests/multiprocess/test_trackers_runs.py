"""Each tracker in a run that is interrupted and goes on: read back by the tracker's own library, without a network."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.runs import losses_of, records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama

import toolkit
from toolkit.run.parts import answers
from toolkit.training.extension import Extension

SETTINGS: dict[str, dict[str, Any]] = {
    "tensorboard": {"flush_secs": 5},
    "mlflow": {"run_name": "first", "tags": {"team": "a"}, "description": "a note"},
    "trackio": {"name": "first", "group": "pairs"},
    "wandb": {"name": "first", "group": "pairs", "tags": ["a", "b"], "notes": "a note"},
}
STEPS = list(range(1, 7))


class PowerCut(Extension):
    """Fails once, after the records of a step behind the last checkpoint."""

    def __init__(self) -> None:
        self.is_due = True

    def after_step(self, loop: Any, step: Any) -> None:
        if self.is_due and loop.global_step == 5:
            self.is_due = False
            raise RuntimeError("the power is out")


def image() -> str:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    unanswered = answers._unanswered
    monkeypatch.setattr(answers, "_unanswered", lambda *given: replace(unanswered(*given), images=(image(),)))
    texts = make_texts(40)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in texts))
    model = save_llama(tmp_path / "model", texts, tied=False)

    def start(tracker: str) -> Path:
        folder = tmp_path / "run"
        values = recipe_values(model, tmp_path / "rows.jsonl", folder, tmp_path / "cache", max_steps=STEPS[-1])
        values["data"] |= {"validation_fraction": 0.2, "max_length": 64}
        values["checkpoint"] = {"every_steps": 3}
        values["logging"] = {
            "trackers": [tracker],
            "project_name": "kings",
            "tracker_settings": {tracker: SETTINGS[tracker]},
            "held_out_samples": 2,
        }
        recipe, cut = toolkit.Recipe.from_mapping(values), PowerCut()
        with pytest.raises(toolkit.errors.ToolkitError, match="the power is out"):
            toolkit.finetune(recipe, extensions=[cut])
        toolkit.finetune(recipe, extensions=[cut])
        [manifest, *_] = folder.glob("checkpoints/*/manifest.json")
        assert "tracker_settings" not in manifest.read_text(), "they may hold a key"
        return folder

    return start


def losses(folder: Path) -> list[float]:
    return losses_of(records_of(folder))


def written(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "samples.json").read_text())  # type: ignore[no-any-return]


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"pip install {name.partition('.')[0]}, to try it")


def test_tensorboard(run: Callable[[str], Path]) -> None:
    accumulators = package("tensorboard.backend.event_processing.event_accumulator")
    folder = run("tensorboard")
    found = accumulators.EventAccumulator(str(folder / "kings"), {"tensors": 0, "images": 0})
    found.Reload()
    scalars = found.Scalars("train/loss")
    assert [event.step for event in scalars] == STEPS
    assert [event.value for event in scalars] == pytest.approx(losses(folder))
    assert "train/step" not in found.Tags()["scalars"], "the axis is no figure"
    texts = {tag.removesuffix("/text_summary"): found.Tensors(tag) for tag in found.Tags()["tensors"]}
    assert (folder / "run.json").read_text() in texts["record"][0].tensor_proto.string_val[0].decode()
    assert written(folder)[1]["after"] in texts["held_out/1"][0].tensor_proto.string_val[0].decode()
    assert found.Tags()["images"] == ["held_out_images/0", "held_out_images/1"]
    assert len(list((folder / "kings").rglob("hparams.yml"))) == 1, "of the first start alone"


def test_mlflow(run: Callable[[str], Path], tmp_path: Path) -> None:
    mlflow = package("mlflow")
    folder = run("mlflow")
    client = mlflow.MlflowClient()
    [experiment] = [e for e in client.search_experiments() if e.name == "kings"]
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.data.tags["team"]) == ("first", "a")
    assert found.data.tags["mlflow.note.content"] == "a note"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.step for metric in history] == STEPS
    assert [metric.value for metric in history] == pytest.approx(losses(folder))
    assert found.data.params["training.max_steps"] == "6"
    assert float(found.data.params["plan/peak_gib"]) > 0
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "run.json", "held_out.json", "held_out_images"} <= names
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "held_out.json", str(tmp_path))).read_text())
    after = table["columns"].index("after training")
    assert [row[after] for row in table["data"]] == [sample["after"] for sample in written(folder)]


def test_trackio(run: Callable[[str], Path], tmp_path: Path) -> None:
    package("trackio")
    folder = run("trackio")
    storage = package("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_runs("kings") == ["first"]
    logs = storage.get_logs("kings", "first")
    steps = [log for log in logs if "train/loss" in log]
    assert [log["step"] for log in steps] == STEPS
    assert [log["train/loss"] for log in steps] == pytest.approx(losses(folder))
    shown = next(log for log in logs if "held_out" in log)
    assert written(folder)[0]["after"] in json.dumps(shown["held_out"], ensure_ascii=False)
    assert {"report", "held_out_image/0", "held_out_image/1"} <= shown.keys()
    kept = {path.read_bytes() for path in (tmp_path / "trackio/artifacts").rglob("*") if path.is_file()}
    assert {(folder / file).read_bytes() for file in ("report.html", "run.json")} <= kept
    assert storage.get_run_config("kings", "first")["training.max_steps"] == 6


def parts_of(path: Path) -> Iterator[bytes]:
    """The records of an offline run's file: LevelDB's log format behind a header of 7 bytes."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # the rest of a block is filled up
            place += 2**15 - place % 2**15
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def test_wandb(run: Callable[[str], Path], tmp_path: Path) -> None:
    wandb = package("wandb")
    from wandb.proto import wandb_internal_pb2

    folder = run("wandb")
    wandb.teardown()  # its own process has then written all
    runs, history, files = [], [], set()
    for place in sorted((tmp_path / "wandb").glob("offline-run-*")):
        files |= {str(file.relative_to(place / "files")) for file in (place / "files").rglob("*") if file.is_file()}
        [path] = place.glob("*.wandb")
        for data in parts_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                runs.append(record.run)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item  # of an object the key is the first part, and its fields are the second
                history.append({each.key or each.nested_key[0]: json.loads(each.value_json) for each in items})
    assert {(r.run_id, r.project, r.display_name, r.run_group, r.notes, tuple(r.tags)) for r in runs} == {
        (json.loads((folder / "trackers.json").read_text())["wandb"], "kings", "first", "pairs", "a note", ("a", "b"))
    }, "two starts of one run"
    steps = [row for row in history if "train/loss" in row]
    assert [row["_step"] for row in steps] == STEPS
    assert [row["train/loss"] for row in steps] == pytest.approx(losses(folder))
    shown = next(row for row in history if "held_out" in row)
    assert {"report", "held_out", "held_out_image/0", "held_out_image/1"} <= shown.keys()
    assert {"report.html", "run.json"} <= files
    [table] = [file for file in files if "held_out" in file and file.endswith("table.json")]
    rows = json.loads(next((tmp_path / "wandb").rglob(Path(table).name)).read_text())["data"]
    assert [row[3] for row in rows] == [sample["after"] for sample in written(folder)]
