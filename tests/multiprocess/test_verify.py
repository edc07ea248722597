"""`toolkit verify` for real: right runs pass, runs made wrong on a rank are told, nothing is left behind."""

from __future__ import annotations

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
import yaml
from support.launches import clean_environment
from support.moe import mixture
from support.ranks import LIMIT_SECONDS
from support.tiny import recipe_values, save_llama

from toolkit.cli import app as cli
from toolkit.errors import ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.verify import FAILED, NOT_USED, OK, Report, Row, verify

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
Main = Callable[..., tuple[int, str, str]]
CHECKS = ["loss", "gradient norm", "weights", "gradients", "dropout replay", "packing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A Llama of three blocks, its recipe, and a config of two CPU ranks for every strategy used."""
    folder = tmp_path_factory.mktemp("verify")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    save_llama(folder / "model", texts, tied=True, layers=3)
    training = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    values = recipe_values(folder / "model", text_file, folder / "out", folder / "cache", **training)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    for strategy in ("zero3", "ddp", "hybrid"):
        config = {
            "distributed_type": "FSDP",
            "use_cpu": True,
            "num_processes": 2,
            "mixed_precision": "no",
            "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": strategy},
        }
        (folder / f"{strategy}.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(autouse=True)
def temporary(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Temporary folders go where they can be seen to be gone, and no output folder is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("toolkit-verify-*"))
    assert not (folder / "out").exists()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLKIT, "verify", *arguments],
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment(COLUMNS="200"),
    )


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


def here(folder: Path, strategy: str = "zero3", *overrides: str, **settings: Any) -> Report:
    return verify(Recipe.load(folder / "recipe.yaml", overrides), folder / f"{strategy}.yaml", **settings)


def break_ranks(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `code` at the start of every rank, before anything else."""
    (tmp_path / "broken").mkdir()
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    (tmp_path / "broken/sitecustomize.py").write_text(f"import os\nif 'LOCAL_WORLD_SIZE' in os.environ:\n{lines}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)


@pytest.mark.parametrize("sequence", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_the_command_passes_on_two_ranks(sequence: int, folder: Path) -> None:
    done = command(
        *("--recipe", str(folder / "recipe.yaml"), "--config", str(folder / "zero3.yaml"), "--json"),
        *("--steps", "4", "sharding.activation_checkpointing=1", f"sharding.sequence={sequence}"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == OK
    assert [row["check"] for row in told["rows"]] == CHECKS
    assert {row["verdict"] for row in told["rows"]} == {OK}
    assert all(row["found"] <= row["tolerance"] for row in told["rows"] if row["tolerance"] is not None)
    assert told["facts"]["compared"] == "4 optimizer steps"
    assert told["facts"]["ranks"] == "2 on cpu"
    assert "zero3" in told["facts"]["strategy"]
    assert "3 blocks checkpointed" in told["rows"][4]["note"]


def test_a_model_cut_to_its_first_blocks(folder: Path, tmp_path: Path) -> None:
    """A configuration alone, whose blocks get random weights; DDP; documents in a bf16 run."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_text((folder / "model" / name).read_text())
    report = here(folder, "ddp", f"model.name_or_path={bare}", "training.mixed_precision=bf16", layers=2, steps=2)
    assert report.verdict == OK, report
    assert report.facts["weights"] == f"random: {bare} holds no weights that fit its first 2 blocks"
    assert report.facts["precision"] == "bf16"
    rows = {row.check: row for row in report.rows}
    assert rows["loss"].tolerance == 2e-2
    assert rows["gradient norm"].found > 1e-5, "16 bits were really computed in"
    assert rows["dropout replay"].verdict == NOT_USED
    assert len(list(bare.iterdir())) == 3, "nothing is written into the model's folder"


def test_a_run_that_is_wrong_on_one_rank_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    report = here(folder, steps=2)
    assert report.verdict == FAILED
    rows = {row.check: row for row in report.rows}
    assert {check for check, row in rows.items() if row.verdict == FAILED} == {
        "loss",
        "gradient norm",
        "weights",
        "gradients",
    }
    assert rows["gradients"].note == "no gradient in any step: model.norm.weight"


QLORA = ["adapter.kind=lora", "adapter.r=4", "adapter.quantize=nf4", "adapter.double_quantization=true"]
DORA = ["adapter.use_dora=true", "adapter.use_rslora=true", "adapter.target_modules=[q_proj, down_proj]"]


def test_adapters_on_a_quantised_base_pass(folder: Path) -> None:
    report = here(folder, "zero3", *QLORA, *DORA, "sharding.offload=optimizer", steps=2)
    assert report.verdict == OK, report
    rows = {row.check: row for row in report.rows}
    assert rows["frozen weights"].found == 0.0, "they are bitsandbytes' own of whole matrices, to the last bit"
    assert "nf4, double quantisation" in str(report.facts)


@pytest.mark.grid
@pytest.mark.parametrize("adapter", [[], ["adapter.quantize=int8"], DORA])
def test_adapters_under_ddp_pass(adapter: list[str], folder: Path) -> None:
    report = here(folder, "ddp", "adapter.kind=lora", "adapter.r=4", *adapter, steps=3)
    assert report.verdict == OK, report


def test_adapters_that_are_wrong_are_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last scale of each matrix is that of the block before, and the adapters' products are scaled wrong."""
    break_ranks(
        "from toolkit.model import load; from toolkit.model.quantised import quantised\n"
        "in_4_bits, add = quantised._in_4_bits, load.add_adapter\n"
        "def shifted(flat):\n"
        "    weight, absmax = in_4_bits(flat)\n"
        "    absmax[-1] = absmax[-2]\n"
        "    return weight, absmax\n"
        "quantised._in_4_bits = shifted\n"
        "def scaled(model, section, *given):\n"
        "    return add(model, section.model_copy(update={'alpha': 9}), *given)\n"
        "load.add_adapter = scaled\n",
        tmp_path,
        monkeypatch,
    )
    report = here(folder, "zero3", *QLORA, steps=2)
    rows = {row.check: row.verdict for row in report.rows}
    assert rows["frozen weights"] == FAILED
    assert rows["gradients"] == FAILED
    assert rows["gradient norm"] == FAILED


@pytest.fixture(scope="module")
def experts(folder: Path) -> Path:
    """DeepSeek V3's routers, whose biases move; its recipe has all losses that a router can have."""
    path = folder / "experts"
    shutil.copytree(folder / "model", path)
    (path / "model.safetensors").unlink()
    vocabulary = json.loads((folder / "model/config.json").read_text())["vocab_size"]
    mixture("deepseek_v3", vocab_size=vocabulary, max_position_embeddings=128).save_pretrained(path)
    return path


def with_experts(folder: Path, experts: Path, *overrides: str) -> Report:
    losses = ["objective.router_aux_coef=0.1", "objective.router_z_coef=0.01", "objective.router_bias_rate=0.01"]
    shape = ["data.max_length=64", "training.micro_batch_size=1"]
    return here(folder, "zero3", f"model.name_or_path={experts}", *losses, *shape, *overrides, steps=2)


@pytest.mark.parametrize("spread", [pytest.param([], marks=pytest.mark.grid), ["sharding.experts=2"]])
def test_a_mixture_of_experts_passes(spread: list[str], folder: Path, experts: Path) -> None:
    report = with_experts(folder, experts, *spread)
    assert report.verdict == OK, report
    assert [row.check for row in report.rows] == [*CHECKS, "expert load", "balance loss"]


@pytest.mark.grid
def test_a_mixture_of_experts_that_is_wrong_is_told(
    folder: Path, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balance loss's gradient is a tenth too large, and rank 1 counts no choices."""
    break_ranks(
        "from toolkit.objectives.losses import balance\n"
        "gradient, exchange = balance.Balance.gradient, balance.Balance._exchange\n"
        "balance.Balance.gradient = lambda self, *given: 1.1 * gradient(self, *given)\n"
        "def deaf(self):\n"
        "    self._mine = {n: found * (os.environ['RANK'] == '0') for n, found in self._mine.items()}\n"
        "    exchange(self)\n"
        "balance.Balance._exchange = deaf\n",
        tmp_path,
        monkeypatch,
    )
    report = with_experts(folder, experts)
    rows = {row.check: row for row in report.rows}
    assert rows["expert load"].verdict == rows["balance loss"].verdict == rows["gradients"].verdict == FAILED


@pytest.mark.grid
def test_adapters_of_spread_experts_on_a_quantised_base_pass(folder: Path, experts: Path) -> None:
    report = with_experts(folder, experts, "sharding.experts=2", *QLORA, "objective.router_bias_rate=0")
    assert report.verdict == OK, report
    checks = [*CHECKS[:3], "frozen weights", *CHECKS[3:], "expert load", "balance loss"]
    assert [row.check for row in report.rows] == checks


@pytest.mark.grid
def test_a_gradient_of_spread_experts_that_is_wrong_is_told(
    folder: Path, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is divided by the ranks that hold the expert, and not by all of them."""
    break_ranks(
        "from toolkit.sharding import apply\n"
        "hold = apply.wrap_as_dtensor\n"
        "def by_row(module, *given):\n"
        "    hold(module, *given)\n"
        "    module.set_gradient_divide_factor(1)\n"
        "apply.wrap_as_dtensor = by_row\n",
        tmp_path,
        monkeypatch,
    )
    rows = {row.check: row for row in with_experts(folder, experts, "sharding.experts=2").rows}
    assert rows["gradients"].verdict == rows["gradient norm"].verdict == FAILED
    assert ".experts." in rows["gradients"].note


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
        here(folder, steps=1)
    assert "no memory left" in str(found.value)
    assert found.value.exit_code == 1


def test_ranks_that_hang_are_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_ranks(f"import time\nopen(r'{tmp_path}/' + str(os.getpid()), 'w')\ntime.sleep(600)\n", tmp_path, monkeypatch)
    with pytest.raises(ToolkitError, match="rank 0, 1: not done in 2 s"):
        here(folder, steps=1, time_limit_seconds=2)
    started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_hybrid_on_two_ranks_is_bad_input(folder: Path, main: Main) -> None:
    config = str(folder / "hybrid.yaml")
    code, _, told = main("--recipe", str(folder / "recipe.yaml"), "--config", config)
    assert code == 2
    assert f"--config: {config}: strategy hybrid needs equal groups" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: found 0"),
        (["--layers", "0"], "--layers: found 0"),
        (["--layers", "9"], "--layers: found 9, but the model has 3 blocks"),
        (["--config", "nowhere.yaml"], "--config: there is no file 'nowhere.yaml'"),
        (["training.max_step=3"], "did you mean 'max_steps'"),
    ],
)
def test_bad_input(arguments: list[str], message: str, folder: Path, main: Main) -> None:
    code, _, told = main("--recipe", str(folder / "recipe.yaml"), *arguments)
    assert code == 2
    assert message in told


def test_a_failed_check_is_exit_code_1(folder: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Report(
        {"ranks": "2 on cpu"}, [Row("loss", 0.25, 1e-6, FAILED, "[at] step 3"), Row("packing", None, None, OK)]
    )
    monkeypatch.setattr("toolkit.verify.verify", lambda *_, **__: failed)
    code, table, _ = main("--recipe", str(folder / "recipe.yaml"))
    assert code == 1
    assert "ranks: 2 on cpu" in table
    assert [line.split() for line in table.splitlines() if line.startswith("loss")] == [
        ["loss", "2.5e-01", "1.0e-06", "FAILED", "[at]", "step", "3"]
    ]
    assert table.endswith("verdict: FAILED\n")
    code, text, _ = main("--recipe", str(folder / "recipe.yaml"), "--json")
    assert code == 1
    assert json.loads(text)["rows"][0]["verdict"] == FAILED
