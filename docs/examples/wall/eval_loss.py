"""transformers#39241: `eval_loss` is the mean of the batches' means, so it depends on the batch size and the ranks.

Sixteen held-out rows of 3 to 24 tokens, two ranks, one row a batch: a short row counts as much as a long one. Beside
it the mean over the rows' tokens, which is what the loss of a language model means, and its perplexity with it.
"""

from __future__ import annotations

import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS = [[*row, END] for row in unequal_rows(16)]


def peer(model: str, folder: str) -> float:
    asked = TrainingArguments(folder, use_cpu=True, per_device_eval_batch_size=1, report_to="none", disable_tqdm=True)
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    collator = DataCollatorForSeq2Seq(tokenizer())
    trainer = Trainer(LlamaForCausalLM.from_pretrained(model), asked, eval_dataset=rows, data_collator=collator)
    return float(trainer.evaluate()["eval_loss"])


def right(model: LlamaForCausalLM) -> float:
    total = sum(float(model(torch.tensor([row]), labels=torch.tensor([row])).loss) * (len(row) - 1) for row in ROWS)
    return total / sum(len(row) - 1 for row in ROWS)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, f"{folder}/model")
        rows = [{"text": text(row[:-1])} for row in ROWS]
        recipe = {"model": {"name_or_path": saved}, "data": {"train": rows, "validation": f"{folder}/rows.jsonl"}}
        recipe["data"]["packing"] = False
        recipe["training"] = {"eval_every_steps": 1}
        records = run_recipe(recipe, folder)
        before = next(record for record in records if record["split"] == "eval")  # before the first step
        show("eval loss", peer=on_ranks(peer, saved, folder), ours=before["loss"], right=right(model))


if __name__ == "__main__":
    main()
