"""A training loop written by hand: of the toolkit it takes the arguments of `Accelerator`, nothing else.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/accelerate_loop.py

Run it from the root of the repository. `--resume outputs/accelerate_loop/step_10` goes on from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit import sharding_kwargs

ACCUMULATION = 2


def make_model() -> LlamaForCausalLM:
    """A Llama of 110,000 parameters whose tokens are bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, max_position_embeddings=64, **sizes))


def make_rows() -> torch.Tensor:
    """The start of a play, (257, 64): 240 rows to train on and 17 held out."""
    play = json.loads(Path("recipes/data/plays.jsonl").read_text().splitlines()[0])["text"]
    return torch.tensor(list(play.encode()[: 257 * 64])).view(257, 64)


def evaluate(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> float:
    """Mean loss over the held-out rows, each counted once."""
    model.eval()
    row_losses = []
    for batch in batches:
        with torch.no_grad():
            logits = model(input_ids=batch).logits  # (B, T, V)
        row_loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none").mean(1)  # (B,)
        row_losses.append(accelerator.gather_for_metrics(row_loss))  # drops the rows that only fill up the last batch
    model.train()
    return torch.cat(row_losses).mean().item()


def export(accelerator: Accelerator, model: nn.Module, folder: str) -> None:
    """Writes what `from_pretrained` loads; every rank calls it."""
    whole = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    inner.save_pretrained(folder, state_dict=whole, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()  # the main process is still writing


def train(output: str, steps: int, resume: str | None) -> None:
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of rows is a function of seed and epoch
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, dataloader_config=order, **sharding_kwargs())
    set_seed(0)
    model, rows = make_model(), make_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    batches, held_out = DataLoader(rows[:240], batch_size=4, shuffle=True), DataLoader(rows[240:], batch_size=4)
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
    accelerator.register_for_checkpointing(scheduler)  # if prepared, it would be stepped once for every process
    if resume is not None:
        accelerator.load_state(resume)

    step, steps_per_epoch, losses, window = scheduler.last_epoch, len(batches) // ACCUMULATION, [], []
    while step < steps:
        batches.set_epoch(step // steps_per_epoch)
        for batch in accelerator.skip_first_batches(batches, step % steps_per_epoch * ACCUMULATION):
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            window.append(loss.detach())
            if accelerator.sync_gradients:
                scheduler.step()
                step += 1
                losses.append(accelerator.reduce(torch.stack(window), "mean").mean().item())
                window.clear()
                if step % 10 == 0:
                    accelerator.save_state(f"{output}/step_{step}")
            if step == steps:
                break

    eval_loss = evaluate(accelerator, model, held_out)
    export(accelerator, model, f"{output}/export")
    accelerator.print(json.dumps({"type": accelerator.distributed_type, "losses": losses, "eval_loss": eval_loss}))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", dest="output", default="outputs/accelerate_loop")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", help="a folder of save_state")
    train(**vars(parser.parse_args()))
