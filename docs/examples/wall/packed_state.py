"""transformers#44717: packed rows see each other in layers that carry a state, as MiniMax's linear attention does.

TRL packs rows by position ids that begin anew. Softmax attention heeds them, the state does not. TRL's warning is about
FlashAttention, which would not help. (Qwen3.5 refuses packed rows since transformers 5.23.) The loss of eight packed
rows next to that of the rows one by one. The toolkit compares both before the first step, and pads.
"""

from __future__ import annotations

import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from datasets import Dataset
from transformers import MiniMaxConfig, MiniMaxForCausalLM
from trl import SFTConfig, SFTTrainer

ROWS = [[*row, END] for row in unequal_rows(8, longest=8)]
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_local_experts": 2}


def peer(model: str, folder: str) -> float:
    asked = SFTConfig(
        folder, use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=1, packing=True, max_length=32,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, router_aux_loss_coef=0.0,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": ROWS})
    loaded = MiniMaxForCausalLM.from_pretrained(model)
    trainer = SFTTrainer(loaded, asked, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def right(model: MiniMaxForCausalLM) -> float:
    total = sum(float(model(torch.tensor([row]), labels=torch.tensor([row])).loss) * (len(row) - 1) for row in ROWS)
    return total / sum(len(row) - 1 for row in ROWS)


def main() -> None:
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(MiniMaxConfig(**SIZES, **LAYERS)).eval()
    with tempfile.TemporaryDirectory() as folder:
        recipe = {"model": {"name_or_path": save(model, f"{folder}/model")}, "training": {"micro_batch_size": 4}}
        recipe["data"] = {"train": [{"text": text(row[:-1])} for row in ROWS], "max_length": 32}
        records = run_recipe(recipe, folder)
        loss = on_ranks(peer, f"{folder}/model", folder)
        show("loss", peer=loss, ours=records[0]["loss"], right=right(model))


if __name__ == "__main__":
    main()
