"""The examples in docs/examples, as a user starts them: sharded as in DDP, resumed as if never stopped, exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from support.launches import clean_environment, launch
from support.ranks import LIMIT_SECONDS, meet, run_on_ranks
from support.tiny import save_llama
from transformers import AutoModelForCausalLM

from toolkit.errors import BadInputError

ROOT = Path(__file__).parents[2]
LAUNCH = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file"]
STEPS = 20
CHECKPOINTS = {"accelerate_loop": "step_10", "trainer": "checkpoint-10", "sft_trainer": "checkpoint-10"}


def write_config(strategy: str, folder: Path) -> Path:
    config = yaml.safe_load((ROOT / "accelerate_configs/cpu_2.yaml").read_text())
    config["fsdp_config"]["fsdp_sharding_strategy"] = strategy
    path = folder / f"{strategy}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def told(output: str) -> dict[str, Any]:
    """The example's last line, which tells its losses."""
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))  # type: ignore[no-any-return]


def start(example: str, strategy: str, output: Path) -> dict[str, Any]:
    """As a user starts it, each rank with an interpreter of its own."""
    config = write_config(strategy, output.parent)
    command = [f"docs/examples/{example}.py", "--to", str(output), "--steps", str(STEPS)]
    done = subprocess.run(
        [*LAUNCH, str(config), *command],
        cwd=ROOT,
        env=clean_environment(OMP_NUM_THREADS="1"),
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return told(done.stdout)


def run(example: str, strategy: str, output: Path, *flags: str) -> dict[str, Any]:
    config = write_config(strategy, output.parent)
    script = ROOT / f"docs/examples/{example}.py"
    return told(launch(config, script, "--to", str(output), "--steps", str(STEPS), *flags, folder=ROOT))


def plain_evaluation(folder: Path) -> float:
    """Mean loss of the export over the 17 held-out rows of bytes, on one process."""
    play = json.loads((ROOT / "recipes/data/plays.jsonl").read_text().splitlines()[0])["text"]
    rows = torch.tensor(list(play.encode()[: 257 * 64])).view(257, 64)[240:]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=rows).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.parametrize("example", ["accelerate_loop", pytest.param("trainer", marks=pytest.mark.grid), "sft_trainer"])
def test_an_example_trains_resumes_and_exports(example: str, tmp_path: Path) -> None:
    first = start if example == "accelerate_loop" else run  # one of them is enough for what a real start adds
    sharded = first(example, "zero3", tmp_path / "zero3")
    replicated = run(example, "ddp", tmp_path / "ddp")
    assert "FSDP" in sharded["type"]
    assert "MULTI_CPU" in replicated["type"]
    assert len(sharded["losses"]) == STEPS
    assert sharded["losses"][-1] < 0.8 * sharded["losses"][0]
    assert sharded["losses"] == pytest.approx(replicated["losses"], rel=1e-6)
    assert sharded["eval_loss"] == pytest.approx(replicated["eval_loss"], rel=1e-6)

    checkpoint = tmp_path / "zero3" / CHECKPOINTS[example]
    resumed = run(example, "zero3", tmp_path / "resumed", "--resume", str(checkpoint))
    assert resumed["losses"][-10:] == sharded["losses"][10:]
    assert resumed["eval_loss"] == sharded["eval_loss"]

    if example != "accelerate_loop":  # test_offload_features.py has such a loop
        # The same checkpoint, optimizer state offloaded from there on; its AdamW is fused, the example's is not.
        offloaded = run(example, "zero3+offload", tmp_path / "offloaded", "--resume", str(checkpoint))
        assert offloaded["losses"][-10:] == pytest.approx(sharded["losses"][10:], rel=1e-5)
        assert offloaded["eval_loss"] == pytest.approx(sharded["eval_loss"], rel=1e-5)

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "zero3/export").num_parameters() > 0
    if example == "accelerate_loop":
        assert plain_evaluation(tmp_path / "zero3/export") == pytest.approx(sharded["eval_loss"], rel=1e-5)
    if example == "trainer":  # Trainer weighs the rows of an uneven last batch otherwise
        assert plain_evaluation(tmp_path / "zero3/export") == pytest.approx(sharded["eval_loss"], rel=1e-2)


def test_the_hand_written_loop_is_short() -> None:
    lines = (ROOT / "docs/examples/accelerate_loop.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def train"))
    last = next(i for i, line in enumerate(lines) if line.startswith("if __name__"))
    code = [line for line in lines[first:last] if line.strip() and not line.strip().startswith("#")]
    assert len(code) < 40


def split_by_transformers(folder: str) -> dict[str, str]:
    """The error of each way to give a model that transformers has split over the ranks to the backend."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    from toolkit import ShardingMesh, ShardingPlugin, sharding_kwargs
    from toolkit.sharding.plugin import reset_accelerate

    def own_loop(model: Any, strategy: str) -> None:
        Accelerator(**sharding_kwargs(strategy)).prepare(model, torch.optim.AdamW(model.parameters()))

    def trainer(model: Any, strategy: str) -> None:
        mesh = ShardingMesh(plugin=ShardingPlugin(strategy))
        arguments = TrainingArguments(
            folder, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", parallelism_config=mesh
        )
        rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
        Trainer(model=model, args=arguments, train_dataset=rows).train()

    found = {}
    for size in ("tp_size", "fsdp_size", "pp_size"):
        for start in (own_loop, trainer) if size != "pp_size" else (own_loop,):
            for strategy in ("zero3", "ddp"):
                meet()
                reset_accelerate()
                config = DistributedConfig(**{size: 2})
                model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
                try:
                    start(model, strategy)
                    found[f"{size} {start.__name__} {strategy}"] = "no error"
                except BadInputError as error:
                    found[f"{size} {start.__name__} {strategy}"] = str(error)
    return found


def test_a_model_that_transformers_has_split_is_refused_by_name(tmp_path: Path) -> None:
    save_llama(tmp_path, ["hello world"] * 20, tied=False)
    found = run_on_ranks(split_by_transformers, 2, str(tmp_path))[0]
    assert len(found) == 10
    by_size = "tp_size of ShardingMesh, or of the model's DistributedConfig, is 2, but"
    wanted = {case: by_size if case.startswith("tp_size trainer") else "the model is split over" for case in found}
    assert {case: text for case, text in found.items() if not text.startswith(wanted[case])} == {}
