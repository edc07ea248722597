"""DeepSpeed#8475: with experts spread over ranks, the norm of gradients is a mean of the ranks' norms.

`clip_grad_norm_`, which DeepSpeed's engine calls in float32, takes each rank's norm and then the mean. But the ranks
hold other experts, so their squares belong into one sum. Here it gets the gradient of a mixture of four experts, of
which each of two ranks holds two, as under expert parallelism. Clipping scales by this norm.
"""

from __future__ import annotations

import os
import tempfile

import torch
from _common import END, SIZES, on_ranks, run_recipe, save, show, text, tokenizer, unequal_rows
from transformers import DataCollatorForSeq2Seq, Qwen3MoeConfig, Qwen3MoeForCausalLM

ROWS = [[*row, END] for row in unequal_rows(8, longest=8)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "head_dim": 8}


def gradients(model: str) -> dict[str, torch.Tensor]:
    """Returns the gradient of the mean over all tokens, by the parameters' names."""
    loaded = Qwen3MoeForCausalLM.from_pretrained(model).train()
    loaded(**DataCollatorForSeq2Seq(tokenizer())([{"input_ids": row, "labels": row} for row in ROWS])).loss.backward()
    return {name: parameter.grad for name, parameter in loaded.named_parameters()}


def peer(model: str) -> float:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.utils import clip_grad_norm_

    deepspeed.init_distributed(dist_backend="gloo")
    held = []
    for name, gradient in gradients(model).items():
        mine = gradient.chunk(2)[deepspeed.comm.get_rank()] if ".experts." in name else gradient
        held.append(torch.nn.Parameter(torch.zeros_like(mine)))
        held[-1].grad = mine
    return float(clip_grad_norm_(held, max_norm=1e9))


def main() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **EXPERTS}))
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, f"{folder}/model")
        recipe = {"model": {"name_or_path": saved}, "data": {"train": [{"text": text(row[:-1])} for row in ROWS]}}
        recipe["data"]["packing"] = False
        recipe["sharding"] = {"strategy": "zero3", "experts": 2}
        recipe["objective"] = {"router_aux_coef": 0.0}
        recipe["training"] = {"micro_batch_size": 4}
        records = run_recipe(recipe, folder)
        right = float(torch.nn.utils.get_total_norm(gradients(saved).values()))
        show("gradient norm", peer=on_ranks(peer, saved), ours=records[0]["grad_norm"], right=right)


if __name__ == "__main__":
    main()
