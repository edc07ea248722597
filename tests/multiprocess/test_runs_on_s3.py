"""Two ranks copy their checkpoints to a local S3, lose their machine, and go on bit for bit on another."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch.distributed as dist
from moto.server import ThreadedMotoServer
from support.cuts import cut_in_step
from support.ranks import meet, run_on_ranks
from support.runs import finetuned
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from typer.testing import CliRunner

from toolkit.checkpoint import store as stores
from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.store import StorePath
from toolkit.cli.app import app

STORE = StorePath("s3://bucket/runs/first")
CUT_AT = 6  # the step in which the run dies; saved after 2 and 4
TOLD = ("split", "step", "samples", "tokens", "loss", "grad_norm", "learning_rate")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A store of S3 in this process; the environment that leads to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    place = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    place |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "not-to-be-told"}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    try:
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield place
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def train(folder: str, output: str, cut: bool = False, **checkpoint: Any) -> tuple[list[dict[str, Any]], str]:
    """The run's records, and what it told."""
    home, own, records = Path(folder), Path(folder, output), list[dict[str, Any]]()
    recipe = recipe_values(home / "model", home / "texts.jsonl", own, home / "cache", max_steps=7, micro_batch_size=2)
    recipe["checkpoint"] = {"every_steps": 2, "keep_last": 2, **checkpoint}
    recipe["export"] = {"enabled": False}

    with contextlib.redirect_stderr(io.StringIO()) as told, cut_in_step(CUT_AT) if cut else contextlib.nullcontext():
        records = finetuned(recipe).metrics
    return [{key: record.get(key) for key in TOLD} for record in records], told.getvalue()


def kill_damage_and_go_on(folder: str, place: dict[str, str]) -> dict[str, Any]:
    # Accelerate asks for the address where the ranks have met already.
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    whole, _ = train(folder, "whole")
    train(folder, "first", cut=True, to=STORE.url)
    meet()
    dist.barrier()  # rank 0 copies
    saved = [(c.step, c.problem) for c in list_checkpoints(STORE)]
    dist.barrier()
    if dist.get_rank() == 0:
        (shard,) = [p for p in (STORE / "checkpoints/step_00000004").iterdir() if p.name.startswith("shard-00002")]
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(bytes(content))
        (STORE / "checkpoints/step_00000005/shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    dist.barrier()
    resumed, told = train(folder, "second", to=STORE.url)  # on a machine that has nothing of the first start
    return {"whole": whole, "resumed": resumed, "told": told, "saved": saved}


def go_on_elsewhere(folder: str, place: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    os.environ.update(place)
    return train(folder, "elsewhere", resume=f"{STORE}/checkpoints/step_00000004")


@pytest.fixture(scope="module")
def outcomes(s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Any:
    """What came of it on each rank, and of going on with one rank; the folder."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(text_file, folder / "texts.jsonl")
    save_llama(folder / "model", make_texts(60), tied=True)
    found = run_on_ranks(kill_damage_and_go_on, 2, str(folder), s3)
    return found, run_on_ranks(go_on_elsewhere, 1, str(folder), s3)[0], folder


def test_a_run_goes_on_on_another_machine(outcomes: Any) -> None:
    (first, second), _, folder = outcomes
    assert first["saved"] == second["saved"] == [(2, None), (4, None)]
    assert first["resumed"] == first["whole"]
    assert second["resumed"] == second["whole"]
    assert f"passed over {STORE}/checkpoints/step_00000004: shard-00002" in first["told"]
    assert f"resumed: after step 2, 8 samples, from {STORE}/checkpoints/step_00000002" in first["told"]
    assert "not-to-be-told" not in first["told"]
    assert not list(folder.glob("second/.*")), "of what was copied nothing is left"


def test_the_store_holds_the_last_checkpoints_and_nothing_else(outcomes: Any, tmp_path: Path) -> None:
    assert [(c.step, c.problem) for c in list_checkpoints(STORE)] == [(4, None), (6, None)]
    assert sorted(path.name for path in (STORE / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    listed = CliRunner().invoke(app, ["checkpoints", STORE.url, "--verify"])
    assert listed.exit_code == 0, listed.output
    exported = CliRunner().invoke(app, ["export", STORE.url, "--to", str(tmp_path / "model")])
    assert "step 6 in float32; logits differ by 0.0e+00" in exported.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_number_of_ranks_goes_on_from_a_store(outcomes: Any) -> None:
    (first, _), (records, told), _ = outcomes
    assert "written by 2 ranks" in told
    assert [record["step"] for record in records] == [record["step"] for record in first["whole"]]
    assert records[:4] == first["whole"][:4]


def test_large_files_are_copied_in_parts(s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PART_BYTES", 5 * 2**20)  # S3's least
    place = StorePath("s3://bucket/large/a")
    (tmp_path / "a").write_bytes(os.urandom(11 * 2**20))
    place.put(tmp_path / "a")
    place.get(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
