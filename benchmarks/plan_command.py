"""What `toolkit plan` takes from the command to its last line, beside the imports that no plan can do without.

    python benchmarks/plan_command.py [--rounds 3] [--output benchmarks/results/plan_command.jsonl]

The models are an 8B and a 405B Llama and Qwen 3's 235B, each from a configuration, on 8, 512 and 128 GPUs. What counts
is the CPU time of all processes; a plan takes turns with a process that imports torch and transformers' models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from facts import facts, show, tell
from startup import cpu_of
from turns import ratios

IMPORTS = "import torch, transformers.modeling_utils"
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
MODELS = {
    "8B": (
        8,
        {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32},
    ),
    "405B": (
        512,
        {**LLAMA, "num_hidden_layers": 126, "hidden_size": 16_384, "intermediate_size": 53_248,
         "num_attention_heads": 128},
    ),
    "Qwen 3 235B": (
        128,
        {
            "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 12_288,
            "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        },
    ),
}  # fmt: skip
"""Name -> GPUs, and fields of the configuration."""


def command(folder: Path, name: str) -> list[str]:
    gpus, config = MODELS[name]
    recipe = folder / f"{name.replace(' ', '_')}.yaml"
    model = {"config": config, "train_tokenizer_vocab_size": 1000}
    others = {"optimizer": {"learning_rate": 1e-3}, "training": {"max_steps": 10, "output_dir": "out"}}
    # JSON is YAML.
    recipe.write_text(json.dumps({"model": model, "data": {"train": "rows.jsonl", "max_length": 2048}, **others}))
    return [str(Path(sys.executable).with_name("toolkit")), "plan", str(recipe), "--gpus", str(gpus)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        for name in options.models:
            plans, imports = [], []
            for _ in range(options.rounds):
                plans.append(cpu_of(command(folder, name), folder))
                imports.append(cpu_of([sys.executable, "-c", IMPORTS], folder))
            found = ratios(plans, imports)
            tell({**facts(), "model": name, "gpus": MODELS[name][0], "cpu_seconds": found}, options.output)
            table.append([name, found["ours"], found["theirs"], found["ratio"]])
    show("toolkit plan, CPU s", ["", "plan", "imports alone", "ratio"], table)


if __name__ == "__main__":
    main()
