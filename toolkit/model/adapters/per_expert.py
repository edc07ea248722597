"""Writes an adapter of stacked experts once more, with an adapter of its own for each expert's matrix.

transformers 5 holds the experts of a block in one parameter, and peft's adapter of it has rows for all of them. vLLM,
SGLang and transformers 4 have an expert's matrices under the names of the base's files, and read an adapter for each.
Splitting rounds nothing: an expert has its rows of A and its columns of B. Matrices that are fused in memory share A.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.model.adapters.adapter_names import NAME, PREFIX
from toolkit.model.adapters.adapters import base_name, base_of, save_adapter, wrappers_of
from toolkit.model.adapters.expert_adapters import each_expert
from toolkit.model.weights.file_names import FileNames
from toolkit.recipe.adapter_file import PER_EXPERT

if TYPE_CHECKING:
    import peft


def write_per_expert(model: peft.PeftModel, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes the adapter by expert into a folder in `folder`, if servers have names for that.

    They have none if the base's files stack the experts, too, or if only a part of an expert is adapted.

    Args:
        state: all tensors of the adapter under peft's names, whole; none on ranks that write nothing.
    """
    names = FileNames(base_of(model), None) if state and model.active_peft_config.target_parameters else None
    split = None if names is None else by_expert(model, state, names)
    if names is not None and split is not None:
        paths = {name.partition(".lora_")[0].removeprefix(PREFIX) for name in split if ".lora_" in name}
        others = {name.rpartition(".")[0] for name in names.all()} - paths
        save_adapter(model, split, folder / PER_EXPERT, target_modules=_endings(paths, others), target_parameters=None)


def by_expert(
    model: peft.PeftModel, state: dict[str, torch.Tensor], names: FileNames
) -> dict[str, torch.Tensor] | None:
    """Returns an adapter's tensors with those of stacked experts split, or None if they cannot be.

    Args:
        state: as in `write_per_expert`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    split, every_a, marked = dict(state), list[torch.Tensor](), dict[str, torch.Tensor]()
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer) or path.endswith(".base_layer"):
            continue
        wrappers = list(wrappers_of(module))
        for parameter, (prefix, layer) in wrappers:
            keys = [f"{path}.{prefix}lora_{half}.weight" for half in "AB"]
            if keys[0] not in split:  # of embeddings
                continue
            base, count = layer.get_base_layer(), len(split[keys[0]]) // layer.r[NAME]  # of all ranks' experts
            stacked = sum(each.ndim == 3 for each in base.parameters(recurse=False))
            if count > 1 and (getattr(base, "is_transposed", False) or len(wrappers) < stacked):
                return None
            a, b = each_expert(split.pop(keys[0]), split.pop(keys[1]), count)
            # Converted as the weights are, B is cut as they are. A column more says to which A each part belongs.
            mark = torch.arange(len(every_a), len(every_a) + count).view(-1, 1, 1).expand(-1, b.shape[1], 1)
            whole = torch.cat([b.float(), mark.float()], dim=2)
            marked[base_name(f"{path}.{parameter}")] = whole if count > 1 else whole[0]
            every_a += a.unbind()
    for name, b in names.of(marked).items():
        first, last = torch.aminmax(b[..., -1])
        if first != last:  # several experts, or adapters, are one tensor of the files
            return None
        a = every_a[int(first)]
        for half, tensor in {"A": a, "B": b[:, :-1].to(a.dtype)}.items():
            split[f"{PREFIX}{name.removesuffix('weight')}lora_{half}.weight"] = tensor.clone(
                memory_format=torch.contiguous_format
            )
    return split


def _endings(paths: Iterable[str], others: Set[str]) -> list[str]:
    """Returns the shortest ends of paths, in whole words, with which none of the others ends."""

    def ends(path: str) -> list[str]:
        words = path.split(".")
        return [".".join(words[first:]) for first in reversed(range(len(words)))]

    taken = {end for other in others for end in ends(other)}
    return sorted({next((end for end in ends(path) if end not in taken), path) for path in paths})
