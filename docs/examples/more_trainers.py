"""Six more trainers, sharded: each takes one field of its arguments.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/more_trainers.py dpo

The trainers are transformers' `seq2seq`, and of TRL `reward`, `dpo`, `kto`, `grpo` and `distillation`.
`--resume outputs/more_trainers/checkpoint-5` goes on from there.
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
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)

from toolkit import ShardingMesh, ShardingPlugin

TOKENIZER = ByT5Tokenizer(extra_ids=0)  # its tokens are bytes: it needs no files
TOKENIZER.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
SUMS = [(f"{a} + {b} = ", str(a + b), str(a + b + 7 * (1 + b))) for a in range(10, 18) for b in range(8)]
"""A prompt, the right answer and a wrong one."""


def llama(kind: type = LlamaForCausalLM, **more: Any) -> Any:
    """A Llama of 100,000 parameters."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), num_hidden_layers=2, max_position_embeddings=64, **sizes, **more)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, None
    return kind(config)


def pairs() -> Dataset:
    return Dataset.from_list([{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in SUMS])


def reward(arguments: dict[str, Any]) -> Any:
    settings = RewardConfig(**arguments, max_length=64, center_rewards_coefficient=0.01)
    model = llama(LlamaForSequenceClassification, num_labels=1)
    return RewardTrainer(model, settings, train_dataset=pairs(), processing_class=TOKENIZER)


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


def dpo(arguments: dict[str, Any]) -> Any:
    policy, reference = llama(), llama()
    settings = DPOConfig(**arguments, max_length=64)
    return DPOTrainer(policy, reference, settings, train_dataset=pairs(), processing_class=TOKENIZER)


def kto(arguments: dict[str, Any]) -> Any:
    policy, reference = llama(), llama()
    settings = KTOConfig(**arguments, max_length=64)
    return KTOTrainer(policy, reference, settings, train_dataset=pairs(), processing_class=TOKENIZER)


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(character in "0123456789" for character in text) / (len(text) + 1) for text in completions]


def grpo(arguments: dict[str, Any]) -> Any:
    # Each completion is learned from twice: the first time the loss is 0, and its gradient is not.
    settings = GRPOConfig(**arguments, num_generations=4, num_iterations=2, max_completion_length=12)
    rows = Dataset.from_list([{"prompt": prompt} for prompt, _, _ in SUMS])
    return GRPOTrainer(llama(), share_of_digits, settings, train_dataset=rows, processing_class=TOKENIZER)


def distillation(arguments: dict[str, Any]) -> Any:
    student, teacher = llama(), llama()
    settings = DistillationConfig(**arguments, max_completion_length=12)
    rows = Dataset.from_list([{"prompt": prompt} for prompt, _, _ in SUMS])
    return DistillationTrainer(student, teacher, args=settings, train_dataset=rows, processing_class=TOKENIZER)


TRAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    made.__name__: made for made in (reward, seq2seq, dpo, kto, grpo, distillation)
}


def make(name: str, output: str, steps: int, mesh: ShardingMesh | None, batch_size: int = 4, **more: Any) -> Any:
    """A trainer.

    Args:
        mesh: None: stock Accelerate.
        batch_size: rows of a micro-batch on each rank.
        more: further training arguments.
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
        "save_steps": 5,
        "report_to": "none",
    }
    return TRAINERS[name]({**arguments, **more})


def train(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    """Trains; tells the losses and the norms of the gradients."""
    trainer.train(resume_from_checkpoint=resume)
    steps = [record for record in trainer.state.log_history if "loss" in record]
    told = {key: [step[key] for step in steps] for key in ("loss", "grad_norm")}
    return {"type": str(trainer.accelerator.distributed_type), **told}


def export(trainer: Any, folder: str) -> None:
    """Writes what `from_pretrained` loads; every rank calls it."""
    if trainer.is_fsdp_enabled:
        # With SHARDED_STATE_DICT, save_model would write no weights.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()  # the main process is still writing


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--to", dest="output", default="outputs/more_trainers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", help="a folder checkpoint-N of an earlier run")
    given = parser.parse_args()
    made = make(given.trainer, given.output, given.steps, ShardingMesh(plugin=ShardingPlugin()))
    told = train(made, given.resume)
    export(made, f"{given.output}/export")
    made.accelerator.print(json.dumps(told))
    made.accelerator.end_training()
