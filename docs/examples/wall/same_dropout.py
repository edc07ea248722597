"""transformers#31412: all ranks draw the same dropout, since `Trainer` gives each the same seed.

`set_seed` is called with one seed on all ranks, and nothing afterwards tells them apart. The noise of dropout is to be
drawn anew for each row; here it is the same on every rank, and is not averaged out by more of them. A step of two
ranks: how many masks the first dropout layer of GPT-2 draws.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import END, on_ranks, run_recipe, save, show, text, unequal_rows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SPECIAL = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, embd_pdrop=0.5, **SPECIAL)
ROWS = [[*unequal_rows(1)[0], END]] * 2


def note(path: str) -> None:
    """Writes down which elements the first dropout of a training step leaves out on this rank."""

    def on_forward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        file = Path(f"{path}-{os.environ['RANK']}")
        if type(module) is torch.nn.Dropout and type(output) is torch.Tensor and module.training and not file.exists():
            file.write_bytes(hashlib.sha256((output == 0).numpy().tobytes()).digest())

    torch.nn.modules.module.register_module_forward_hook(on_forward)


def peer(model: str, folder: str) -> None:
    note(f"{folder}/peer-mask")
    asked = TrainingArguments(
        folder, use_cpu=True, max_steps=1, per_device_train_batch_size=1, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    Trainer(GPT2LMHeadModel.from_pretrained(model), asked, train_dataset=rows).train()


def masks(path: str) -> int:
    return len({file.read_bytes() for file in Path(path).parent.glob(f"{Path(path).name}-*")})


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = save(GPT2LMHeadModel(CONFIG), f"{folder}/model")
        on_ranks(peer, model, folder)
        recipe = {"model": {"name_or_path": model}, "data": {"packing": False}}
        recipe["data"]["train"] = [{"text": text(row[:-1])} for row in ROWS]
        run_recipe(recipe, folder, before=(note, f"{folder}/our-mask"))
        found = {name: masks(f"{folder}/{name}-mask") for name in ("peer", "our")}
        show("masks of two ranks", peer=found["peer"], ours=found["our"], right=2)


if __name__ == "__main__":
    main()
