"""transformers 5.23, `ReplicatedWithGradAllReduce`: gradients of norms of heads grow with the micro-batches.

`DistributedConfig(tp_size=)` sums these gradients over the ranks after each backward, what was summed before included.
The gradient norm of the first block's `q_norm`, over two micro-batches, next to that of one process. The toolkit's
ranks cut the matrices too (`tensor=2`), and sum these gradients once, after the last backward.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _common import SIZES, on_ranks, save, show, unequal_rows
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from toolkit import sharding_kwargs

ROWS = unequal_rows(4)


def loss_of(model: Any, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row])
    return torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])


def norm_of(model: Any) -> float:
    (gradient,) = (p.grad for name, p in model.named_parameters() if name.endswith("layers.0.self_attn.q_norm.weight"))
    assert gradient is not None
    return float((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).norm())


def peer(folder: str) -> float:
    dist.init_process_group("gloo")
    model = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    for rows in (ROWS[:2], ROWS[2:]):
        (sum(loss_of(model, row) for row in rows) / len(ROWS)).backward()
    return norm_of(model)


def ours(folder: str) -> float:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **sharding_kwargs("zero3", tensor=2))
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for rows in (ROWS[:2], ROWS[2:]):
        with accelerator.accumulate(model):
            accelerator.backward(sum(loss_of(model, row) for row in rows) / 2)
    return norm_of(model)


def main() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False))
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        (sum(loss_of(model, row) for row in ROWS) / len(ROWS)).backward()
        show("gradient norm", peer=on_ranks(peer, folder), ours=on_ranks(ours, folder), right=norm_of(model))


if __name__ == "__main__":
    main()
