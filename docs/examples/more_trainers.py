"""TRL's `RewardTrainer` and transformers' `Seq2SeqTrainer`, sharded: each takes one field of its arguments.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/more_trainers.py reward

The trainers are `reward` and `seq2seq`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from trl import RewardConfig, RewardTrainer

from toolkit import ShardingMesh, ShardingPlugin

TOKENIZER = ByT5Tokenizer(extra_ids=0)  # its tokens are bytes: it needs no files
SUMS = [(f"{a} + {b} = ", str(a + b), str(a + b + 7 * (1 + b))) for a in range(10, 18) for b in range(8)]
"""A prompt, the right answer and a wrong one."""


def reward(arguments: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), num_hidden_layers=2, max_position_embeddings=64, **sizes)
    config.pad_token_id, config.eos_token_id, config.num_labels = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, 1
    rows = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in SUMS]
    return RewardTrainer(
        LlamaForSequenceClassification(config),
        RewardConfig(**arguments, max_length=64, center_rewards_coefficient=0.01),
        train_dataset=Dataset.from_list(rows),
        processing_class=TOKENIZER,
    )


def seq2seq(arguments: dict[str, Any]) -> Any:
    config = T5Config(vocab_size=len(TOKENIZER), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    config.pad_token_id, config.eos_token_id, config.decoder_start_token_id = 0, TOKENIZER.eos_token_id, 0
    config.dropout_rate = 0.0
    model = T5ForConditionalGeneration(config)
    rows = [{**TOKENIZER(prompt), "labels": TOKENIZER(right)["input_ids"]} for prompt, right, _ in SUMS]
    # T5 takes the mean over its own tokens, whatever it is told. With True, Trainer multiplies its loss by the ranks.
    settings = Seq2SeqTrainingArguments(**arguments, average_tokens_across_devices=False)
    collator = DataCollatorForSeq2Seq(TOKENIZER, model)
    return Seq2SeqTrainer(model, settings, train_dataset=Dataset.from_list(rows), data_collator=collator)


TRAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {"reward": reward, "seq2seq": seq2seq}


def train(name: str, output: str, steps: int, mesh: ShardingMesh | None, batch_size: int = 4) -> dict[str, Any]:
    """Losses of a run.

    Args:
        mesh: None: stock Accelerate.
        batch_size: rows of a micro-batch on each rank.
    """
    set_seed(0)
    arguments = {
        "parallelism_config": mesh,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    trainer = TRAINERS[name](arguments)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"type": str(trainer.accelerator.distributed_type), "losses": losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--output", default="outputs/more_trainers")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    plugin = ShardingPlugin()  # the strategy is the Accelerate config's
    print(json.dumps(train(given.trainer, given.output, given.steps, ShardingMesh(plugin=plugin))))
