"""TRL's `SFTTrainer`, sharded: of the toolkit it takes one field of `SFTConfig`.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/sft_trainer.py

`--resume outputs/sft_trainer/checkpoint-10` goes on from there.
"""

from __future__ import annotations

import argparse
import json

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from toolkit import ShardingMesh, ShardingPlugin


def make_model(tokenizer: ByT5Tokenizer) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=64, **sizes)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id, None
    return LlamaForCausalLM(config)


def make_rows() -> Dataset:
    """Sums, of which the answer alone is trained on; the number of its tokens differs from row to row."""
    pairs = [(a, b * b) for a in range(16) for b in range(16)]
    return Dataset.from_list([{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a, b in pairs])


def train(output: str, steps: int, resume: str | None) -> None:
    plugin = ShardingPlugin()  # the strategy is the Accelerate config's
    arguments = SFTConfig(
        parallelism_config=ShardingMesh(plugin=plugin),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),  # SFTConfig's own default is True
        output_dir=output,
        max_steps=steps,
        max_length=64,
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
    tokenizer = ByT5Tokenizer(extra_ids=0)  # its tokens are bytes: it needs no files
    rows = make_rows().train_test_split(17, seed=0)
    trainer = SFTTrainer(
        make_model(tokenizer),
        arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
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
    parser.add_argument("--to", dest="output", default="outputs/sft_trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", help="a folder checkpoint-N of an earlier run")
    train(**vars(parser.parse_args()))
