"""transformers#47688: a classifier's gradient grows with the micro-batches and the ranks of a step.

`Trainer` hands `num_items_in_batch` to every model whose `forward` takes keyword arguments, and then does not divide
by the micro-batches itself. The heads for classification drop it. Two ranks, four micro-batches of one row: the
gradient norm of the first step next to that of the mean over the same eight rows.
"""

from __future__ import annotations

import tempfile

import torch
from _common import SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import DataCollatorWithPadding, LlamaConfig, Trainer, TrainingArguments
from transformers import LlamaForSequenceClassification as Classifier

ROWS, LABELS = unequal_rows(8), [0, 1, 1, 0, 1, 0, 0, 1]


def peer(model: str, folder: str) -> float:
    rows = [{"input_ids": row, "label": label} for row, label in zip(ROWS, LABELS, strict=True)]
    asked = TrainingArguments(
        folder, use_cpu=True, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=4,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    loaded = Classifier.from_pretrained(model)
    trainer = Trainer(loaded, asked, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer()))
    trainer.train()
    return float(trainer.state.log_history[0]["grad_norm"])


def right(model: Classifier) -> float:
    for row, label in zip(ROWS, LABELS, strict=True):
        loss = torch.nn.functional.cross_entropy(model(torch.tensor([row])).logits, torch.tensor([label]))
        (loss / len(ROWS)).backward()
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


def main() -> None:
    torch.manual_seed(0)
    model = Classifier(LlamaConfig(**SIZES, num_labels=2)).eval()
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, f"{folder}/model")
        data = {"train": [{"text": text(row), "label": label} for row, label in zip(ROWS, LABELS, strict=True)]}
        recipe = {"model": {"name_or_path": saved}, "data": data, "training": {"gradient_accumulation_steps": 4}}
        recipe["objective"] = {"kind": "sequence_classification"}
        records = run_recipe(recipe, folder)
        show("gradient norm", peer=on_ranks(peer, saved, folder), ours=records[0]["grad_norm"], right=right(model))


if __name__ == "__main__":
    main()
