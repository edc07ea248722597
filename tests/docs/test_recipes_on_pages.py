"""Recipes and their keys on the pages of docs/ are those of the schema, and peers' keys are those of the peers."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import RecipeError
from toolkit.recipe.recipe import Recipe

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
COMING_FROM = ROOT / "docs/coming_from"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \|", re.MULTILINE)
SECTIONS = sorted(set(Recipe.model_fields) - {"description"})
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_0-9.]+)(?:[:=][^`]*)?`")
FILE = re.compile(r"\.(bin|py|md|yaml|json|jsonl|html|safetensors|gguf)$")
LEAST: dict[str, dict[str, Any]] = {
    "model": {"name_or_path": "model"},
    "data": {"train": "rows.jsonl", "max_length": 512},
    "optimizer": {"learning_rate": 1e-4},
    "training": {"output_dir": "outputs/run"},
}
"""What a block leaves out that is about one section alone."""


def problems_of(values: dict[str, Any]) -> list[str]:
    """What is wrong with a block of a page, once it has what every recipe needs."""
    whole = {name: {**LEAST.get(name, {}), **values.get(name, {})} for name in {**LEAST, **values}}
    if not {"max_steps", "num_epochs"} & set(whole["training"]):
        whole["training"]["max_steps"] = 10
    try:
        Recipe.from_mapping(whole)
    except RecipeError as error:
        return error.problems
    return []


def problem_of_key(key: str) -> str | None:
    """What the schema says of a key; a wrong value's problem names it, an unknown key's says that it is unknown."""
    section, _, rest = key.partition(".")
    if section == "data" and rest.startswith("train."):
        return None if rest.rpartition(".")[2] in ("path", "weight", "config", "split") else f"{key}: unknown"
    nested: Any = object()
    for word in reversed(rest.split(".")):
        nested = {word: nested}
    found = problems_of({section: nested})
    return next((line for line in found if re.match(rf"{key}: (unknown|gone)", line)), None)


def test_recipes_on_pages_are_valid() -> None:
    wrong, seen = [], 0
    for name, page in PAGES.items():
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            values = yaml.safe_load(block)
            if isinstance(values, dict) and set(values) <= set(Recipe.model_fields):
                seen += 1
                wrong += [f"{name}: {problem}" for problem in problems_of(values)]
    assert not wrong, "\n".join(wrong)
    assert seen >= 8


def keys_text(page: Path) -> str:
    """The page; where a table begins with a peer's keys, without them."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^\| `[^`]+` \|", "", text, flags=re.MULTILINE) if page.parent == COMING_FROM else text


def test_keys_of_ours_exist() -> None:
    keys = {(name, key) for name, page in PAGES.items() for key in KEY.findall(keys_text(page))}
    wrong = [f"{name}: {problem}" for name, key in keys if not FILE.search(key) and (problem := problem_of_key(key))]
    assert len(keys) > 150
    assert not wrong, "\n".join(wrong)


def test_a_key_that_does_not_exist_is_found() -> None:
    wrong = ("training.batch_size", "sharding.offload_threads", "data.columns.image", "data.train.0.share")
    assert [key for key in wrong if problem_of_key(key) is None] == []


def rows_of(page: str, heading: str) -> list[str]:
    """The keys in the first column of the table below a heading."""
    text = (COMING_FROM / page).read_text(encoding="utf-8")
    return [key for key, _ in ROW.findall(text.split(f"\n## {heading}\n")[1].split("\n## ")[0])]


def fields_of(*modules: str) -> set[str]:
    """The annotated names in the classes of installed modules, read without importing them: TRL takes seconds."""
    names = set()
    for module in modules:
        package, _, rest = module.partition(".")
        (folder,) = importlib.util.find_spec(package).submodule_search_locations or []
        tree = ast.parse((Path(folder) / f"{rest.replace('.', '/')}.py").read_text(encoding="utf-8"))
        nodes = [node for inner in tree.body if isinstance(inner, ast.ClassDef) for node in inner.body]
        names |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}
    return names


def test_keys_of_peers_exist() -> None:
    for heading, modules in (
        ("SFTConfig", ["trl.trainer.base_config", "trl.trainer.sft_config"]),
        ("DPOConfig", ["trl.trainer.base_config", "trl.trainer.dpo_config"]),
        ("TrainingArguments", ["transformers.training_args"]),
        ("LoraConfig", ["peft.tuners.lora.config"]),
    ):
        keys = rows_of("trl.md", heading)
        assert len(keys) >= 5, heading
        assert set(keys) <= fields_of(*modules), heading


def test_keys_of_accelerate_exist() -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    keys = rows_of("accelerate_fsdp.md", "The config file")
    assert len(keys) > 10
    later_than_1_13 = {"fsdp_activation_checkpointing_offload"}
    assert set(keys) - known <= later_than_1_13
