"""Writes the pages of docs/ that are made from the code: recipes.md, the fields of a recipe, cli.md, the commands,
combinations.md, what cannot go together, models.md and models_grid.md, what was tried of each type of transformers.

python docs/generate.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from typer.main import get_command

from toolkit.cli.app import app
from toolkit.recipe.combinations import COMBINATIONS, Combination, Reason
from toolkit.recipe.objectives.section import Section
from toolkit.recipe.problems import allowed_values, section_of
from toolkit.recipe.recipe import Recipe

DOCS = Path(__file__).parent
HEAD = """# Recipe fields

A recipe is a YAML mapping of these sections. Files that it names are relative to the recipe itself. `required` fields
have no default; `null` means unset. An override that is given twice takes its last value. Written from
`toolkit/recipe/schema.py`, which also checks it.

## The fields that most recipes set

All others have defaults that suit most runs. `toolkit init MODEL DATA` writes these for your model, rows and machine.

```yaml
model:
  name_or_path: Qwen/Qwen3-8B
  dtype: bfloat16                  # with adapters; leave it out to train all weights
data:
  train: chat.jsonl
  validation_fraction: 0.05
  max_length: 4096                 # tokens of a sample
adapter:                           # leave the section out to train all weights, at a tenth of the learning rate
  kind: lora
  r: 16
optimizer:
  learning_rate: 2.0e-4
schedule:
  kind: cosine
  warmup_fraction: 0.1
sharding:
  strategy: zero3
  activation_checkpointing: auto   # compute activations again where the plan needs the memory
training:
  output_dir: outputs/chat
  num_epochs: 2                    # or max_steps
  micro_batch_size: 1              # samples of a rank at once
  gradient_accumulation_steps: 8
  mixed_precision: bf16
  eval_every_steps: 50
checkpoint:
  every_steps: 200
logging:
  trackers: [tensorboard]
  held_out_samples: 3
```
"""


def recipe_fields() -> str:
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            parts += _sections(name, field.annotation)
    return "\n".join(parts)


def _sections(name: str, section: type[Section]) -> list[str]:
    """The section's table, and one for each kind of section in it."""
    inner = {key: section_of(field.annotation) for key, field in section.model_fields.items()}
    parts = [_section(name, section)]
    kinds: list[Any] = []
    for key, kind in inner.items():
        if kind is not None and kind not in kinds:
            kinds.append(kind)
            is_list = isinstance(kind, list)
            parts.append(_section(f"{name}.{key}.N" if is_list else f"{name}.{key}", kind[0] if is_list else kind))
    return parts


def _section(name: str, section: type[Section]) -> str:
    about = " ".join((section.__doc__ or "").split("\n\n")[0].split())
    lines = [f"{'#' * (2 + min(1, name.count('.')))} {name}\n", about + "\n"]
    lines += ["| field | default | values | what it does |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        values = ", ".join(allowed_values(field.annotation, field.metadata)).replace("|", "or")
        about = (field.description or "").replace("|", r"\|")  # a bare one would begin another column
        lines.append(f"| `{name}.{key}` | {_default(field)} | {values} | {about} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none set" if isinstance(default, Section) else f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


VALUES = {int: "N", float: "NUMBER", Path: "PATH"}
"""Type of an option -> the word that stands for its value."""

OPTIONS = "Options"
"""The group of options for which no other one is named."""


class Described(NamedTuple):
    """An argument or option in words. `group` is None for an argument."""

    words: str
    default: str
    about: str
    group: str | None


def usage(command: Any) -> str:
    """Returns the arguments of a command as they are typed, such as `MODEL DATA`."""
    given = [one for one in command.params if one.param_type_name == "argument"]
    return " ".join(_placeholder(one) if one.required or one.metavar else f"[{_placeholder(one)}]" for one in given)


def described(command: Any) -> Iterator[Described]:
    """Describes the arguments and options of a command, in order."""
    kinds = annotated_types(command)
    for one in command.params:
        if one.param_type_name == "argument":
            yield Described(_placeholder(one), "required" if one.required else "", one.help or "", None)
        elif "--help" not in one.opts:
            value = _value_word(kinds.get(one.name), one.metavar)
            words = ", ".join([*one.opts, *one.secondary_opts])
            panel = one.rich_help_panel if isinstance(one.rich_help_panel, str) else OPTIONS
            yield Described(f"{words} {value}".strip(), _default_text(one), one.help or "", panel)


def annotated_types(command: Any) -> dict[str, Any]:
    """Returns name -> type of the parameters of a command, without `None`."""
    callback = getattr(command, "callback", None)
    hints = get_type_hints(callback, include_extras=True) if callback is not None else {}
    kinds = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints.items()}
    return {name: _inner(kind) for name, kind in kinds.items()}


def _inner(kind: Any) -> Any:
    """Returns the type of a value, or of an item of a list."""
    kind = (
        next((one for one in get_args(kind) if one is not type(None)), kind) if get_origin(kind) is not list else kind
    )
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _value_word(kind: Any, given: str | None) -> str:
    return given or ("" if kind in (bool, None) else VALUES.get(kind, "TEXT"))


def _default_text(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return str(option.show_default)
    if option.secondary_opts:
        return str((option.opts if option.default else option.secondary_opts)[0])
    return "" if option.default in (None, False) else str(option.default)


CLI_HEAD = """# Commands

Written from the commands' own help. `-h` prints the same.
"""


def commands() -> str:
    return "\n".join([CLI_HEAD, *_commands("toolkit", get_command(app))])


def _commands(name: str, command: Any) -> Iterator[str]:
    """The section of a command, or those of a group's commands."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield _command(name, command)
    else:
        for key in inner:
            yield from _commands(f"{name} {key}", inner[key])


def _command(name: str, command: Any) -> str:
    about = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    lines = [f"## {name}\n", f"`{name} {usage(command)}`\n" if usage(command) else "", f"{about}\n"]
    lines += [f"```bash\n{command.epilog}\n```\n"]
    rows = sorted(described(command), key=lambda one: (one.group is not None, one.group not in (None, OPTIONS)))
    lines += ["| argument | default | what it does |", "|---|---|---|"]
    for one in rows:
        about = one.about.replace("|", "or")
        default = one.default if one.default in ("", "required") else f"`{one.default}`"
        lines.append(f"| `{one.words}` | {default} | {about} |")
    return "\n".join(line for line in lines if line) + "\n"


COMBINED_HEAD = """# What goes together

Every feature works with every other one, except for the pairs on this page. The recipe, the backend, `toolkit plan` and
`toolkit init` refuse these pairs with the same sentence. The page is written from the table that they all use,
`toolkit/recipe/combinations.py`.

The matrix has the pairs of `sharding`: an x marks one that cannot be combined, a dot one that can. The tables have all.
"""

REASONS = {
    Reason.DEFINITION: "Pairs in which one setting has no effect or contradicts the other",
    Reason.LIBRARY: "Pairs that a library does not support",
    Reason.NOT_BUILT: "Pairs that are possible, but not implemented yet",
}


def combinations() -> str:
    pairs = [(found.first.name, found.last.name) for found in COMBINATIONS if found.first.name.startswith("sharding.")]
    tables = [f"## {title}\n\n{_combined(reason)}" for reason, title in REASONS.items()]
    return "\n".join([COMBINED_HEAD, _matrix(pairs), *tables])


def _matrix(pairs: list[tuple[str, str]]) -> str:
    """Rows are what cannot go with others, columns what the others are."""
    firsts, lasts = (list(dict.fromkeys(pair[place] for pair in pairs)) for place in (0, 1))
    lines = ["| | " + " | ".join(lasts) + " |", "|---|" + "---|" * len(lasts)]
    for first in firsts:
        marks = ["x" if (first, last) in pairs or (last, first) in pairs else "." for last in lasts]
        lines.append(f"| **{first}** | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def _combined(reason: Reason) -> str:
    lines = ["| this | cannot go with | reason | instead |", "|---|---|---|---|"]
    for found in COMBINATIONS:
        if found.reason is reason:
            lines.append(f"| {found.first.name} | {found.last.name} | {_clause(found)} | {found.mend} |")
    return "\n".join(lines) + "\n"


def _clause(found: Combination) -> str:
    """Why, as a phrase of its own."""
    if not found.why:
        if found.is_idle:
            return "it would have no effect"
        return "not implemented" if found.reason is Reason.NOT_BUILT else "they contradict each other"
    clause = re.sub("^(as|which|and|where|under) ", "", found.why)
    return re.sub("^whose ", "its ", clause)


MODELS_HEAD = """# Models

A tiny model of each model type of transformers 5.23 was trained for three optimizer steps on rows of unequal lengths
(torch 2.13, CPU, float32), and compared with transformers' own model, which gets each row alone and unpadded. Of the
types that are new in 5.24, those in the grid ran on that. "Right" means that losses and the changes of all weights
agree within 2e-3. In bf16 the limit is 2e-2, against a copy that transformers runs in bf16 with its gradients summed in
float32, and rows are not packed.

"Refused" means that the run says before its first step why it cannot train this type in this way. A type that is
missing was not tried. [The grid of types](models_grid.md) has a row for each type: search it for yours.

`compile` ran torch's inductor. `traced` ran its backend `aot_eager`, which traces and differentiates blocks and writes
no code for them, in a tenth of the time. `python docs/generate.py` writes both pages from `tests/zoo/results.json`,
which `tests/zoo/grid.py` writes. That file has the whole sentence of each refusal.
"""
GRID_HEAD = """# Grid of models

Each row is a model type of transformers 5.23 or 5.24. "Right" lists the features with which its run agreed with
transformers' own model. "Refused" lists those that a run refuses before its first step, with the reason by the name
that [Models](models.md#refusals-by-reason) explains. A feature that is in neither column was not tried, does not apply,
or is hidden by rounding: transformers' own model is as far from itself in float64 (bf16: in float32). "core" is by
block, lora, nf4, offload, checkpointing, bf16 and preference together.
"""
CORE = ("by block", "lora", "nf4", "offload", "checkpointing", "bf16", "preference")
RESULTS = DOCS.parent / "tests/zoo/results.json"
REFUSALS = (
    ("later tokens", "depend on later tokens", "The model sees the token that it has to predict. Name a decoder."),
    ("no score head", "linear head called `score`", "The type has no head for rewards. Name a causal language model."),
    (
        "no positions",
        "takes no position_ids",
        "Part of a row could not say where it begins. Remove `sharding.sequence`.",
    ),
    (
        "outside attention",
        "mixes the tokens of a row elsewhere|which mix the tokens of a row outside",
        "Tokens of a row meet in a convolution, a recurrence or an indexer. Remove `sharding.sequence`.",
    ),
    (
        "no plan for heads",
        "no plan that cuts its attention by heads|the plan of transformers leaves out",
        "transformers does not say how ranks may cut its attention. Remove `sharding.tensor`.",
    ),
    (
        "other cuts",
        "cuts its .* in the style .* is not built",
        "Its plan has experts, or projections of other kinds, which are not cut. Remove `sharding.tensor`.",
    ),
    ("no shift", "needs a model that shifts labels|shifts targets to the right", "It is no encoder-decoder for text."),
    ("experts in lists", "holds its experts as stacked parameters", "The experts can't be spread over ranks."),
    ("positions mixed up", "relative positions transformers mixes up", "Labels leak, by a fault of transformers 5.24."),
    (
        "sizes for 4 bits",
        "adapter.quantize: nf4 needs matrices|no linear layer that can be quantised",
        "No layer can be held in 4 bits, or a matrix is not a multiple of a block of 64 weights.",
    ),
    ("fills a cache", "fills a cache although use_cache is off", "A second forward would append to the cache."),
    (
        "capacity",
        "experts have a capacity",
        "A row's loss depends on the rows next to it. Name a model without experts.",
    ),
    (
        "cannot run",
        "cannot run on a row of it",
        "The type needs more than text, or its code cannot run on a padded row or on shards.",
    ),
    ("shared blocks", "by_block cannot run", "Blocks share their parameters. Accumulate by micro-batch."),
    ("weights used twice", "got two gradients before one step", "Offload without clipping steps each weight once."),
    ("padding", "padding changes the logits", "A padded row has other logits than the row alone. Name another model."),
    ("run by forward", "run by its forward and not by a call", "No hook gathers its weights. Use `ddp`."),
)
"""Name, what a refusal's sentence has, what it means and what to do."""


def models() -> str:
    """Counts by feature, and refusals by reason."""
    tried = _tried_features()
    lines = [MODELS_HEAD, "## Counts\n", "| feature | types | right | refused | other |", "|---|---|---|---|---|"]
    for feature, outcomes in tried.items():
        right, refused = (sum(text.startswith(word) for text in outcomes.values()) for word in ("right", "refused"))
        rest = len(outcomes) - right - refused
        lines.append(f"| {_words(feature)} | {len(outcomes)} | {right} | {refused} | {rest} |")
    lines += ["\n## Refusals by reason\n", "| reason | features | types | what it means |", "|---|---|---|---|"]
    for reason, _, meaning in REFUSALS:
        refused = [
            (kind, feature) for feature in tried for kind, text in tried[feature].items() if reason == _why(text)
        ]
        features = ", ".join(_words(feature) for feature in tried if feature in {feature for _, feature in refused})
        if refused:
            lines.append(f"| {reason} | {features} | {len({kind for kind, _ in refused})} | {meaning} |")
    return "\n".join(lines) + "\n"


def models_grid() -> str:
    """A row for each type, under the first letter of its family."""
    tried = _tried_features()
    lines, letter = [GRID_HEAD], ""
    for family, kinds in _families(tried).items():
        if family[0] != letter:
            letter = family[0]
            lines += [f"\n## {letter.upper()}\n", "| type | right | refused |", "|---|---|---|"]
        for kind in kinds:
            found = {_words(feature): outcomes[kind] for feature, outcomes in tried.items() if kind in outcomes}
            right = ", ".join(_with_core([feature for feature, text in found.items() if text == "right"]))
            reasons: dict[str, list[str]] = {}
            for feature, text in found.items():
                reasons.setdefault(_why(text), []).append(feature)
            refused = "; ".join(f"{', '.join(_with_core(of))} ({why})" for why, of in reasons.items() if why)
            lines.append(f"| `{kind}` | {right} | {refused} |")
    return "\n".join(lines) + "\n"


def _with_core(features: list[str]) -> list[str]:
    """The features, with one word for those of `CORE` if all are among them."""
    return ["core", *(each for each in features if each not in CORE)] if set(CORE) <= set(features) else features


def _tried_features() -> dict[str, dict[str, str]]:
    """Feature -> type -> what came out, without those that rounding hides."""
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {
        feature: {kind: text for kind, text in outcomes.items() if not text.startswith("untried")}
        for feature, outcomes in results.items()
    }


def _families(tried: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """The letters that names of types begin with, and these types."""
    families: dict[str, list[str]] = {}
    for kind in sorted({kind for outcomes in tried.values() for kind in outcomes}):
        families.setdefault(re.split(r"[-_0-9]", kind)[0], []).append(kind)
    return dict(sorted(families.items()))


def _why(text: str) -> str:
    """The name of the reason of a refusal; the whole text of what is wrong or crashed; empty for what is right."""
    if text == "right":
        return ""
    if not text.startswith("refused"):
        return text.replace("|", "or")
    return next(name for name, sentence, _ in REFUSALS if re.search(sentence, text))


def _words(feature: str) -> str:
    return feature.replace("_", " ")


PAGES = {
    "recipes.md": recipe_fields,
    "cli.md": commands,
    "combinations.md": combinations,
    "models.md": models,
    "models_grid.md": models_grid,
}
"""File in docs/ -> what renders it."""

if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
