"""sentence-transformers#3773: since transformers 5 a checkpoint in bf16 is trained in bf16, and small updates are lost.

`from_pretrained` keeps the checkpoint's type, and `Trainer` trains what it gets. AdamW's step at a rate of 2e-5 is less
than half the distance between two numbers of bf16 for most weights, so they stay. Thirty steps of eight rows on two
ranks: the loss of the last step next to that of the same weights held in float32.
"""

from __future__ import annotations

import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

ROWS = [[*row, END] for row in unequal_rows(8)]
STEPS, RATE, MAX_NORM = 30, 2e-5, 1.0


def peer(model: str, folder: str) -> float:
    asked = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=RATE,
        lr_scheduler_type="constant", max_grad_norm=MAX_NORM,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    collator = DataCollatorForSeq2Seq(tokenizer())
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(model), asked, train_dataset=rows, data_collator=collator)
    trainer.train()
    return float(trainer.state.log_history[STEPS - 1]["loss"])


def right(model: LlamaForCausalLM) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in ROWS]
        loss = torch.stack(losses).sum() / sum(len(row) - 1 for row in ROWS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        saved = save(LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16(), f"{folder}/model")
        recipe = {"model": {"name_or_path": saved}, "schedule": {"kind": "constant"}}
        recipe["data"] = {"train": [{"text": text(row[:-1])} for row in ROWS], "packing": False}
        recipe["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0}
        recipe["training"] = {"max_steps": STEPS, "micro_batch_size": 4, "max_grad_norm": MAX_NORM}
        recipe["logging"] = {"every_steps": 1}
        records = run_recipe(recipe, folder)
        exact = right(LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32).train())
        show("loss", peer=on_ranks(peer, saved, folder), ours=records[-1]["loss"], right=exact)


if __name__ == "__main__":
    main()
