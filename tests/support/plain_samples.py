"""The plain loop on the samples that a recipe's rows are packed or padded into; each step has the next ones in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.plain_loop import in_turn, plain_loop
from toolkit.data import build
from toolkit.recipe.schema import DataSection

PER_STEP = 4


def run_on_samples(
    folder: Path, rows: DataSection, num_steps: int, adapt: Callable[[Any], Any] = lambda model: model
) -> dict[str, Any]:
    """Returns losses, norms and weights of a causal model, its held-out loss before and after, and the tokens seen.

    Args:
        folder: the model and its tokenizer.
        rows: all of them are learned from, and held out, too.
        adapt: adds adapters to the model.
    """
    data = build.build(rows, AutoTokenizer.from_pretrained(folder), 0).train
    model = adapt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).train()

    def loss_of(numbers: list[int]) -> torch.Tensor:
        batch = data.batch(numbers)
        logits = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def held_out() -> float:
        with torch.no_grad():
            return float(loss_of(list(range(len(data)))))

    before, steps = held_out(), in_turn(range(len(data)), PER_STEP, num_steps)
    found = plain_loop(model, steps, loss_of, decay=0.1)
    seen = sum(int(data.batch([number])["lengths"].sum()) for step in steps for number in step)
    ends = {"eval": [before, held_out()], "tokens": seen, "weights": found.weights}
    return {"loss": found.losses, "norm": found.norms, **ends}
