"""Others' trainers, sharded on 2 ranks: they take the steps of one process and of stock DDP, resume, and export.

The trainers are those of docs/examples/more_trainers.py and embeddings.py. Where a trainer's rows depend on the ranks
(each samples completions with a seed of its own), settings that leave nothing to chance are compared with one process,
and its own settings with stock Accelerate's DDP on as many ranks.
"""

from __future__ import annotations

import gc
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.launches import launch
from support.ranks import meet, run_on_ranks

ROOT = Path(__file__).parents[2]
NAMES = ("reward", "seq2seq", "dpo", "kto", "grpo", "distillation", "embeddings")
STEPS, SAVED = 6, 4
WITHOUT_CHANCE: dict[str, dict[str, Any]] = {
    "kto": {"loss_type": "apo_zero_unpaired"},  # `kto` takes its KL over pairs mixed within a micro-batch
    "distillation": {"top_k": 1},
}
ENDS_EARLY = {"generation_kwargs": {"eos_token_id": list(range(3, 160))}}
"""Three tokens of five end a completion, so that the rows of one rank have ended before the other's."""


def made_completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """In place of `generate`: four completions of different lengths for each prompt, the same on any ranks."""
    texts = [(str(row % 4) + "+" * (row % 4)) * (1 + row % 3) for row in [number % 4 for number in range(len(prompts))]]
    encode = trainer.processing_class
    completions = [encode(text)["input_ids"] for text in texts]
    return {"prompt_ids": [encode(prompt)["input_ids"] for prompt in prompts], "completion_ids": completions} | {
        "logprobs": None
    }


def job(name: str, strategy: str | None, folder: Path, **given: Any) -> dict[str, Any]:
    return {"name": name, "strategy": strategy, "output": str(folder / f"{name}-{strategy}"), **given}


def run(
    name: str,
    strategy: str | None,
    output: str,
    rows: int = 4,
    resume: str | None = None,
    exports: bool = False,
    without_chance: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """What the example tells; its last step is saved by nobody, as the checkpoint before it is resumed from."""
    from toolkit import ShardingMesh, ShardingPlugin

    example = runpy.run_path(
        str(ROOT / f"docs/examples/{'embeddings' if name == 'embeddings' else 'more_trainers'}.py")
    )
    gc.collect()  # of the offload engine there is one at a time
    meet()
    plugin = ShardingPlugin(strategy) if strategy is not None else None
    mesh = ShardingMesh(plugin=plugin) if plugin is not None else None
    named = () if name == "embeddings" else (name,)
    settings = {
        "disable_tqdm": True,
        "save_steps": SAVED,
        **(WITHOUT_CHANCE.get(name, {}) if without_chance else {}),
        **settings,
    }
    trainer = example["make"](*named, output, STEPS, mesh, rows, **settings)
    if name == "grpo" and without_chance:
        trainer.rollout_func = made_completions
    told = example["train"](trainer, resume)
    if exports:
        example["export"](trainer, f"{output}/export")
    if plugin is not None:
        assert (plugin.engine is not None) == strategy.endswith("+offload")  # type: ignore[union-attr]
        plugin.close()
    return told  # type: ignore[no-any-return]


def runs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**given) for given in jobs]


def on_ranks(num_ranks: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first rank tells; the others tell the same."""
    first, *others = run_on_ranks(runs, num_ranks, jobs)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def assert_close(found: dict[str, Any], wanted: dict[str, Any], name: str) -> None:
    assert "FSDP" in found["type"]
    for key in ("loss", "grad_norm"):
        assert len(wanted[key]) == STEPS
        # 1e-6: GRPO's loss is 0 at first, and its gradient is not.
        assert found[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-6), (name, key)


@pytest.mark.grid
def test_trainers_take_the_steps_of_one_process(tmp_path: Path) -> None:
    plain = on_ranks(1, [job(name, None, tmp_path, rows=8, without_chance=True, save_strategy="no") for name in NAMES])
    sharded = on_ranks(2, [job(n, "zero3", tmp_path, without_chance=True, save_strategy="no") for n in NAMES])
    for name, wanted, found in zip(NAMES, plain, sharded, strict=True):
        assert_close(found, wanted, name)


def test_trainers_take_the_steps_of_ddp_and_resume(tmp_path: Path) -> None:
    sampling = ("kto", "grpo", "distillation")
    early = {"grpo": ENDS_EARLY, "distillation": ENDS_EARLY}
    stock = [job(name, None, tmp_path, save_strategy="no", **early.get(name, {})) for name in sampling]
    sharded = [job(name, "zero3", tmp_path, **early.get(name, {})) for name in NAMES]
    resumed = [{**given, "resume": f"{given['output']}/checkpoint-{SAVED}"} for given in sharded]
    told = on_ranks(2, [*stock, *sharded, *resumed])
    found = dict(zip(NAMES, told[len(stock) :], strict=False))
    again = dict(zip(NAMES, told[len(stock) + len(sharded) :], strict=True))
    for name, wanted in zip(sampling, told, strict=False):
        assert_close(found[name], wanted, name)
    assert max(map(abs, found["grpo"]["loss"])) > 1e-3
    for name in NAMES:
        assert again[name] == found[name], name


@pytest.mark.grid
def test_offloaded_trainers_take_the_steps_of_ddp_resume_and_export(tmp_path: Path) -> None:
    stock = [job(name, None, tmp_path, exports=True, save_strategy="no") for name in NAMES]
    kinds = ("zero3", "zero3+offload")
    sharded = [job(name, kind, tmp_path, exports=True) for kind in kinds for name in NAMES]
    resumed = [{**given, "resume": f"{given['output']}/checkpoint-{SAVED}"} for given in sharded]
    told = on_ranks(2, [*stock, *sharded, *resumed])
    wanted, found, again = told[:7], told[7:21], told[21:]
    assert again == found
    for number, (given, steps) in enumerate(zip(sharded, found, strict=True)):
        name = given["name"]
        assert_close(steps, wanted[number % 7], name)
        exported, plain = (load_file(f"{job['output']}/export/model.safetensors") for job in (given, stock[number % 7]))
        for key in plain:  # FSDP's state names the tied weights of T5 as well
            torch.testing.assert_close(exported[key], plain[key], rtol=1e-4, atol=1e-5, msg=f"{given['output']}: {key}")
        assert load(name, f"{given['output']}/export") > 0


def load(name: str, folder: str) -> int:
    """Parameters of an export, loaded as its users do."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    if name == "embeddings":
        model = SentenceTransformer(folder, device="cpu")
        assert model.encode(["1 + 1"]).shape == (1, 64)
        return sum(parameter.numel() for parameter in model.parameters())
    kinds = {"reward": AutoModelForSequenceClassification, "seq2seq": AutoModelForSeq2SeqLM}
    model, told = kinds.get(name, AutoModelForCausalLM).from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    return int(model.num_parameters())


@pytest.mark.parametrize(("example", "words"), [("more_trainers", ["dpo"]), ("embeddings", [])])
def test_an_example_runs_as_it_is_started(example: str, words: list[str], tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs/cpu_2.yaml").read_text())
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    script = ROOT / f"docs/examples/{example}.py"
    output = launch(path, script, *words, "--to", str(tmp_path / "out"), "--steps", "5", folder=ROOT)
    told = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    assert "FSDP" in told["type"]
    assert len(told["loss"]) == 5
    assert load(words[0] if words else example, str(tmp_path / "out/export")) > 0
