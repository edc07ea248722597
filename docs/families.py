"""Writes docs/families.md: what `toolkit init` writes for well-known models, which needs neither weights nor a GPU.

python docs/families.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.errors import counted

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import chat_templates as templates

PAGE = Path(__file__).parent / "families.md"
GIB = 2**30
ROWS = 2000
HEAD = f"""# Recipes per family

What `toolkit init` writes for models of 0.6B to 70B: in full, as LoRA and as QLoRA, on one card and on eight. The rows
are {ROWS:,} conversations, with a median of about 300 tokens. Each section has the command and its file. With your rows
the lengths, steps and batches will differ, so run the command rather than copy the file. To decide first, read
[Choose](choose.md).

`python docs/families.py` makes this page from the published shapes of the models. Memory and minutes are the plan's and
were not measured on GPUs. The tokenizers have each family's chat template, but few words.
"""


def llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The shape of a model whose blocks are those of Llama; `more` overrides what is usual."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    usual = {"model_type": "llama", "num_key_value_heads": 8, "max_position_embeddings": 131072}
    return {**shape, **usual, "intermediate_size": inner, "vocab_size": vocabulary, **more}


QWEN_3 = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
GEMMA_3 = {"model_type": "gemma3_text", "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 1024}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4}
MODELS: dict[str, tuple[dict[str, Any], templates.ChatTemplate]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (llama(4096, 32, 32, 14336, 128256), templates.LLAMA_31),
    "meta-llama/Llama-3.2-1B-Instruct": (
        llama(2048, 16, 32, 8192, 128256, tie_word_embeddings=True),
        templates.LLAMA_31,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (llama(8192, 80, 64, 28672, 128256), templates.LLAMA_31),
    "Qwen/Qwen3-8B": (llama(4096, 36, 32, 12288, 151936, **QWEN_3), templates.QWEN_3),
    "Qwen/Qwen3-0.6B": (llama(1024, 28, 16, 3072, 151936, **QWEN_3, tie_word_embeddings=True), templates.QWEN_3),
    "Qwen/Qwen3-30B-A3B": (
        llama(2048, 48, 32, 6144, 151936, **{**QWEN_3, **EXPERTS, "model_type": "qwen3_moe"}),
        templates.QWEN_3,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        llama(4096, 32, 32, 14336, 32768, model_type="mistral", max_position_embeddings=32768, sliding_window=None),
        templates.MISTRAL_V3,
    ),
    "google/gemma-3-1b-it": (
        llama(1152, 26, 4, 6912, 262144, **GEMMA_3, num_key_value_heads=1, tie_word_embeddings=True),
        templates.GEMMA_3,
    ),
}
"""Hub name -> published shape, and chat template."""


@dataclass(frozen=True)
class Case:
    model: str
    method: str
    gpus: int
    hardware: str

    @property
    def title(self) -> str:
        return f"{self.model.partition('/')[2]}, {self.method}, {self.gpus} x {self.hardware}"

    @property
    def words(self) -> list[str]:
        """The command's arguments."""
        machine = ["--gpus", str(self.gpus), "--hardware", self.hardware]
        return ["init", self.model, "chat.jsonl", "--method", self.method, *machine, "--output", "mine.yaml"]


CASES = tuple(
    Case(*each)
    for each in (
        ("meta-llama/Llama-3.1-8B-Instruct", "full", 8, "h100_sxm"),
        ("meta-llama/Llama-3.1-8B-Instruct", "lora", 1, "h100_sxm"),
        ("meta-llama/Llama-3.1-8B-Instruct", "qlora", 1, "rtx4090"),
        ("meta-llama/Llama-3.2-1B-Instruct", "full", 1, "rtx4090"),
        ("meta-llama/Llama-3.3-70B-Instruct", "qlora", 8, "h100_sxm"),
        ("Qwen/Qwen3-8B", "full", 8, "h100_sxm"),
        ("Qwen/Qwen3-8B", "lora", 1, "h100_sxm"),
        ("Qwen/Qwen3-0.6B", "full", 1, "rtx4090"),
        ("Qwen/Qwen3-30B-A3B", "lora", 8, "h100_sxm"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "lora", 1, "h100_sxm"),
        ("google/gemma-3-1b-it", "full", 1, "rtx4090"),
    )
)


@contextlib.contextmanager
def place(names: list[str]) -> Iterator[None]:
    """A working folder with the rows, and with what a download of these models has besides weights."""
    here, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        try:
            _write_rows(Path("chat.jsonl"))
            for name in names:
                config, template = MODELS[name]
                templates.tokenizer_for(template).save_pretrained(name)
                (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield
        finally:
            os.chdir(here)
            del os.environ["XDG_CACHE_HOME"]
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache


def _write_rows(path: Path) -> None:
    """Conversations of words that every one of the small tokenizers has as one or two tokens."""
    chance, words = random.Random(0), templates.TEXTS[0].split()  # noqa: S311
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            lengths = (
                min(60, int(chance.lognormvariate(3, 0.7)) + 1),
                min(1600, int(chance.lognormvariate(5.3, 0.9)) + 1),
            )
            asked, answer = (" ".join(chance.choices(words, k=length)) for length in lengths)
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def written(case: Case) -> tuple[dict[str, Any], str]:
    """What the command prints as JSON, and the recipe that it writes; called in a `place` that has the model."""
    done = CliRunner().invoke(app, [*case.words, "--force", "--json"])
    if done.exit_code != 0:
        raise RuntimeError(f"{case.title}: {done.output}") from done.exception
    return json.loads(done.stdout), Path("mine.yaml").read_text(encoding="utf-8")


def section(case: Case, recipe: str) -> str:
    return f"## {case.title}\n\n`{' '.join(['toolkit', *case.words])}`\n\n```yaml\n{recipe.strip()}\n```\n"


def line(case: Case, found: dict[str, Any]) -> str:
    """The case's row of the table."""
    training, sharding = found["recipe"]["training"], found["recipe"].get("sharding", {})
    strategy = sharding.get("strategy", "zero3") + ("+offload" if sharding.get("offload", "none") != "none" else "")
    again = sharding.get("activation_checkpointing", 0)
    batch = f"{training.get('micro_batch_size', 1)} x {training.get('gradient_accumulation_steps', 1)} x {case.gpus}"
    minutes = max(1, round(found["steps"] * found["step_seconds"] / 60))
    anchor = "".join(letter for letter in case.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
    cells = (f"[{case.title}](#{anchor})", strategy, "yes" if again else "no", batch, f"{found['need'] / GIB:.0f} GiB")
    return f"| {' | '.join(cells)} | {counted(found['steps'], 'step')}, {minutes} min |"


def page() -> str:
    names = list(dict.fromkeys(case.model for case in CASES))
    with place(names):
        made = [(case, *written(case)) for case in CASES]
    head = "| recipe | strategy | activations computed again | micro-batch x accumulation x ranks | memory | run |"
    table = [head, "|---" * 6 + "|", *(line(case, found) for case, found, _ in made)]
    return "\n".join([HEAD, *table, "", *(section(case, recipe) for case, _, recipe in made)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
