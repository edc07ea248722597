"""How much of a model is trained and has adapters; of one that reads more than text, of each part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from torch import nn

from toolkit.model.adapters.adapters import base_name, base_of, has_adapter, wrappers_of
from toolkit.model.quantised.quantised import QuantisedLinear, quantised_layers
from toolkit.model.structure.model_parts import parts_of

if TYPE_CHECKING:
    import peft


@dataclass(frozen=True)
class PartSize:
    """Sizes of a part of a model, in parameters.

    Attributes:
        parameters: of the model without adapters.
        trained: what the optimizer changes, adapters included.
        adapted: the share of the weights in blocks that has adapters; None without adapters.
    """

    parameters: int = 0
    trained: int = 0
    adapted: float | None = None


def part_sizes(model: nn.Module) -> dict[str, PartSize]:
    """Returns the sizes by part, in words of `model.train`; empty if the model reads text alone."""
    base = base_of(model)
    packed = {id(parameter) for _, layer in quantised_layers(base) for parameter in layer.bytes()}
    whole = {path: math.prod(layer.shape) for path, layer in quantised_layers(base)}
    sizes: dict[str, PartSize] = {}
    parameters = dict(base.named_parameters())
    for name, part in parts_of(base).items():
        size, parameter = sizes.get(part, PartSize()), parameters[name]
        # Of a quantised layer once, whatever tensors its bytes are held in.
        count = whole.pop(_layer_of(name), 0) if id(parameter) in packed else parameter.numel()
        sizes[part] = replace(
            size,
            parameters=size.parameters + (0 if is_of_adapter(name) else count),
            trained=size.trained + (count if parameter.requires_grad else 0),
        )
    if not has_adapter(model):
        return sizes
    adapted = cast("peft.PeftModel", model)
    return {part: replace(size, adapted=adapted_share(adapted, part)) for part, size in sizes.items()}


def describe_parts(sizes: Mapping[str, PartSize]) -> str:
    """Says in a line what is trained of each part, and what is frozen."""
    return "; ".join(f"{part} {size.parameters:,} ({_what_of(size)})" for part, size in sorted(sizes.items()))


def _what_of(size: PartSize) -> str:
    if not size.trained:
        return "frozen, without gradients and optimizer state"
    if size.adapted is None:
        return "trained" if size.trained == size.parameters else f"{size.trained:,} trained"
    return f"{size.trained:,} trained, adapters on {size.adapted:.1%} of its blocks' weights"


def adapter_fact(model: peft.PeftModel, trained: Sequence[str]) -> str:
    """Which share of the weights has adapters or is trained whole, and which matrices do not; but for embeddings.

    Of a model that reads more than text the names are of the parts that are trained.
    """
    adapted, sizes = _adapted_names(model), {base_name(name): size for name, size in _matrices(model)}
    missed = {name: size for name, size in sizes.items() if name not in adapted}
    fact = f"on {1 - sum(missed.values()) / sum(sizes.values()):.1%} of the blocks' weights"
    parts = _parts_of_layers(base_of(model))
    reached = {name for name in missed if not parts or parts[_layer_of(name)] in trained}
    # A matrix once, and not for each block.
    names = sorted({re.sub(r"^.*\.\d+\.", "", name).removesuffix(".weight") for name in reached})
    return f"{fact}; none on {', '.join(names)}" if names else fact


def adapted_share(model: peft.PeftModel, part: str) -> float:
    """Returns the share of the weights in the blocks of a part that has adapters.

    Args:
        part: of a model that reads more than text, in words of `model.train`.
    """
    adapted, parts = _adapted_names(model), _parts_of_layers(base_of(model))
    sizes = {base_name(name): size for name, size in _matrices(model)}
    within = {name: size for name, size in sizes.items() if parts[_layer_of(name)] == part}
    return sum(size for name, size in within.items() if name in adapted) / max(1, sum(within.values()))


def _adapted_names(model: peft.PeftModel) -> set[str]:
    """Returns the names of the base's matrices that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        base_name(f"{path}.{name}")
        for path, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
        for name, _ in wrappers_of(module)
    }


def _parts_of_layers(base: nn.Module) -> dict[str, str]:
    """Returns the part of each layer's path; empty if the model reads text alone."""
    return {_layer_of(base_name(name)): part for name, part in parts_of(base).items() if not is_of_adapter(name)}


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def is_of_adapter(name: str) -> bool:
    """Tells whether a parameter of an adapted model is an adapter's, or of a copy that is trained whole."""
    return ".lora_" in name or ".modules_to_save." in name


def _matrices(model: peft.PeftModel) -> Iterator[tuple[str, int]]:
    """Returns the sizes of frozen matrices, but for embeddings and the head, which `all-linear` leaves alone."""
    base = model.get_base_model()
    head = base.get_output_embeddings()
    for path, module in base.named_modules():
        if isinstance(module, QuantisedLinear):
            yield f"{path}.weight", math.prod(module.shape)
        elif not isinstance(module, nn.Embedding) and module is not head and ".original_module" not in path:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 and not parameter.requires_grad:
                    yield f"{path}.{name}", parameter.numel()
