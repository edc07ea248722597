"""Finds the weights of a model with experts that get adapters, as peft's `all-linear` does not know experts.

Experts are one parameter of three dimensions, (experts, rows, columns), which peft adapts by
`LoraConfig.target_parameters`. Of some families peft takes the names `gate_proj`, `up_proj` and `down_proj` for
experts wherever they stand, adapts routers, and leaves dense layers and shared experts as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.model.quantised.quantised import QuantisedLinear
from toolkit.model.quantised.read_weights import read_weights, without_gradients
from toolkit.model.structure.model_parts import untrained_modules
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.schema import AdapterSection

ROUTERS = ("gate", "router")
"""Last words of the name of a router, or of the module that holds it."""


@dataclass(frozen=True)
class Targets:
    """Targets that peft is given.

    Attributes:
        modules: paths of linear layers.
        parameters: names of parameters, of experts or of linear layers whose names peft would misread.
    """

    modules: list[str]
    parameters: list[str]


def stacked_experts(model: PreTrainedModel) -> list[str]:
    """Returns names of the parameters that hold a matrix for each expert."""
    counts = _expert_counts(model.config.to_dict())
    stacks = {
        name: parameter.shape[0] in counts
        for name, parameter in model.named_parameters()
        # A convolution's kernel has three dimensions, too.
        if parameter.ndim == 3
        and not type(model.get_submodule(name.rpartition(".")[0])).__module__.startswith("torch.nn")
    }
    # One of LongCat's two stacks has rows for its experts without weights, too.
    owners = {name.rpartition(".")[0] for name, is_counted in stacks.items() if is_counted}
    return [name for name in stacks if name.rpartition(".")[0] in owners]


def _expert_counts(config: dict[str, Any]) -> set[int]:
    nested = [value for value in config.values() if isinstance(value, dict)]
    own = {value for name, value in config.items() if "expert" in str(name) and type(value) is int and value > 1}
    return own.union(*(_expert_counts(value) for value in nested))


def targets_beside_experts(model: PreTrainedModel, experts: list[str], trained: Sequence[str]) -> Targets:
    """Returns every linear layer and all experts, without routers, head and embeddings."""
    without_effect = {*read_weights(model, numbers=True), *never_reached(model, trained)}
    linear = [path for path in _linear_layers(model) if path not in without_effect]
    misread = _taken_for_experts(model, linear)
    return Targets(
        modules=[path for path in linear if path not in misread],
        parameters=experts + [f"{path}.weight" for path in linear if path in misread],
    )


def targets_of_pattern(model: PreTrainedModel, pattern: str, experts: list[str]) -> Targets | None:
    """Returns the targets that a pattern of whole paths matches; None without a match, which peft reports.

    For some families peft itself only takes the last word of each matching path, and adapts all blocks.
    """
    try:
        matched = [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)]
        parameters = [name for name in experts if re.fullmatch(pattern, name)]
    except re.error:
        return None
    if not matched and not parameters:
        return None
    # With all others: peft takes no half of what it would fuse.
    misread = _taken_for_experts(model, [*_linear_layers(model), *matched])
    return Targets(
        modules=[path for path in matched if path not in misread],
        parameters=parameters + [f"{path}.weight" for path in matched if path in misread],
    )


def is_classifier(model: nn.Module) -> bool:
    """Tells whether a model of transformers is a classifier of texts or words."""
    return classifier_of(type(model).__name__) is not None


def classifier_of(architecture: str) -> ObjectiveSpec | None:
    """Returns the objective whose head a class of transformers has, such as `BertForTokenClassification`, or None."""
    heads = {
        spec.auto_class.removeprefix("AutoModel"): spec
        for spec in SPECS.values()
        if spec.auto_class and not spec.writes_text
    }
    return next((spec for suffix, spec in heads.items() if architecture.endswith(suffix)), None)


def names_of_heads(model: nn.Module) -> list[str]:
    """Returns last words of the paths that peft trains in full in a classifier; `pre_classifier` ends so, too."""
    if not is_classifier(model):
        return []
    heads = {path.rpartition(".")[2] for path, _ in model.named_modules() if path.endswith(("classifier", "score"))}
    return sorted(heads)


def left_out_of_all_linear(model: nn.Module, trained: Sequence[str]) -> list[str] | None:
    """Returns the names that `all-linear` leaves out besides the head, or None.

    These are a classifier's heads, which peft trains in full without knowing all of them; layers whose weights the
    model's code reads without calling the layer, so that an adapter would have no effect; and layers without gradient.
    """
    return [*names_of_heads(model), *sorted(read_weights(model, numbers=True)), *never_reached(model, trained)] or None


def never_reached(model: nn.Module, trained: Sequence[str]) -> list[str]:
    """Returns paths of the layers that get no gradient: in parts that are not trained, and in indexers."""
    return [*untrained_modules(model, trained), *sorted(without_gradients(model))]


def layers_to_quantise(model: PreTrainedModel, section: AdapterSection) -> list[str]:
    """Returns paths of the linear layers that can be quantised.

    The head, routers and layers that are trained in full stay. So do layers that peft adapts as parameters, because
    the product of an adapter is added to their weights, and layers whose weights the model's own code reads.
    """
    asked = section.target_modules
    by_path = isinstance(asked, str) and stacked_experts(model)
    stay: set[str] = _taken_for_experts(model, list(_linear_layers(model))) if by_path else set()
    if by_path and asked != "all-linear":
        stay = {path for path in stay if re.fullmatch(str(asked), path)}
    stay |= read_weights(model)
    whole = {*(section.modules_to_save or ()), *names_of_heads(model)}
    return [
        path
        for path in _linear_layers(model)
        if type(model.get_submodule(path)) is nn.Linear and path not in stay and whole.isdisjoint(path.split("."))
    ]


def layers_left_whole(base: nn.Module) -> list[str]:
    """Returns paths of the linear layers that are not quantised, as they were before peft wrapped some of them."""
    return [
        path.replace(".base_layer", "").removesuffix(".original_module")
        for path, module in base.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not isinstance(module, QuantisedLinear)
        and ".lora_" not in path
        and ".modules_to_save." not in path
    ]


def _linear_layers(model: PreTrainedModel) -> Iterator[str]:
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        # Classes derived from Linear do something else: routers that return tuples, layers in groups.
        if type(module) in (nn.Linear, Conv1D, QuantisedLinear) and module is not head and not _is_router(path):
            yield path


def _is_router(path: str) -> bool:
    *_, holder, own = ("", *path.split("."))
    # A gate of another kind may hold layers, as Kimi Linear's `forget_gate`; `shared_expert_gate` is one itself.
    is_held = holder in ROUTERS or holder.endswith("_router")
    return is_held or (own.rpartition("_")[2] in ROUTERS and not own.startswith("output_"))


def _taken_for_experts(model: PreTrainedModel, paths: list[str]) -> set[str]:
    """Returns the layers that peft would take for experts, by their names."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=paths)
    convert_peft_config_for_transformers(config, model, None)
    return set(paths) - set(config.target_modules or ())
