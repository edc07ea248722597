"""From the command to the end of the first step of a model of SmolLM2's shape (135M), beside TRL's trainer.

    python benchmarks/first_step.py [--rounds 3] [--rows 200] [--output benchmarks/results/first_step.jsonl]

Both read the same model (random weights, bf16 on disk, float32 in training), tokenizer and conversations, train
on the CPU with one thread, make one AdamW step of one packed row of 512 tokens, and save nothing. The toolkit is
run by `toolkit train`, with its checks, its plan and its page; TRL by a script of its documentation's length. What
counts is the CPU time of all processes, in turn, from the command to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from facts import facts, show, tell
from rows import train_tokenizer, write_rows
from startup import cpu_of
from turns import ratios

LENGTH = 512
TRL = f"""
import sys, torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, rows, folder = sys.argv[1:]
torch.set_num_threads(1)
config = SFTConfig(
    output_dir=folder, use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=1, packing=True,
    max_length={LENGTH}, report_to=[], save_strategy="no", gradient_checkpointing=False,
    model_init_kwargs={{"dtype": "float32"}},
)
SFTTrainer(model, args=config, train_dataset=load_dataset("json", data_files=rows, split="train")).train()
"""
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
"""Of SmolLM2-135M."""


def save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)


def commands(folder: Path) -> dict[str, list[str]]:
    model, rows = str(folder / "model"), str(folder / "rows.jsonl")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}, dtype: float32}}\n"
        f"data: {{train: {rows}, max_length: {LENGTH}, long_rows: truncate, cache_dir: {folder / 'cache'}}}\n"
        f"training: {{output_dir: {folder / 'run'}, max_steps: 1, micro_batch_size: 1}}\n"
        "optimizer: {learning_rate: 2.0e-5}\n"
        "export: {enabled: false}\n"
    )
    script = folder / "by_trl.py"
    script.write_text(TRL)
    toolkit = str(Path(sys.executable).with_name("toolkit"))
    return {
        "toolkit train": [toolkit, "train", str(recipe), "--cpu", "1"],
        "TRL": [sys.executable, str(script), model, rows, str(folder / "trl")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="after the first, which fills the caches")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows)
        save_model(folder / "model")
        train_tokenizer(folder / "rows.jsonl", folder / "model", "chatml")
        seconds: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):
            shutil.rmtree(folder / "run", ignore_errors=True)
            for tool, command in commands(folder).items():
                found = cpu_of(command, folder)
                if number:
                    seconds.setdefault(tool, []).append(found)
    compared = ratios(seconds["toolkit train"], seconds["TRL"])
    tell({**facts("trl", "datasets"), "rounds": options.rounds, "cpu_seconds": compared}, options.output)
    rows = [["toolkit train", compared["ours"]], ["TRL", compared["theirs"]]]
    show("From the command to the end after one step, CPU s", ["", "s"], rows)
    print(f"toolkit train / TRL: {compared['ratio']} (quartiles {compared['low']} to {compared['high']})")


if __name__ == "__main__":
    main()
