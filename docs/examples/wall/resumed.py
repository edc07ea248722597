"""transformers#22580: a run that goes on with another number of ranks trains on rows twice.

`Trainer` skips as many batches as steps were done, whatever the size of a batch was then. An epoch of 16 rows: four
steps by two ranks with a row each, stopped, and the rest by one rank. Counted are the rows that were learned twice.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

ROWS = [[first, 40, END] for first in range(2, 18)]


def note(path: str, stop_at: int | None) -> None:
    """Adds the first token of each row that this rank trains on to a file; asks for a stop with the `stop_at`-th."""

    def on_forward(module: Any, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            with Path(f"{path}-{os.environ['RANK']}").open("a+") as file:
                file.write(f"{int(inputs[0][0, 0])}\n")
                file.seek(0)
                if len(file.readlines()) == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

    torch.nn.modules.module.register_module_forward_pre_hook(on_forward)


def twice(path: str) -> int:
    files = Path(path).parent.glob(f"{Path(path).name}-*")
    seen = Counter(line for file in files for line in file.read_text().split())
    return sum(count > 1 for count in seen.values())


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == 4


def peer(model: str, folder: str, resume: bool) -> None:
    note(f"{folder}/peer-rows", None)
    asked = TrainingArguments(
        f"{folder}/peer", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=1, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    callbacks = [] if resume else [Stop()]
    trainer = Trainer(LlamaForCausalLM.from_pretrained(model), asked, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = save(LlamaForCausalLM(LlamaConfig(**SIZES)), f"{folder}/model")
        for ranks, resume in ((2, False), (1, True)):
            on_ranks(peer, model, folder, resume, count=ranks)
        recipe = {"model": {"name_or_path": model}, "training": {"max_steps": None, "num_epochs": 1}}
        recipe["data"] = {"train": [{"text": text(row[:-1])} for row in ROWS], "packing": False, "shuffle": True}
        run_recipe(recipe, folder, before=(note, f"{folder}/our-rows", 4))
        run_recipe(recipe, folder, ranks=1, before=(note, f"{folder}/our-rows", None))
        found = {name: twice(f"{folder}/{name}-rows") for name in ("peer", "our")}
        show("rows twice", peer=found["peer"], ours=found["our"], right=0)


if __name__ == "__main__":
    main()
