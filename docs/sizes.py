"""Writes the tables of docs/choose.md and docs/out_of_memory.md from plans, which need neither weights nor a GPU.

python docs/sizes.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit import Recipe
from toolkit.planning import PlanRow, hardware_of
from toolkit.planning.planner import Planner
from toolkit.planning.setup import asked_setup
from toolkit.planning.workload.workload import workload_on_rows

DOCS = Path(__file__).parent
GIB = 2**30
SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "1B": (2048, 16, 32, 8192, 128256, True),
    "3B": (3072, 28, 24, 8192, 128256, True),
    "8B": (4096, 32, 32, 14336, 128256, False),
    "14B": (5120, 48, 40, 13824, 152064, False),
    "32B": (5120, 64, 40, 27648, 152064, False),
    "70B": (8192, 80, 64, 28672, 128256, False),
}
"""Published shapes of Llama 3, and of Qwen 2.5 at 14B and 32B: hidden size, layers, heads, size of the MLP, vocabulary,
and whether the head is the embedding."""

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"model.dtype": "bfloat16", "adapter.kind": "lora", "export.merge": True},
    "QLoRA": {"model.dtype": "bfloat16", "adapter.kind": "lora", "export.merge": True, "adapter.quantize": "nf4"},
}
CARDS = {"rtx4090": "RTX 4090, 24 GB", "h100_sxm": "H100, 80 GB"}
COUNTS = (1, 2, 4, 8, 16, 32)
LENGTH = 4096


def recipe_of(size: str, **changes: Any) -> Recipe:
    """A recipe with a Llama of this size: rows of 4,096 tokens, one a micro-batch."""
    hidden, layers, heads, inner, vocabulary, tied = SIZES[size]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    more = {"num_key_value_heads": 8, "intermediate_size": inner, "tie_word_embeddings": tied}
    config = {"model_type": "llama", "max_position_embeddings": 8192, **shape, **more}
    sections: dict[str, Any] = {
        "model": {"config": config, "tokenizer": str(DOCS.parent / "recipes/data/shapes_tokenizer")},
        "data": {"train": "rows.jsonl", "max_length": LENGTH},
        "optimizer": {"learning_rate": 1e-5},
        "training": {"output_dir": "outputs/run", "max_steps": 100, "micro_batch_size": 1, "mixed_precision": "bf16"},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Recipe.from_mapping(sections)


def planned(size: str, **changes: Any) -> Callable[[str, int], PlanRow]:
    """The plan's row of a recipe, by the kind of card and their number."""
    recipe = recipe_of(size, **changes)
    workload = workload_on_rows(recipe, "bf16")

    @functools.cache
    def planner_of(card: str) -> Planner:
        return Planner(recipe, workload, hardware_of(card))

    def row(card: str, ranks: int) -> PlanRow:
        return planner_of(card).row(asked_setup(recipe, ranks, hardware_of(card), None, False, None))

    return row


def cell(row_of: Callable[[str, int], PlanRow], card: str) -> str:
    """The fewest cards on which it fits with headroom."""
    for ranks in COUNTS:
        if row_of(card, ranks).verdict == "fits":
            return str(ranks)
    return "-"


def choice(sizes: Iterable[str] = tuple(SIZES)) -> Iterator[str]:
    columns = [f"{method}, {words}" for method in METHODS for words in CARDS.values()]
    yield f"| model | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    sharding = {"sharding.strategy": "zero3", "sharding.activation_checkpointing": 1}
    for size in sizes:
        rows = [planned(size, **sharding, **changes) for changes in METHODS.values()]
        yield f"| {size} | {' | '.join(cell(row_of, card) for row_of in rows for card in CARDS)} |"


LEVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it was", {}),
    ("compute activations again: `sharding.activation_checkpointing=1`", {"sharding.activation_checkpointing": 1}),
    (
        "rows one by one: `training.micro_batch_size=1 training.gradient_accumulation_steps=4`",
        {"training.micro_batch_size": 1, "training.gradient_accumulation_steps": 4},
    ),
    ("shorter rows: `data.max_length=2048`", {"data.max_length": 2048}),
    ("8-bit optimizer: `optimizer.kind=adamw_8bit`", {"optimizer.kind": "adamw_8bit"}),
    (
        "or optimizer on the host: `sharding.strategy=zero3 sharding.offload=optimizer`",
        {"optimizer.kind": "adamw", "sharding.offload": "optimizer"},
    ),
    ("or LoRA: `adapter.kind=lora model.dtype=bfloat16`", {"sharding.offload": "none", **METHODS["LoRA"]}),
    ("then QLoRA: `adapter.quantize=nf4`", {"adapter.quantize": "nf4"}),
)
"""Each with those above it. One that begins with `or` is in place of the one above, and compared with shorter rows."""


def levers(ranks: int = 8) -> Iterator[str]:
    yield "| change | peak, GiB | saves, GiB |"
    yield "|---|---|---|"
    changes: dict[str, Any] = {"training.micro_batch_size": 4, "sharding.strategy": "zero3"}
    full = peak = 0.0
    for words, more in LEVERS:
        changes |= more
        before = full if words.startswith("or ") else peak
        peak = planned("8B", **changes)("h100_sxm", ranks).peak.total / GIB
        yield f"| {words} | {peak:.1f} | {f'{before - peak:.1f}' if before else ''} |"
        full = peak if "data.max_length" in words else full


def put(page: Path, lines: Iterator[str]) -> None:
    """Writes a table between the two marks of a page."""
    text = page.read_text(encoding="utf-8")
    table = "\n".join(lines)
    made = re.sub(
        r"(<!-- sizes\.py -->\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL
    )
    page.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    put(DOCS / "out_of_memory.md", levers())
    put(DOCS / "choose.md", choice())
