"""A run that is cut off and started again is the run that was not, bit for bit; on other ranks, sample for sample."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import shutil
import time
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.cases import cases
from support.cuts import cut_in_step
from support.ranks import meet, run_on_ranks
from support.runs import finetuned, losses_of, records_of
from support.texts import make_texts
from support.tiny import recipe_values, save_llama, unfinish
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from toolkit import Recipe, finetune
from toolkit.checkpoint import latest
from toolkit.cli.app import app
from toolkit.cli.commands.export import export
from toolkit.errors import BadInputError, StoppedError
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe import schema
from toolkit.run import fit as runs

TABLES = cases(__file__)

CUT_AT = 7  # the step in which the run dies; saved after 3 and 6
CASES: dict[int, list[dict[str, Any]]] = TABLES["CASES"]


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank_here() -> int:
    return int(os.environ["RANK"])


def values(folder: Path, output: str, case: dict[str, Any]) -> dict[str, Any]:
    training: dict[str, Any] = {"max_steps": 9, "micro_batch_size": 2, "eval_every_steps": 4}
    training["gradient_accumulation_steps"] = case.get("accumulation", 1)
    training["mixed_precision"] = case["precision"]
    if case.get("epochs"):
        # 2.4 epochs of samples: an epoch ends between the cut and the checkpoint before it.
        training |= {"max_steps": None, "num_epochs": 2.4, "micro_batch_size": 16 // world_size()}
    made = recipe_values(folder / "model", folder / "texts.jsonl", folder / output, folder / "cache", **training)
    made["data"] |= {"shuffle": True, "validation_fraction": 0.2}
    made["checkpoint"] = {"every_steps": 3, "keep_last": None, "asynchronous": not case.get("synchronous", False)}
    made["sharding"] = {"strategy": case["strategy"], "offload": "optimizer" if case.get("offload") else "none"}
    if case.get("dropout"):
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        made["model"] = {
            "config": {"model_type": "gpt2", **sizes, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
            "tokenizer": str(folder / "model"),
        }
    return made


def run(recipe: dict[str, Any], cut: bool = False) -> list[dict[str, Any]]:
    """The run's records. Cut, it dies in the last micro-batch of a step, without a chance to tidy up."""
    os.environ.pop("PARALLELISM_CONFIG_DP_SHARD_SIZE", None)
    if recipe["sharding"]["strategy"] == "hybrid":
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"
    with cut_in_step(CUT_AT) if cut else nullcontext():
        return finetuned(recipe).metrics
    return []


TOLD = ("split", "step", "epoch", "samples", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate")


def cut_and_go_on(folder: str) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(CASES[world_size()]):
        whole = run(values(Path(folder), f"whole-{world_size()}-{number}", case))
        recipe = values(Path(folder), f"cut-{world_size()}-{number}", case)
        run(recipe, cut=True)
        on_disk = sorted(path.name for path in Path(recipe["training"]["output_dir"], "checkpoints").iterdir())
        meet()
        dist.barrier()
        found.append({"whole": whole, "resumed": run(recipe), "saved": on_disk})
    return found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder with a model and texts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.copy(text_file, folder / "texts.jsonl")
    save_llama(folder / "model", make_texts(60), tied=True)
    return folder


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, marks=pytest.mark.grid),
        pytest.param(2, marks=pytest.mark.first),
        pytest.param(4, marks=pytest.mark.grid),
    ],
)
def test_a_run_that_was_cut_off_is_the_run_that_was_not(num_ranks: int, workshop: Path) -> None:
    for rank in run_on_ranks(cut_and_go_on, num_ranks, str(workshop)):
        for number, (case, found) in enumerate(zip(CASES[num_ranks], rank, strict=True)):
            assert found["saved"] == ["step_00000003", "step_00000006"], case
            whole, resumed = ([{k: r.get(k) for k in TOLD} for r in found[way]] for way in ("whole", "resumed"))
            assert resumed == whole, case
            folders = [workshop / f"{way}-{num_ranks}-{number}" for way in ("whole", "cut")]
            weights = [load_file(folder / "export" / "model.safetensors") for folder in folders]
            assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), case
            written = records_of(folders[1])
            assert [{k: r.get(k) for k in TOLD} for r in written] == whole, case


# Elsewhere

PARTS = [
    # ranks, strategy, offload, accumulation: 4 samples a step all along; the steps after which it is stopped
    (2, "zero3", True, 2, 3),
    (4, "ddp", False, 1, 7),
    (1, "zero2", True, 4, 8),
    (2, "zero2", False, 2, None),
]


def part(folder: str, strategy: str, offload: bool, accumulation: int, stop_after: int | None) -> dict[str, Any]:
    """Goes on until it is asked to stop; the samples that this rank has trained on, in order."""

    class Asked(runs.StopRequests):
        """The last rank is asked to stop after a step; the others are not."""

        def reason_to_stop(self) -> str | None:
            step = len(seen) // accumulation + start
            return "enough" if step == stop_after and rank_here() == world_size() - 1 else None

    checkpoints = sorted(Path(folder, "elastic", "checkpoints").glob("step_*"))
    start = int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0
    seen: list[list[str]] = []
    loss_sum = CausalLM.loss_sum

    def noting(self: Any, model: Any, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append([hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["input_ids"]])
        return loss_sum(self, model, batch)

    CausalLM.loss_sum = noting  # type: ignore[method-assign]
    runs.StopRequests = Asked  # type: ignore[misc]
    case = {"strategy": strategy, "precision": "no", "offload": offload, "accumulation": accumulation}
    recipe = values(Path(folder), "elastic", case)
    recipe["training"] |= {"max_steps": 12, "micro_batch_size": 1, "eval_every_steps": None}
    recipe["checkpoint"] = {}  # saved when it is asked to stop, and only then
    told: dict[str, Any] = {"headers": 0}
    read_metadata = HuggingFaceStorageReader.read_metadata

    def counting(self: Any) -> Any:
        told["headers"] += 1
        return read_metadata(self)

    HuggingFaceStorageReader.read_metadata = counting  # type: ignore[method-assign]
    try:
        told["metrics"] = finetune(Recipe.from_mapping(recipe)).metrics
    except StoppedError as error:
        told["stopped"], told["code"] = str(error), error.exit_code
    told["seen"] = seen
    return told


def test_a_run_moves_between_ranks_strategies_and_offload(workshop: Path) -> None:
    """2 -> 4 -> 1 -> 2 ranks: every sample in the one global order, and the losses of an unbroken run."""
    order: list[str] = []
    for num_ranks, strategy, offload, accumulation, stop_after in PARTS:
        told = run_on_ranks(part, num_ranks, str(workshop), strategy, offload, accumulation, stop_after)
        if order:
            assert [rank["headers"] for rank in told] == [1] + [0] * (num_ranks - 1), "rank 0 opens the files for all"
        if stop_after is not None:
            assert all(rank["code"] == 3 for rank in told)
            assert all(f"stopped after step {stop_after}" in rank["stopped"] for rank in told)
            assert "enough" in told[-1]["stopped"]
        micro_batches = [list(itertools.chain(*same)) for same in zip(*(rank["seen"] for rank in told), strict=True)]
        order += itertools.chain(*micro_batches)
    moved = losses_of(told[0]["metrics"])
    assert len(moved) == 12
    assert len(order) == 48

    shutil.move(workshop / "elastic", workshop / "moved")
    whole = run_on_ranks(part, 1, str(workshop), "zero3", False, 4, None)[0]
    assert order == list(itertools.chain(*whole["seen"]))
    losses = losses_of(whole["metrics"])
    assert moved == pytest.approx(losses, rel=1e-5)
    metrics = [record["samples"] for record in whole["metrics"] if record["split"] == "train"]
    assert metrics == [4 * step for step in range(1, 13)]
    assert math.isfinite(sum(losses))


# Refusals


def refused(folder: str) -> dict[str, str]:
    found = {}
    other = {"strategy": "zero3", "precision": "no"}

    def attempt(name: str, output: str = "whole-1-0", case: dict[str, Any] = other, **sections: dict[str, Any]) -> None:
        recipe = values(Path(folder), output, case)
        for section, changes in sections.items():
            recipe[section] |= changes
        before = time.time()
        try:
            result = finetuned(recipe)
        except BadInputError as error:
            found[name] = str(error)
        else:
            written = max(path.stat().st_mtime for path in result.output_dir.iterdir())
            found[f"{name}-result"] = f"{len(result.metrics)} records, {written > before}"

    checkpoint = f"{folder}/whole-1-0/checkpoints/step_00000006"
    attempt("again", case=CASES[1][0])
    attempt("finished")
    attempt("never", checkpoint={"resume": "never"})
    shutil.copytree(f"{folder}/whole-1-0", f"{folder}/longer")
    attempt("further", "longer", checkpoint={"resume": f"{folder}/longer"}, training={"max_steps": 11})
    attempt("changed", "new", checkpoint={"resume": checkpoint}, data={"max_length": 24}, training={"seed": 5})
    attempt("nowhere", "new", checkpoint={"resume": folder})
    attempt("earlier", checkpoint={"resume": checkpoint})
    attempt("optimizer", "new", checkpoint={"resume": checkpoint}, optimizer={"kind": "adamw", "beta1": 0.8})
    shutil.move(f"{folder}/model", f"{folder}/the model")
    save_llama(Path(folder, "model"), make_texts(60), tied=True, layers=3)  # the recipe still says the same
    attempt("another model", "other", checkpoint={"resume": checkpoint})
    shutil.rmtree(f"{folder}/model")
    shutil.move(f"{folder}/the model", f"{folder}/model")
    return found


def test_what_does_not_fit_is_refused(finished_run: Path, workshop: Path) -> None:
    found = run_on_ranks(refused, 1, str(workshop))[0]
    # The same command, as of a job that is put in the queue again: nothing is done, and nothing is written.
    assert found["again-result"] == "13 records, False"
    assert "already holds a finished run" in found["finished"]
    assert f"train it further with checkpoint.resume={finished_run}" in found["finished"]
    assert found["further-result"].startswith("15 records"), "11 steps, and evaluations at 0, 4, 8 and 11"
    assert (workshop / "longer/finished.json").is_file()
    assert "already holds a finished run" in found["never"]
    assert "data.max_length: 32 there, 24 now" in found["changed"]
    assert "training.seed: 0 there, 5 now" in found["changed"]
    assert "neither a checkpoint" in found["nowhere"]
    assert "has later checkpoints (step_00000009)" in found["earlier"]
    assert "optimizer" not in found, "a harmless change goes on"
    assert "config.json of model.name_or_path has changed since" in found["another model"]


# The command line


@pytest.fixture
def finished_run(workshop: Path) -> Path:
    """A run of 9 steps on one rank, with checkpoints after 3, 6 and 9."""
    if not (workshop / "whole-1-0" / "report.html").exists():
        run_on_ranks(cut_and_go_on, 1, str(workshop))
    return workshop / "whole-1-0"


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_export_of_a_checkpoint_is_the_runs_own(finished_run: Path, tmp_path: Path) -> None:
    done = call("export", finished_run, "--to", tmp_path / "last", "--max-shard-gib", "0.0001")
    assert done.exit_code == 0, done.output
    assert "step 9 in float32; logits differ by 0.0e+00" in done.output
    files = sorted(path.name for path in (tmp_path / "last").glob("*.safetensors"))
    assert len(files) > 1
    (tmp_path / "ordinary").touch()
    modes = {path.stat().st_mode for path in [*(tmp_path / "last").iterdir(), *(finished_run / "export").iterdir()]}
    assert modes == {(tmp_path / "ordinary").stat().st_mode}
    exported = {name: tensor for file in files for name, tensor in load_file(tmp_path / "last" / file).items()}
    own = load_file(finished_run / "export" / "model.safetensors")
    assert exported.keys() == own.keys()
    assert all(torch.equal(exported[name], own[name]) for name in own)
    assert AutoTokenizer.from_pretrained(tmp_path / "last").vocab_size > 0

    refused = call("export", finished_run, "--to", tmp_path / "none", "--max-shard-gib", 0)
    assert "--max-shard-gib: found 0; allowed" in str(refused.exception)
    done = call("export", finished_run, "--checkpoint", 3, "--dtype", "bf16", "--to", tmp_path / "third", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert 0 <= told.pop("logits_difference") < 1e-2
    assert told.pop("unfinished") is None
    assert [note for note in told.pop("notes") if "'bfloat16' instead of 'float32'" not in note] == []
    assert told == {"folder": str(tmp_path / "third"), "step": 3, "dtype": "bfloat16", "is_adapter": False}
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "third")
    assert third.dtype == torch.bfloat16
    assert not torch.equal(third.lm_head.weight.float(), own["model.embed_tokens.weight"].bfloat16().float())

    with pytest.raises(BadInputError, match="exists; name a new folder"):
        export(str(finished_run), tmp_path / "third")
    with pytest.raises(BadInputError, match=r"there is no checkpoint .*step_00000004"):
        export(str(finished_run), tmp_path / "none", 4)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damage_is_told(finished_run: Path, tmp_path: Path) -> None:
    """A flipped byte, a shorter file, one that is missing, one too many, a manifest that leads elsewhere."""
    listed = call("checkpoints", finished_run, "--verify", "--json")
    assert listed.exit_code == 0
    assert [(row["step"], row["problem"], row["ranks"]) for row in json.loads(listed.output)] == [
        (3, None, 1),
        (6, None, 1),
        (9, None, 1),
    ]
    for name, damage in {
        "flipped": flip_a_byte,
        "shorter": lambda path: path.write_bytes(path.read_bytes()[:-8]),
        "missing": lambda path: path.unlink(),
        "extra": lambda path: (path.parent / "other.safetensors").write_bytes(b""),
        "marker": lambda path: (path.parent / "COMPLETE").write_text("0" * 64),
        "unfinished": lambda path: (path.parent / "COMPLETE").unlink(),
        "elsewhere": lambda path: lead_elsewhere(path.parent),
    }.items():
        shutil.copytree(finished_run, tmp_path / name)
        damage(next((tmp_path / name / "checkpoints" / "step_00000009").glob("*.safetensors")))
    quick = {
        name: json.loads(call("checkpoints", tmp_path / name, "--json").output)[-1] for name in os.listdir(tmp_path)
    }
    assert quick["flipped"]["problem"] is None, "only reading it all tells"
    assert "has" in quick["shorter"]["problem"]
    assert "missing, but named in" in quick["missing"]["problem"]
    assert "other.safetensors is not named in" in quick["extra"]["problem"]
    assert "does not fit" in quick["marker"]["problem"]
    assert "was not finished" in quick["unfinished"]["problem"]
    assert "'../recipe.yaml', which is not a regular file" in quick["elsewhere"]["problem"]
    flipped = call("checkpoints", tmp_path / "flipped", "--verify")
    assert flipped.exit_code == 1
    assert "checksum differs" in " ".join(flipped.output.split())
    for name in ("shorter", "missing", "extra", "marker", "unfinished", "elsewhere"):
        assert latest(tmp_path / name).step == 6, name  # type: ignore[union-attr]
    with pytest.raises(BadInputError, match="checksum differs"):
        export(str(tmp_path / "flipped"), tmp_path / "to")
    assert not (tmp_path / "to").exists()


def lead_elsewhere(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../recipe.yaml"] = {"bytes": 1, "sha256": ""}
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())


def resume_damaged(folder: str, output: str) -> tuple[str, str]:
    """What came of it, and what was told."""
    case = {"strategy": "zero3", "precision": "no"}
    recipe = values(Path(folder), output, case)
    unfinish(Path(folder, output))
    with redirect_stderr(io.StringIO()) as told:
        num_records = len(finetuned(recipe).metrics)
    return f"{num_records} records", told.getvalue()


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(finished_run: Path, workshop: Path) -> None:
    for name in ("flipped", "cut short"):
        shutil.copytree(finished_run, workshop / name)
    flip_a_byte(next((workshop / "flipped/checkpoints/step_00000009").glob("*.safetensors")))
    (workshop / "cut short/checkpoints/step_00000009/COMPLETE").unlink()
    (first, told), second = run_on_ranks(resume_damaged, 2, str(workshop), "flipped")
    assert first == second[0] == "13 records"
    assert "warning: passed over step_00000009: shard-" in told
    assert "its checksum differs; it is now step_00000009.set_aside" in told
    assert "resumed: after step 6" in told
    assert "; from step 6 on " in (workshop / "flipped/report.html").read_text()
    records, _ = run_on_ranks(resume_damaged, 1, str(workshop), "cut short")[0]
    assert records == "13 records"
    for name in ("flipped", "cut short"):
        assert latest(workshop / name).step == 9, name  # type: ignore[union-attr]
        # Only the damaged one may hold what somebody wants back; the other is what an interrupted save has left.
        assert (workshop / name / "checkpoints/step_00000009.set_aside").is_dir() == (name == "flipped")


def saved_by_time(folder: str) -> tuple[list[str], list[str]]:
    """Folders of checkpoints of a run that nobody asked for any, and of one that was told to save none."""
    case = {"strategy": "zero3", "precision": "no"}
    found = []
    # Rank 0's clock decides for all: on the others no time has passed.
    schema.DEFAULT_MINUTES, before = 1e-9 if rank_here() == 0 else 1e9, schema.DEFAULT_MINUTES
    try:
        for name, section in (("asked-for-none", {}), ("never", {"every_minutes": "never"})):
            recipe = values(Path(folder), f"{name}-{world_size()}", case)
            run({**recipe, "checkpoint": section})
            place = Path(recipe["training"]["output_dir"], "checkpoints")
            found.append(sorted(path.name for path in place.iterdir()) if place.exists() else [])
    finally:
        schema.DEFAULT_MINUTES = before
    return found[0], found[1]


def test_a_run_that_asks_for_no_checkpoint_saves_by_time_and_keeps_the_last(workshop: Path) -> None:
    for found in run_on_ranks(saved_by_time, 2, str(workshop)):
        assert found == (["step_00000009"], [])
