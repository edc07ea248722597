"""`transformers.Trainer`, sharded: of the toolkit it takes one field of `TrainingArguments`.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/trainer.py

Run it from the root of the repository. `--resume outputs/trainer/checkpoint-10` goes on from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from toolkit import ShardingMesh, ShardingPlugin


def make_model() -> LlamaForCausalLM:
    """A Llama of 110,000 parameters whose tokens are bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, max_position_embeddings=64, **sizes))


def make_rows() -> list[dict[str, list[int]]]:
    """The start of a play in rows of 64 tokens: 240 to train on and 17 held out."""
    play = json.loads(Path("recipes/data/plays.jsonl").read_text().splitlines()[0])["text"].encode()
    rows = [list(play[start : start + 64]) for start in range(0, 257 * 64, 64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(output: str, steps: int, resume: str | None) -> None:
    plugin = ShardingPlugin()  # the strategy is the Accelerate config's
    arguments = TrainingArguments(
        parallelism_config=ShardingMesh(plugin=plugin),
        use_cpu=not torch.cuda.is_available(),
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to="none",
    )
    set_seed(0)
    rows = make_rows()
    trainer = Trainer(make_model(), arguments, train_dataset=rows[:240], eval_dataset=rows[240:])
    trainer.train(resume_from_checkpoint=resume)
    eval_loss = trainer.evaluate()["eval_loss"]
    plugin.set_state_dict_type("FULL_STATE_DICT")  # with SHARDED_STATE_DICT, save_model would write no weights
    trainer.save_model(f"{output}/export")
    trainer.accelerator.wait_for_everyone()  # the main process is still writing
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    kind = trainer.accelerator.distributed_type
    trainer.accelerator.print(json.dumps({"type": kind, "losses": losses, "eval_loss": eval_loss}))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", dest="output", default="outputs/trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", help="a folder checkpoint-N of an earlier run")
    train(**vars(parser.parse_args()))
