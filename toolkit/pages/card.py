"""Writes the model card, README.md of an exported folder.

Reference: Mitchell et al., "Model Cards for Model Reporting", arXiv 1810.03993. The hub reads the header.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.data.layouts.template_arguments import OF_ROW
from toolkit.errors import listed
from toolkit.pages.data_page import SUMMARY_FACTS, dropped_table, split_table
from toolkit.pages.parts.run_metrics import split_lines
from toolkit.pages.parts.story import with_limits
from toolkit.pages.run_page import STEPS, RunSummary, evaluations_table
from toolkit.paths import is_file_source, is_hub_name, source_name
from toolkit.published import for_readers, settings_for_readers
from toolkit.recipe.recipe import FILES_OF_ITEMS, NAMES_OF_FILES, Recipe, compares, read_yaml, shipped_recipes
from toolkit.recipe.yaml_values import yaml_text
from toolkit.terminal import harmless, one_line

CARD = "README.md"

AGAIN = "`recipe.yaml` in this folder trains it once more; `training.json` has the hashes of what it was trained from."

MAX_EVALUATIONS = 12
"""The most rows of the table of evaluations; of more, it has the first, the last and evenly spaced ones."""


def write_card(folder: Path, recipe: Recipe, summary: RunSummary, loading: str = "", serving: str = "") -> None:
    """Writes the card into an exported folder.

    Args:
        loading: Python that loads the model, if it is known.
        serving: a command that serves it, if one does.
    """
    text = "\n".join(map(one_line, harmless(render_card(recipe, summary, loading, serving)).split("\n")))
    (folder / CARD).write_text(text, encoding="utf-8", errors="replace")


def render_card(recipe: Recipe, summary: RunSummary, loading: str = "", serving: str = "") -> str:
    """Returns the card as Markdown. It names folders and files without their paths."""
    name = Path(recipe.training.output_dir).name
    base = _base_model_name(recipe)
    about = f"{name}, fine-tuned from {base}." if base else f"{name}, trained from random weights."
    parts = [
        f"---\n{_header(recipe)}\n---\n",
        f"# {_plain(name)}\n",
        f"{_plain(about)} {_plain(_description(recipe))}".rstrip() + "\n",
        f"## Use\n\n```python\n{loading}\n```\n" if loading else "",
        f"```bash\n{serving}\n```\n" if serving else "",
        "## Results\n",
        _evaluations(summary.metrics, summary.limits),
        "".join(f"{name.title()}: {_plain(summary.facts[name])}.\n" for name in STEPS if name in summary.facts),
        _warnings(summary.doubts),
        f"## Data\n\n{_data_table(summary.data_report)}",
        f"## Training\n\n{_table(['', ''], [[key, value] for key, value in summary.facts.items()])}\n{AGAIN}\n",
        f"## Versions\n\n{_table(['', ''], [[key, value] for key, value in summary.versions.items()])}",
        f"## Recipe\n\n````yaml\n{recipe_for_readers(recipe)}````\n",
    ]
    return "\n".join(part for part in parts if part)


def _description(recipe: Recipe) -> str:
    """Returns the user's description; that of a shipped recipe is about its model and data, which a copy replaces."""
    shipped = {read_yaml(path).get("description") for path in shipped_recipes().values()}
    return "" if recipe.description in shipped else recipe.description


def _header(recipe: Recipe) -> str:
    """Returns what the hub reads, in YAML."""
    from huggingface_hub import ModelCardData  # takes half a second

    adapter = recipe.adapter.kind != "none" and not recipe.export.merge
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": recipe.objective.spec.pipeline_task,
        "tags": ["finetune-toolkit", recipe.objective.kind, *(["lora"] if recipe.adapter.kind == "lora" else [])],
    }
    name = recipe.model.name_or_path
    if name is not None and is_hub_name(name):
        # Only a name on the hub: a folder means nothing elsewhere, and shows where the user keeps files.
        header["base_model"] = name
    hub = [source.path for source in recipe.data.train if not is_file_source(source.path)]
    return ModelCardData(**header, datasets=hub or None).to_yaml()


def _base_model_name(recipe: Recipe) -> str | None:
    name = recipe.model.name_or_path
    if name is None:
        return None
    return name if is_hub_name(name) else Path(name).name


def model_and_data(recipe: Recipe, class_name: str, is_done: bool = True) -> str:
    """Returns the name of the model, or its class if it begins with random weights, and the sources of the rows."""
    names = [source_name(source.path) for source in recipe.data.train]
    base, data = _base_model_name(recipe), listed(names, 2)
    if not is_done:
        return f"Fine-tuning {base} on {data}" if base else f"Training {class_name} on {data} from random weights"
    return f"{base} fine-tuned on {data}" if base else f"{class_name} trained on {data} from random weights"


def _evaluations(metrics: list[dict[str, Any]], limits: Sequence[str]) -> str:
    table = evaluations_table(split_lines(metrics, "eval"), MAX_EVALUATIONS)
    if not table.rows:
        return "No held-out data.\n"
    return f"{with_limits('On held-out data', limits)}:\n\n{_table(table.head, table.rows)}"


def _warnings(doubts: Sequence[str]) -> str:
    listed = "".join(f"- {_plain(for_readers(text))}\n" for text in doubts)
    return f"## Warnings\n\n{listed}" if listed else ""


def _data_table(report: dict[str, Any]) -> str:
    tables = [table for table in (split_table(report, SUMMARY_FACTS), dropped_table(report)) if table.rows]
    return "\n".join(_table(table.head, table.rows) for table in tables) + _arguments_of_rows(report)


def _arguments_of_rows(report: dict[str, Any]) -> str:
    """Lists the chat template's arguments in rows to train on; the recipe's arguments are in the recipe."""
    noted = (report.get("train") or {}).get("noted", {})
    told = {what.removeprefix(OF_ROW): found["count"] for what, found in noted.items() if what.startswith(OF_ROW)}
    listed = "".join(f"- {_plain(what)}: {count:,} rows\n" for what, count in sorted(told.items()))
    return f"\nArguments of the chat template that rows bring (`chat_template_kwargs`):\n\n{listed}" if listed else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(_plain(cell) for cell in line) + " |\n" for line in lines)


def _plain(text: str) -> str:
    """Returns text on one line, without HTML, links and images: names of files and labels are not trusted."""
    text = " ".join(harmless(text).split()).replace("\\", "\\\\")
    return text.replace("|", "\\|").replace("[", "\\[").replace("`", "\\`").replace("<", "&lt;")


def recipe_for_readers(recipe: Recipe) -> str:
    """Returns the text of `published`."""
    # Nothing in the recipe may close the fence of four backticks around it.
    return yaml_text(published(recipe), width=100).replace("````", "'''")


def published(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that may leave this machine, without nulls.

    Files and folders have their names alone, since paths show where a user keeps them. Trackers' settings are left out,
    since a key may be among them.
    """
    return _without_nulls(published_values(yaml.safe_load(recipe.to_yaml())))


def published_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a recipe as `published` does, with their nulls; an older version may lack some."""
    values = copy.deepcopy(dict(recipe))
    for section, keys in (*NAMES_OF_FILES, *PLACES):
        known = values.get(section, {})
        known |= {key: _source_names(known[key], key) for key in keys if key in known}
    values["training"]["output_dir"] = Path(values["training"]["output_dir"]).name
    values["logging"].pop("tracker_settings", None)
    return {key: settings_for_readers(value, key) for key, value in values.items()}


PLACES = (("data", ("cache_dir",)), ("checkpoint", ("to", "resume")))
"""Section -> keys that name folders of the machine, besides those of `NAMES_OF_FILES`."""


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the mapping without nulls and mappings that become empty; the model's config keeps its own nulls."""
    kept = {
        key: _without_nulls(value) if isinstance(value, dict) and key not in ("config", "template_arguments") else value
        for key, value in values.items()
    }
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _source_names(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_source_names(item, key) for item in value]
    if isinstance(value, dict):
        return value | {name: _source_names(value[name], name) for name in FILES_OF_ITEMS if name in value}
    return source_name(value) if isinstance(value, str) and not compares(key, value) else value
