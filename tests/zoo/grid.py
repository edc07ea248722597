"""Runs every type with every feature, and says what came out beside transformers' own model on each row alone.

PYTHONPATH=.:tests python -m zoo.grid FEATURE [KIND ...]    writes results.json anew as it goes
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.four_bits import as_dequantised
from support.ranks import meet, run_on_ranks
from support.tiny import with_sections
from torch import nn

from zoo.kinds import LENGTHS, MAX_LENGTH, UNPADDED, Rows, kinds_of, rows_of, save_tiny, write_rows
from zoo.reference import loaded, trained, trained_in_bf16

RESULTS = Path(__file__).parent / "results.json"
STEPS, SAMPLES = 3, 4
SETTINGS = {"learning_rate": 10.0, "beta1": 0.0, "beta2": 0.0, "eps": 100.0}
"""Of AdamW: an update is 0.1 times the gradient within 1 %, so that weights tell gradients of any size."""

TOLERANCE = 2e-3
"""Largest difference of a loss, as a share of it, and of a tensor's change, as a share of its largest one."""

SMALL = 1e-3
"""Of the largest change of any tensor: smaller ones count as that large."""

EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Feature:
    """Something that a recipe asks for.

    Attributes:
        objective: `objective.kind`.
        num_ranks: it runs on.
        changes: to the recipe, by section.
        tolerance: of losses and changes, see `TOLERANCE`.
        adapted: whether adapters are trained, which are compared with peft's own.
        backend: of torch.compile, if the recipe asks for it; inductor also compiles what the others trace.
        lengths: of the rows, in tokens.
        samples: of a step.
    """

    objective: str = "causal_lm"
    num_ranks: int = 1
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    adapted: bool = False
    backend: str = "inductor"
    lengths: tuple[int, ...] = LENGTHS
    samples: int = SAMPLES

    @property
    def in_bf16(self) -> bool:
        """Whether it is compared with a reference in bf16, whose rounding is held against float32."""
        return self.changes.get("training", {}).get("mixed_precision") == "bf16"


CHECKPOINTED = {"activation_checkpointing": 1}
LORA = {"kind": "lora", "r": 4}
FEATURES = {
    "plain": Feature(),
    "by_block": Feature(
        num_ranks=2, changes={"sharding": {"strategy": "zero3", "accumulate": "by_block", **CHECKPOINTED}}
    ),
    "shared_rows": Feature(num_ranks=2, changes={"sharding": {"strategy": "zero3", "sequence": 2}}),
    "tensor": Feature(num_ranks=2, changes={"sharding": {"strategy": "zero3", "tensor": 2}}),
    "experts": Feature(num_ranks=2, changes={"sharding": {"strategy": "zero3", "experts": 2}}),
    "lora": Feature(changes={"adapter": LORA}, adapted=True),
    "nf4": Feature(changes={"adapter": {**LORA, "quantize": "nf4"}}, adapted=True),
    "offload": Feature(changes={"sharding": {"strategy": "zero3", "offload": "optimizer"}}),
    "checkpointing": Feature(changes={"sharding": {"strategy": "zero3", **CHECKPOINTED}}),
    # Each row is a sample, so that both models run the same products of matrices and round them alike.
    "bf16": Feature(
        changes={"training": {"mixed_precision": "bf16", "micro_batch_size": 1}, "data": {"packing": False}},
        tolerance=0.02,  # a few steps of bf16, which are 1/256
        lengths=UNPADDED,
        samples=8,
    ),
    "compile": Feature(changes={"training": {"compile": True}}),
    "traced": Feature(changes={"training": {"compile": True}}, backend="aot_eager"),
    "classification": Feature(objective="sequence_classification"),
    "tagging": Feature(objective="token_classification"),
    "seq2seq": Feature(objective="seq2seq"),
    "preference": Feature(objective="preference"),
    "reward": Feature(objective="reward"),
}


def recipe_of(feature: Feature, folder: Path) -> dict[str, Any]:
    """A recipe of three steps: of all rows each if they are packed, otherwise of four."""
    values: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "model"), "tokenizer": str(folder / "model/tokenizer")},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": MAX_LENGTH,
            "cache_dir": str(folder / "cache"),
            "shuffle": False,
            "add_bos": None,
        },
        "objective": {"kind": feature.objective, "router_aux_coef": 0.0},
        "optimizer": {**SETTINGS, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        # Weights are compared here, and transformers takes these tokenizers for Qwen 2's own next to its config.
        "export": {"verify": False},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": STEPS,
            "micro_batch_size": 2 if feature.num_ranks == 1 else 1,
            "max_grad_norm": None,
            "stall_minutes": None,
        },
    }
    values = with_sections(values, feature.changes)
    sharding = values.get("sharding", {})
    groups = feature.num_ranks // (sharding.get("sequence", 1) * sharding.get("tensor", 1))
    micro_batches = feature.samples // values["training"]["micro_batch_size"]
    values["training"]["gradient_accumulation_steps"] = micro_batches // groups
    return values


APART = re.compile(r"set training.micro_batch_size=1, .* training.gradient_accumulation_steps=(\d+) for the same steps")


def run(values: dict[str, Any], backend: str = "inductor") -> tuple[str, Any]:
    """On every rank: how a run of the recipe ended, and the records of its steps or what it said.

    A run whose blocks could not be compiled goes on eagerly and warns, which is a refusal here. One that must not pad
    rows pads none.
    """
    from toolkit import finetune
    from toolkit.errors import BadInputError
    from toolkit.recipe.recipe import Recipe
    from toolkit.run.stages import accelerator
    from toolkit.sharding.blocks.compiling import Compilation

    warnings.simplefilter("ignore")
    compilation = Compilation(backend)
    accelerator.Compilation = lambda: compilation  # type: ignore[assignment,misc]
    try:
        result = finetune(Recipe.from_mapping(values))
    except BadInputError as error:
        refusal = str(error)
    except Exception as error:  # whatever a user would see as a bare error
        return "crashed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        refusal = ""
    if (pads_none := APART.search(refusal)) is not None:
        apart = {"micro_batch_size": 1, "gradient_accumulation_steps": int(pads_none[1])}
        meet()
        return run({**values, "training": {**values["training"], **apart}}, backend)
    if refusal:
        return "refused", refusal
    if compilation.problem is not None:
        return "refused", f"training.compile: {compilation.describe()}"
    return "ran", [record for record in result.metrics if "learning_rate" in record]


Job = tuple[str, Feature, Path]
"""A type with a feature, and the folder of its run."""


def judged(kind: str, feature: Feature, folder: Path) -> str:
    """`right`, or what else came out of a type with a feature."""
    return all_judged([(kind, feature, folder)])[0]


def all_judged(jobs: list[Job]) -> list[str]:
    """As `judged`, of several, in one start for each number of ranks; one that ends a rank ends those after it."""
    outcomes: dict[int, str] = {}
    recipes: dict[int, dict[str, Any]] = {}
    for number, (kind, feature, folder) in enumerate(jobs):
        try:
            save_tiny(kind, feature.objective, folder / "model")
        except Exception as error:  # no small model of this type can be made
            outcomes[number] = f"untried: no tiny model: {type(error).__name__}: {' '.join(str(error).split())}"[:240]
            continue
        write_rows(feature.objective, folder / "rows.jsonl", feature.lengths)
        recipes[number] = recipe_of(feature, folder)
    ran: dict[int, list[dict[str, Any]]] = {}
    for num_ranks in sorted({jobs[number][1].num_ranks for number in recipes}):
        numbers = [number for number in recipes if jobs[number][1].num_ranks == num_ranks]
        try:
            found = run_on_ranks(runs, num_ranks, [(recipes[n], *jobs[n][1:]) for n in numbers])[0]
        except AssertionError as error:
            outcomes |= dict.fromkeys(numbers, f"crashed: {' '.join(str(error).split())[-300:]}")
            continue
        for number, (status, told) in zip(numbers, found, strict=True):
            if status == "ran":
                ran[number] = told
            else:
                outcomes[number] = f"{status}: {' '.join(told.split())}"[:400]
    if ran:
        work = [(*jobs[number][1:], records) for number, records in ran.items()]
        outcomes |= zip(ran, run_on_ranks(all_compared, 1, work)[0], strict=True)
    return [outcomes[number] for number in range(len(jobs))]


def runs(work: list[tuple[dict[str, Any], Feature, Path]]) -> list[tuple[str, Any]]:
    """On every rank: of each recipe what `run` finds; adapters are also left as they were before the first step."""
    found = []
    for values, feature, folder in work:
        meet()
        found.append(run(values, feature.backend))
        if feature.adapted and found[-1][0] == "ran":
            first = {**values, "optimizer": {**values["optimizer"], "learning_rate": 1e-30}}
            first["training"] = {**values["training"], "output_dir": str(folder / "first"), "max_steps": 1}
            meet()
            run(first)
    return found


def all_compared(work: list[tuple[Feature, Path, list[dict[str, Any]]]]) -> list[str]:
    return [compared(*each) for each in work]


def compared(feature: Feature, folder: Path, records: list[dict[str, Any]]) -> str:
    """`right`, or what differs from the reference."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = rows_of(feature.objective, feature.lengths)
    windows = windows_of(feature.objective, rows, records)[: len(records)]
    try:
        if feature.adapted:
            losses, found, expected, before = adapters_compared(folder, windows, feature)
        else:
            model = loaded(feature.objective, folder / "model")
            before = state_of(model)
            if feature.in_bf16:
                model, losses = trained_in_bf16(feature.objective, folder / "model", windows, SETTINGS)
            else:
                losses = trained(feature.objective, model, windows, SETTINGS)
            expected, found = state_of(model), state_of(loaded(feature.objective, folder / "run/export"))
    except Exception as error:
        return f"untried: the reference fails: {type(error).__name__}: {' '.join(str(error).split())}"[:240]
    worst = max(abs(record["loss"] - loss) / max(abs(loss), 1e-6) for record, loss in zip(records, losses, strict=True))
    if not worst <= feature.tolerance:
        return f"wrong: losses differ by {worst:.1e} of them"
    name, difference = largest_difference(found, expected, before)
    if not difference <= feature.tolerance:
        if (rounded := moved_by_rounding(feature, folder, windows)) > max(feature.tolerance, difference / 2):
            finer = "float32" if feature.in_bf16 else "float64"
            return f"untried: transformers' own model differs by {rounded:.1e} in {finer}: rounding hides the rest"
        return f"wrong: the change of {name} differs by {difference:.1e} of the largest"
    return "right"


def moved_by_rounding(feature: Feature, folder: Path, windows: list[Rows]) -> float:
    """How far transformers' own model is from what it learns with finer numbers, see `largest_difference`.

    In float32 from float64, or in bf16 from float32.
    """
    objective, states = feature.objective, []
    for dtype in (torch.float32, torch.float64)[: 1 if feature.in_bf16 else 2]:
        model = loaded(objective, folder / "model").to(dtype)
        before = state_of(model)
        trained(objective, model, windows, SETTINGS)
        states.append({name: tensor.double() for name, tensor in state_of(model).items()})
    if feature.in_bf16:
        model, _ = trained_in_bf16(objective, folder / "model", windows, SETTINGS)
        states.insert(0, {name: tensor.double() for name, tensor in state_of(model).items()})
    return largest_difference(states[0], states[1], {name: tensor.double() for name, tensor in before.items()})[1]


def windows_of(objective: str, rows: Rows, records: list[dict[str, Any]]) -> list[Rows]:
    """The rows of each step: all if they share samples, otherwise four after another."""
    if objective in ("causal_lm", "preference", "reward"):
        counts = {"causal_lm": "target_tokens", "preference": "pairs", "reward": "pairs"}
        all_terms = sum(len(row["ids"]) for row in rows) if objective == "causal_lm" else len(rows)
        if records[0][counts[objective]] == all_terms:
            return [rows] * STEPS
    return [[rows[(step * SAMPLES + i) % len(rows)] for i in range(SAMPLES)] for step in range(STEPS)]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def largest_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> tuple[str, float]:
    """The tensor whose change differs most, and by which share of its largest one; what float32 rounds is left out.

    Weights near 3 are 2e-7 apart, which is much where a model changes them by 3e-6, as Inkling's.
    """
    changes = {name: float((expected[name] - before[name]).abs().max()) for name in expected if before[name].numel()}
    floor = SMALL * max(changes.values())
    shares = {
        name: float(((found[name] - expected[name]).abs() - STEPS * EPSILON * expected[name].abs()).max())
        / max(change, floor, 1e-12)
        for name, change in changes.items()
    }
    name = max(shares, key=lambda name: shares[name] if shares[name] == shares[name] else float("inf"))
    return name, shares[name]


def adapters_compared(
    folder: Path, windows: list[Rows], feature: Feature
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and tensors of peft's own adapter, begun as ours was; what ours became; and how both began."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import load_file

    base = loaded(feature.objective, folder / "model")
    if feature.changes["adapter"].get("quantize") == "nf4":
        how = json.loads((folder / "run/export/base.json").read_text())["quantization"]
        as_dequantised(base, how["llm_int8_skip_modules"])
    model = PeftModel.from_pretrained(base, folder / "first/export", is_trainable=True)
    assert any(isinstance(module, BaseTunerLayer) for module in model.modules())
    before = adapter_state(model)
    losses = trained(feature.objective, model, windows, SETTINGS)
    after = adapter_state(model)
    num_tensors = len(load_file(folder / "run/export/adapter_model.safetensors"))
    assert len(before) == num_tensors, (len(before), num_tensors)
    # As peft reads it, which names some of its tensors otherwise than the file.
    model.load_adapter(folder / "run/export", "run")
    return losses, adapter_state(model, "run"), after, before


def adapter_state(model: Any, name: str = "default") -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return {key: t.detach().clone() for key, t in get_peft_model_state_dict(model, adapter_name=name).items()}


def main(name: str, kinds: list[str]) -> None:
    feature = FEATURES[name]
    for kind in kinds or kinds_of(feature.objective):
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = judged(kind, feature, Path(folder))
            except AssertionError as error:
                outcome = f"untried: the reference fails: {' '.join(str(error).split())[-200:]}"
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
        print(f"{name} {kind}: {outcome}", flush=True)
        keep(name, kind, outcome)


def keep(feature: str, kind: str, outcome: str) -> None:
    """Writes an outcome into the table."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(feature, {})[kind] = outcome
    in_order = {name: dict(sorted(results[name].items())) for name in FEATURES if name in results}
    RESULTS.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
