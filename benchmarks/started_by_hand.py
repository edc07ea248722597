"""The quickstart's first three steps by hand, for startup.py: two ranks under torchrun, DDP over gloo.

    torchrun --nproc_per_node 2 benchmarks/started_by_hand.py TOKENIZER FOLDER

It imports what a run imports, reads the requests, renders and tokenises them, evaluates on 71 packed rows, makes three
steps of 4 rows a rank, evaluates again, continues three texts by 40 tokens each and saves the model. TOKENIZER is the
one that a run of the recipe trained.
"""

import json
import os
import sys
from pathlib import Path

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
LENGTH, ROWS, HELD_OUT, STEPS = 160, 4, 71, 3


def batches(rows: list[list[int]], rank: int) -> list[torch.Tensor]:
    mine = rows[rank::2]
    return [torch.tensor(mine[start : start + ROWS]) for start in range(0, len(mine) - ROWS + 1, ROWS)]


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: list[torch.Tensor]) -> float:
    model.eval()
    sums = torch.tensor([sum(float(model(input_ids=row, labels=row).loss) for row in rows), float(len(rows))])
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def main(tokenizer_folder: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    lines = (ROOT / "recipes/data/requests.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    tokens = [token for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in ids]
    rows = [tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH + 1, LENGTH)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=576, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = DistributedDataParallel(LlamaForCausalLM(config))
    held_out, train = batches(rows[:HELD_OUT], rank), batches(rows[HELD_OUT:], rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = [evaluate(model.module, held_out)]
    for row in train[:STEPS]:
        model(input_ids=row, labels=row).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(evaluate(model.module, held_out))
    if rank == 0:
        for text in texts[:3]:
            start = tokenizer(text[:60], return_tensors="pt", add_special_tokens=False).input_ids
            model.module.generate(start, max_new_tokens=40, do_sample=False)
        model.module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(losses)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
