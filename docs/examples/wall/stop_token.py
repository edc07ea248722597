"""transformers#23530: where the end token also pads, the collator for language models never teaches it.

Llama, Mistral and GPT-2 have no padding token, and the guide for causal language models sets it to the end token;
SmolLM2 comes so. `DataCollatorForLanguageModeling` ignores every label that equals it. A small model learns eight
rows by heart, two ranks, 60 steps: the mean probability of the end token behind a row.
"""

from __future__ import annotations

import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS = [[*row, END] for row in unequal_rows(8, longest=6)]
STEPS, RATE = 60, 1e-2


def stops(model: LlamaForCausalLM) -> float:
    chances = [model(torch.tensor([row[:-1]])).logits[0, -1].softmax(-1)[END] for row in ROWS]
    return float(torch.stack(chances).mean())


def peer(model: str, folder: str) -> None:
    asked = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=RATE,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row} for row in ROWS]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = Trainer(LlamaForCausalLM.from_pretrained(model), asked, train_dataset=rows, data_collator=collator)
    trainer.train()
    trainer.save_model(f"{folder}/peer")


def right(model: LlamaForCausalLM) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in ROWS]
        (torch.stack(losses).sum() / sum(len(row) - 1 for row in ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stops(model)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with tempfile.TemporaryDirectory() as folder:
        recipe = {"model": {"name_or_path": save(model, f"{folder}/model")}, "schedule": {"kind": "constant"}}
        recipe["data"] = {"train": [{"text": text(row[:-1])} for row in ROWS]}
        recipe["optimizer"] = {"learning_rate": RATE}
        recipe["training"] = {"max_steps": STEPS, "micro_batch_size": 4}
        run_recipe(recipe, folder)
        on_ranks(peer, f"{folder}/model", folder)
        trained = {name: LlamaForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("peer", "run/export")}
        show("chance to stop", peer=stops(trained["peer"]), ours=stops(trained["run/export"]), right=right(model))


if __name__ == "__main__":
    main()
