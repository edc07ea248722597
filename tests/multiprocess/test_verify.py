"""`toolkit verify` for real: right runs pass, runs made wrong are reported as such, nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cases import cases
from support.launches import clean_environment
from support.moe import mixture
from support.plain_objectives import OBJECTIVES
from support.ranks import LIMIT_SECONDS
from support.sights import save_all
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, with_sections
from transformers import AutoModelForImageTextToText, AutoTokenizer

from toolkit.cli import app as cli
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.errors import ToolkitError
from toolkit.model import load
from toolkit.model.quantised import quantised
from toolkit.objectives import grpo
from toolkit.objectives.losses.divergence import Divergence
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.rollouts import RunSampler
from toolkit.verify import FAILED, OK, Report, Row, ShardedRun, ranks, verify
from toolkit.verify.sharded import _run_sharded

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
Main = Callable[..., tuple[int, str, str]]
Spoil = Callable[[pytest.MonkeyPatch], None]
CHECKS = ["loss", "gradient norm", "weights", "gradients"]
IMAGES = [1, 0, 2, 0, 0, 0, 0, 0, 0, 1, 1, 3, 0, 1]
"""Of each row; the second step has none."""

RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = cases(__file__)["RECIPES"]
"""Name -> its model, its rows, and what else its recipe has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, with_objectives: Path, text_file: Path) -> Path:
    """The models, the rows, and a config of one rank and of two for each strategy."""
    texts = [" ".join(text.split()[: 3 + i % 6]) for i, text in enumerate(make_texts(len(IMAGES), seed=4))]
    folder = save_all(tmp_path_factory.mktemp("verify"), ("llava", "idefics3"), texts, IMAGES)
    shutil.copytree(folder / "llava", folder / "other llava")
    other = AutoModelForImageTextToText.from_pretrained(folder / "llava")
    torch.nn.init.normal_(other.lm_head.weight, std=0.5)
    other.save_pretrained(folder / "other llava")
    for path in with_objectives.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "texts.jsonl").symlink_to(text_file)
    lines = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    prompts = [{"prompt": " ".join(text.split()[:3])} for text in lines]
    write_rows(folder / "prompts.jsonl", prompts)
    tokenizer = AutoTokenizer.from_pretrained(save_llama(folder / "llama", lines, tied=True, layers=3))
    experts = mixture("deepseek_v3", vocab_size=len(tokenizer), max_position_embeddings=128)
    for model in (experts, tokenizer):
        model.save_pretrained(folder / "experts")
    for strategy in ("zero3", "ddp", "hybrid"):
        for count in (1, 2):
            config = {"distributed_type": "FSDP", "use_cpu": True, "num_processes": count, "mixed_precision": "no"}
            config["fsdp_config"] = {"fsdp_version": 2, "fsdp_sharding_strategy": strategy}
            (folder / f"{strategy}-{count}.yaml").write_text(yaml.safe_dump(config))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values_of(folder, "text")))
    (folder / "spread.yaml").write_text(yaml.safe_dump(values_of(folder, "spread experts")))
    return folder


@pytest.fixture(autouse=True)
def temporary(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Temporary folders go where they can be seen to be gone, and no output folder is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("toolkit-verify-*"))
    assert not (folder / "out").exists()


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    """The command in this process: its exit code and what it wrote."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["toolkit", "verify", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return run


def values_of(folder: Path, name: str) -> dict[str, Any]:
    model, rows, sections = RECIPES[name]
    training = {"micro_batch_size": 1 if model == "experts" else 2, "gradient_accumulation_steps": 2}
    values = recipe_values(folder / model, folder / f"{rows}.jsonl", folder / "out", folder / "cache", **training)
    if rows not in ("texts", "prompts"):
        values["data"]["max_length"] = 128
    values = with_sections(values, sections)
    if "teacher" in values.get("objective", {}):
        teacher = folder / values["objective"]["teacher"]
        values["objective"] |= {**OBJECTIVES["distillation"][3], "teacher": str(teacher)}
    return values


def report_of(folder: Path, name: str, config: str = "zero3-1", **settings: Any) -> Report:
    return verify(Recipe.from_mapping(values_of(folder, name)), folder / f"{config}.yaml", **settings)


def failed(report: Report) -> set[str]:
    return {row.check for row in report.rows if row.verdict == FAILED}


def break_ranks(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `code` at the start of every rank, before anything else."""
    (tmp_path / "broken").mkdir()
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    (tmp_path / "broken/sitecustomize.py").write_text(f"import os\nif 'LOCAL_WORLD_SIZE' in os.environ:\n{lines}")
    monkeypatch.syspath_prepend(tmp_path / "broken")


# On one rank, in this process


def run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `verify` run its one rank here, so that what a test has changed holds there, too."""

    def run(recipe: Recipe, _launch: Any, steps: int, folder: Path, _seconds: float) -> ShardedRun:
        return ranks._merge_results([_run_sharded(recipe, steps, folder)], load_file(folder / "weights.safetensors"))

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)  # what another test left behind
    monkeypatch.setattr("toolkit.verify.run_ranks", run)


def twice_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Divergence.compare

    def compare(self: Divergence, *given: Any) -> Any:
        return right(dataclasses.replace(self, temperature=self.temperature**2), *given)

    monkeypatch.setattr(Divergence, "compare", compare)


def shifted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Seq2Seq.decoder_inputs

    def again(self: Seq2Seq, labels: torch.Tensor) -> torch.Tensor:
        once = right(self, labels)
        return torch.cat([once[:, :1], once[:, :-1]], dim=1)  # whatever is padded behind

    monkeypatch.setattr(Seq2Seq, "decoder_inputs", again)


def mixed_up_images(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ImageSamples.batch

    def mixed_up(self: ImageSamples, numbers: Any, seen: Any = None) -> Any:
        batch = right(self, numbers, seen)
        if seen is not None:  # a check before the first step
            return batch
        return {**batch, "picture/pixel_values": batch["picture/pixel_values"].flip(0)}

    monkeypatch.setattr(ImageSamples, "batch", mixed_up)


def wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last scale of each matrix is that of the block before, and the adapters' products are scaled wrong."""
    in_4_bits, add = quantised._in_4_bits, load.add_adapter

    def shifted(flat: torch.Tensor) -> Any:
        weight, absmax = in_4_bits(flat)
        absmax[-1] = absmax[-2]
        return weight, absmax

    def scaled(model: Any, section: Any, *given: Any) -> Any:
        return add(model, section.model_copy(update={"alpha": 9}), *given)

    monkeypatch.setattr(quantised, "_in_4_bits", shifted)
    monkeypatch.setattr(load, "add_adapter", scaled)


def drawn_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks draw for the prompts in another order, and count the tokens of a completion twice."""
    right = RunSampler.__call__
    monkeypatch.setattr(RunSampler, "__call__", lambda self, prompts: right(self, prompts[::-1]))
    weights = grpo.token_weights
    monkeypatch.setattr(grpo, "token_weights", lambda *given: 2 * weights(*given))


@pytest.mark.parametrize(
    ("name", "spoil", "wrong"),
    [
        ("grpo", drawn_for_others, {"samples", "gradient norm"}),
        ("distillation", twice_the_temperature, {"loss", "gradients"}),
        ("seq2seq", shifted_twice, {"loss", "gradients"}),
        ("taught images", twice_the_temperature, {"loss", "gradients"}),
        ("images", mixed_up_images, {"gradient norm", "weights"}),
        ("qlora", wrong_scales, {"frozen weights", "gradients", "gradient norm"}),
    ],
)
def test_a_right_run_passes_and_a_wrong_one_fails(
    name: str, spoil: Spoil, wrong: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_this_process(monkeypatch)
    report = report_of(folder, name, steps=3 if name == "images" else 2)
    assert report.verdict == OK, report
    rows = {row.check: row for row in report.rows}
    if name == "images":
        assert "the model leaves out" in rows["gradients"].note, "the last layer of the tower"
    if name == "qlora":
        assert rows["frozen weights"].found == 0.0, "they are bitsandbytes' own of whole matrices, to the last bit"
        assert "nf4, double quantisation" in str(report.facts)
    spoil(monkeypatch)
    assert failed(report_of(folder, name, steps=1 if name == "images" else 2)) >= wrong


def test_documents_in_a_bf16_run_under_ddp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_this_process(monkeypatch)
    values = with_sections(values_of(folder, "text"), {"training": {"mixed_precision": "bf16"}})
    report = verify(Recipe.from_mapping(values), folder / "ddp-1.yaml", steps=2)
    assert report.verdict == OK, report
    assert report.facts["precision"] == "bf16"
    rows = {row.check: row for row in report.rows}
    assert rows["loss"].tolerance == 2e-2
    assert rows["gradient norm"].found > 1e-5, "16 bits were really computed in"


# On ranks that a launcher starts


def test_the_command_passes_on_two_ranks_that_spread_experts(folder: Path) -> None:
    done = subprocess.run(
        [TOOLKIT, "verify", "spread.yaml", "--config", "zero3-2.yaml", "--json", "--steps", "3"],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment(COLUMNS="200"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == OK
    assert [row["check"] for row in told["rows"]] == [*CHECKS, "expert load", "balance loss"]
    assert {row["verdict"] for row in told["rows"]} == {OK}
    assert all(row["found"] <= row["tolerance"] for row in told["rows"] if row["tolerance"] is not None)
    assert (told["facts"]["compared"], told["facts"]["ranks"]) == ("3 optimizer steps", "2 on cpu")
    assert "zero3" in told["facts"]["strategy"]


def test_a_run_that_is_wrong_on_one_rank_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 trains on doubled losses, and one norm is never trained at all."""
    break_ranks(
        "from toolkit.objectives.causal_lm import CausalLM\n"
        "from toolkit.model import load\n"
        "whole, loss_sum = load._without_weights, CausalLM.loss_sum\n"
        "scale = 1 + int(os.environ['RANK'])\n"
        "CausalLM.loss_sum = lambda self, *given: loss_sum(self, *given) * scale\n"
        "def deaf(*given):\n"
        "    model = whole(*given)\n"
        "    norm = model.model.norm\n"
        "    forward = norm.forward\n"
        "    norm.forward = lambda x: (forward(x) / norm.weight.detach() * 1.0).detach() * 0 + x\n"
        "    return model\n"
        "load._without_weights = deaf\n",
        tmp_path,
        monkeypatch,
    )
    report = report_of(folder, "text", "zero3-2", steps=2)
    assert report.verdict == FAILED
    assert failed(report) == {"loss", "gradient norm", "weights", "gradients"}
    assert {row.check: row for row in report.rows}["gradients"].note == "no gradient in any step: model.norm.weight"


def test_a_rank_that_dies_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_ranks(
        "import signal, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('no memory left', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        tmp_path,
        monkeypatch,
    )
    with pytest.raises(ToolkitError, match="rank 1 was ended by SIGKILL") as found:
        report_of(folder, "text", "zero3-2", steps=1)
    assert "no memory left" in str(found.value)
    assert found.value.exit_code == 1


def test_ranks_that_hang_are_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_ranks(f"import time\nopen(r'{tmp_path}/' + str(os.getpid()), 'w')\ntime.sleep(600)\n", tmp_path, monkeypatch)
    with pytest.raises(ToolkitError, match="rank 0, 1: not done in 2 s"):
        report_of(folder, "text", "zero3-2", steps=1, time_limit_seconds=2)
    started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(
            (name, "zero3-2")
            for name in ("text", "distillation", "seq2seq", "packed images", "packed tiles", "experts")
        ),
        *((name, "zero3-2") for name in ("qlora", "adapters of spread experts")),
        *((name, "ddp-2") for name in ("lora", "int8", "dora")),
        *((f"grpo, {reference}", "ddp-2") for reference in ("lora and a reference", "a frozen reference")),
    ],
)
def test_right_runs_pass_on_two_ranks(name: str, config: str, folder: Path) -> None:
    report = report_of(folder, name, config, steps=3)
    assert report.verdict == OK, report


WRONG_EXPERTS = {
    # The balance loss's gradient is a tenth too large, and rank 1 counts no choices.
    "experts": (
        {"expert load", "balance loss", "gradients"},
        "from toolkit.objectives.losses import balance\n"
        "gradient, exchange = balance.Balance.gradient, balance.Balance._exchange\n"
        "balance.Balance.gradient = lambda self, *given: 1.1 * gradient(self, *given)\n"
        "def deaf(self):\n"
        "    self._mine = {n: found * (os.environ['RANK'] == '0') for n, found in self._mine.items()}\n"
        "    exchange(self)\n"
        "balance.Balance._exchange = deaf\n",
    ),
    # A gradient is divided by the ranks that hold the expert, and not by all of them.
    "spread experts": (
        {"gradient norm", "gradients"},
        "from toolkit.sharding import apply\n"
        "hold = apply.wrap_as_dtensor\n"
        "def by_row(module, *given):\n"
        "    hold(module, *given)\n"
        "    module.set_gradient_divide_factor(1)\n"
        "apply.wrap_as_dtensor = by_row\n",
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", WRONG_EXPERTS)
def test_mixtures_of_experts_that_are_wrong_fail(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, code = WRONG_EXPERTS[name]
    break_ranks(code, tmp_path, monkeypatch)
    assert failed(report_of(folder, name, "zero3-2", steps=2)) >= wrong


# What the command says


def test_bad_input(folder: Path, main: Main) -> None:
    hybrid = str(folder / "hybrid-2.yaml")
    for arguments, message in (
        (["--steps", "0"], "--steps: found 0"),
        (["--layers", "2"], "--layers: gone since 0.3.0; set model.name_or_path to a smaller model"),
        (["--config", "nowhere.yaml"], "--config: there is no file 'nowhere.yaml'"),
        (["--config", hybrid], f"--config: {hybrid}: strategy hybrid needs equal groups"),
        (["training.max_step=3"], "did you mean 'max_steps'"),
    ):
        code, _, told = main(str(folder / "recipe.yaml"), *arguments)
        assert (code, message in told) == (2, True), (arguments, told)


def test_a_failed_check_is_exit_code_1(folder: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("loss", 0.25, 1e-6, FAILED, "[at] step 3"), Row("weights", None, None, OK)]
    monkeypatch.setattr("toolkit.verify.verify", lambda *_, **__: Report({"ranks": "2 on cpu"}, rows))
    code, table, _ = main(str(folder / "recipe.yaml"))
    assert code == 1
    assert "ranks: 2 on cpu" in table
    assert [line.split() for line in table.splitlines() if line.startswith("loss")] == [
        ["loss", "2.5e-01", "1.0e-06", "FAILED", "[at]", "step", "3"]
    ]
    assert table.endswith("verdict: FAILED\n")
    code, text, _ = main(str(folder / "recipe.yaml"), "--json")
    assert code == 1
    assert json.loads(text)["rows"][0]["verdict"] == FAILED
