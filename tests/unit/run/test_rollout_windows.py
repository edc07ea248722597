"""What a step of samples draws and learns, with a stand-in for the model that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import write_rows
from support.tiny import llama, recipe_values, save_llama, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.data import build
from toolkit.data.samples.loader import TrainLoader
from toolkit.errors import BadInputError
from toolkit.generation.sampling.fresh import FreshSample
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.rollouts import Rollouts, _require_no_dropout


def rollouts(folder: Path, drawn: list[tuple[int, int]], **objective: Any) -> Rollouts:
    """Of three prompts; each second completion is cut. `drawn` gets the row and the number of each."""
    texts = ["the king", "a fox by the river", "bread"]
    save_llama(folder / "model", texts, tied=True)
    write_rows(folder / "rows.jsonl", ({"prompt": text} for text in texts))
    split: dict[str, Any] = {"micro_batch_size": 3, "gradient_accumulation_steps": 2}
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "out", folder / "cache", **split)
    of_samples = {"rewards": [{"name": "r", "match": "x"}], "group_size": 2, "max_new_tokens": 2, **objective}
    recipe = Recipe.from_mapping({**values, "objective": {"kind": "grpo", **of_samples}})
    tokens = AutoTokenizer.from_pretrained(folder / "model")
    data = build.build(recipe.data, tokens, 0, recipe.objective)
    loader = TrainLoader(data.train, num_positions=6, rank=0, world_size=1, seed=0, shuffle=False, **split)

    def sample(prompts: Any) -> list[FreshSample]:
        drawn.extend((prompt.row, prompt.k) for prompt in prompts)
        return [FreshSample([7, 8], [-1.0, -2.0], stopped=i % 2 == 0) for i in range(len(prompts))]

    return Rollouts(recipe, data, loader, tokens, sample, torch.device("cpu"), lambda _: None, lambda: None)


@pytest.mark.parametrize(("left_out", "expected"), [("nothing", [2, 2]), ("cut", [2, 0]), ("abstained", [0, 2])])
def test_each_prompt_is_drawn_once_for_each_of_its_group_and_cut_completions_may_teach_nothing(
    left_out: str, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("N = iter(range(6))\ndef score(text, row):\n    return next(N) % 2 or None\n")
    abstains = {"rewards": [{"name": "r", "compare": f"{tmp_path}/mine.py:score"}]} if left_out == "abstained" else {}
    drawn: list[tuple[int, int]] = []
    run = rollouts(tmp_path, drawn, mask_truncated=left_out == "cut", **abstains)
    [window] = run
    assert drawn == [(number, k) for number in range(3) for k in range(2)]
    learned = [int((batch["labels"][batch["segments"] == i] != -100).sum()) for batch in window for i in range(3)]
    assert learned == expected * 3
    assert run.figures.get("abstained") == (0.5 if abstains else None)


def test_dropout_is_refused_by_name() -> None:
    """Also where a function drops values, and no module does."""
    _require_no_dropout(llama())
    with pytest.raises(BadInputError, match=r"model\.name_or_path: attention_dropout of config\.json drops values in"):
        _require_no_dropout(llama(attention_dropout=0.1))
    with pytest.raises(BadInputError, match=r": resid_pdrop, embd_pdrop, attn_pdrop, .* of config\.json drops"):
        _require_no_dropout(AutoModelForCausalLM.from_config(tiny_config("gpt2")))
