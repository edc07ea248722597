"""transformers#48690: the balance loss of a mixture of experts is multiplied by the number of ranks.

`Trainer` multiplies the whole loss by the ranks, to undo DDP's mean of sums that were divided by the tokens of all
ranks. The balance loss was not divided. Two ranks, four rows each: the gradient norm of the first step next to that of
the eight rows in one batch.
"""

from __future__ import annotations

import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import DataCollatorForSeq2Seq, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

ROWS = [[*row, END] for row in unequal_rows(8, longest=8)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
EXPERTS |= {"num_hidden_layers": 1}  # of more layers transformers takes one mean of the loads, the toolkit one of each
BALANCE = 1.0  # router_aux_loss_coef, large enough to be seen in one step


def peer(model: str, folder: str) -> float:
    asked = TrainingArguments(
        folder, use_cpu=True, max_steps=1, per_device_train_batch_size=4,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    collator = DataCollatorForSeq2Seq(tokenizer())  # pads the labels, too
    trainer = Trainer(Qwen3MoeForCausalLM.from_pretrained(model), asked, train_dataset=rows, data_collator=collator)
    trainer.train()
    return float(trainer.state.log_history[0]["grad_norm"])


def right(model: Qwen3MoeForCausalLM) -> float:
    batch = DataCollatorForSeq2Seq(tokenizer())([{"input_ids": row, "labels": row} for row in ROWS])
    model(**batch).loss.backward()  # the mean over all tokens, and the balance over all tokens
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, **EXPERTS}, output_router_logits=True, router_aux_loss_coef=BALANCE)
    model = Qwen3MoeForCausalLM(config).train()
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, f"{folder}/model")
        recipe = {"model": {"name_or_path": saved}, "data": {"train": [{"text": text(row[:-1])} for row in ROWS]}}
        recipe["data"] |= {"packing": False}
        recipe["objective"] = {"router_aux_coef": BALANCE}
        recipe["training"] = {"micro_batch_size": 4}
        records = run_recipe(recipe, folder)
        show("gradient norm", peer=on_ranks(peer, saved, folder), ours=records[0]["grad_norm"], right=right(model))


if __name__ == "__main__":
    main()
