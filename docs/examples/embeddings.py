"""sentence-transformers' trainer, sharded: a tiny BERT learns which answer belongs to which sum.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml docs/examples/embeddings.py

The answers of all ranks are each other's negatives. `--resume outputs/embeddings/checkpoint-5` goes on from there.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, ByT5Tokenizer, Trainer, set_seed

from toolkit import ShardingMesh, ShardingPlugin

SUMS = [(f"{a} + {b}", str(a + b)) for a in range(10, 50) for b in (7, 60)]


class ResumingTrainer(SentenceTransformerTrainer):
    """Resumes a sharded model; `_load_from_checkpoint` of sentence-transformers 6.2 (base/trainer.py) knows none."""

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:
        Trainer._load_from_checkpoint(self, checkpoint_path, model)


def make_model(folder: str, arguments: SentenceTransformerTrainingArguments) -> SentenceTransformer:
    """The mean over the tokens' vectors of a BERT of 100,000 parameters, whose tokens are bytes.

    `Transformer` loads from a folder alone, so `folder` is written first.
    """
    tokenizer = ByT5Tokenizer(extra_ids=0, model_max_length=32)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=0, **sizes, **dropout)
    BertModel(config).save_pretrained(folder)  # the first rank writes
    tokenizer.save_pretrained(folder)
    arguments.distributed_state.wait_for_everyone()
    return SentenceTransformer(modules=[Transformer(folder), Pooling(config.hidden_size)])


def make(output: str, steps: int, mesh: ShardingMesh | None, batch_size: int = 4, **more: Any) -> ResumingTrainer:
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
    settings = SentenceTransformerTrainingArguments(**{**arguments, **more})
    model = make_model(f"{output}/start", settings)
    rows = Dataset.from_list([{"anchor": asked, "positive": right} for asked, right in SUMS])
    loss = MultipleNegativesRankingLoss(model, gather_across_devices=True)
    return ResumingTrainer(model, settings, train_dataset=rows, loss=loss)


def train(trainer: ResumingTrainer, resume: str | None = None) -> dict[str, Any]:
    """Trains; tells the losses and the norms of the gradients."""
    trainer.train(resume_from_checkpoint=resume)
    steps = [record for record in trainer.state.log_history if "loss" in record]
    told = {key: [step[key] for step in steps] for key in ("loss", "grad_norm")}
    return {"type": str(trainer.accelerator.distributed_type), **told}


def export(trainer: ResumingTrainer, folder: str) -> None:
    """Writes what `SentenceTransformer(folder)` loads; every rank calls it.

    `trainer.save_model` fails: `_save` of sentence-transformers 6.2 (base/trainer.py) writes the shards of one rank.
    """
    whole = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        start = f"{trainer.args.output_dir}/start"
        model = SentenceTransformer(modules=[Transformer(start), Pooling(64)], device="cpu")
        model.load_state_dict(whole)
        model.save_pretrained(folder)
    trainer.accelerator.wait_for_everyone()  # the main process is still writing


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", dest="output", default="outputs/embeddings")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", help="a folder checkpoint-N of an earlier run")
    given = parser.parse_args()
    made = make(given.output, given.steps, ShardingMesh(plugin=ShardingPlugin()))
    told = train(made, given.resume)
    export(made, f"{given.output}/export")
    made.accelerator.print(json.dumps(told))
    made.accelerator.end_training()
