"""Reads models that were quantised before they were saved: NF4 as transformers and bitsandbytes write it.

For a matrix the files hold the packed values, the scales, a JSON text of the rest (`quant_state`), and in double
quantisation the scales' own scales. A rank reads its rows of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from toolkit.errors import BadInputError
from toolkit.model.quantised.quantised import (
    BLOCK,
    NESTED_BLOCK,
    SCALE_BYTES,
    Quantisation,
    QuantisedLinear,
    quantise_layers,
    quantised_layers,
)
from toolkit.model.weights.weights import SafetensorsWeights, places_of, readable
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.fsdp2.shards import Rows

ITEM_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an item of safetensors' types that can hold quantised weights, `quant_storage` in bitsandbytes."""

STATE = "weight.quant_state.bitsandbytes__nf4"


def take_quantisation(config: PretrainedConfig, section: AdapterSection | None, name: str) -> dict[str, Any] | None:
    """Removes the section about quantisation from a configuration and returns it; None if it has none.

    Raises:
        BadInputError: if weights of this quantisation are not supported, or the recipe does not train adapters.
    """
    found = config.__dict__.pop("quantization_config", None)
    if found is None:
        return None
    how: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method, kind = how.get("quant_method", "bitsandbytes"), how.get("bnb_4bit_quant_type")
    problem = f"model.name_or_path: the weights of {name!r} are quantised (quantization_config in its config.json: "
    if str(method) != "bitsandbytes" or not how.get("load_in_4bit") or kind != "nf4":
        bits = " in 8 bits" if how.get("load_in_8bit") else ""
        what = f"{method}{f' {kind}' if how.get('load_in_4bit') else bits}"
        raise BadInputError(
            f"{problem}{what}), and only bitsandbytes' nf4 can be read as it is; name the model that they were "
            "quantised from, with adapter.quantize=nf4 to train in as little memory"
        )
    if section is None or section.kind == "none":
        raise BadInputError(
            f"{problem}{method} {kind}), and only adapters can be trained on them; set adapter.kind=lora, or name the "
            "model that they were quantised from"
        )
    if section.quantize != "none":
        raise BadInputError(
            f"{problem}{method} {kind}), so adapter.quantize has no effect; remove it, or name the model that they "
            "were quantised from"
        )
    return how


def quantise_as_stored(model: PreTrainedModel, how: dict[str, Any]) -> None:
    """Quantises the layers that transformers had quantised when it saved the model."""
    skipped = how.get("llm_int8_skip_modules")
    head = model.get_output_embeddings()
    paths = [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and (module is not head if skipped is None else should_convert_module(path, skipped))
    ]
    quantise_layers(model, Quantisation("nf4", bool(how.get("bnb_4bit_use_double_quant")), stored=True), paths)


class StoredNF4:
    """Reads the bytes of a folder that transformers has written, under the names of quantised layers.

    Args:
        source: the model's name, for errors.
        model: the model with its quantised layers, on the meta device.
        look: called with each tensor that is read and not quantised.

    Raises:
        BadInputError: if tensors are missing or do not fit the layers.
    """

    def __init__(
        self, source: str, folder: Path, model: PreTrainedModel, look: Callable[[str, torch.Tensor], None]
    ) -> None:
        self._layers = dict(quantised_layers(model))
        inside = {f"{path}.{name}" for path, layer in self._layers.items() for name, _ in layer.named_parameters()}
        inside -= {f"{path}.bias" for path in self._layers}
        plain = [name for name in model.state_dict() if name not in inside]
        packed = [f"{path}.{part}" for path, layer in self._layers.items() for part in _stored_parts(layer)]
        with readable(source):
            self._files = places_of(folder, model, [*plain, *packed])
            missing = [name for name in [*plain, *packed] if name not in self._files]
            if missing:
                raise BadInputError(
                    f"model.name_or_path: {len(missing)} tensors of {source!r} are missing from its files, for example "
                    f"{missing[0]}; name a model that transformers has saved in bitsandbytes' nf4"
                )
            self._states = {path: self._state(source, path, layer) for path, layer in self._layers.items()}
            parameters = dict(model.named_parameters(remove_duplicate=False))
            self._require_sizes(source, {name: parameters[name] for name in plain if name in parameters})
        self._plain = SafetensorsWeights(self._files, look)

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `toolkit.model.weights.weights.Weights`."""
        path, _, part = name.rpartition(".")
        layer = self._layers.get(path)
        if layer is None or part == "bias":
            return self._plain.read(name, like, rows)
        if part == "weight":
            return self._bytes(f"{path}.weight", rows[0], BLOCK // 2)
        width = 1 if layer.quantisation.double else SCALE_BYTES
        if part == "weight_absmax":
            return self._bytes(f"{path}.weight.absmax", rows[0], width)
        offset = torch.tensor([self._states[path]["nested_offset"]], dtype=torch.float32).view(-1, 1).view(torch.uint8)
        largest = self._bytes(f"{path}.weight.nested_absmax", slice(0, layer.weight_nested.shape[0] - 1), SCALE_BYTES)
        return torch.cat([offset, largest])[rows]

    def _bytes(self, name: str, rows: slice, width: int) -> torch.Tensor:
        """Returns rows of `width` bytes of a stored tensor of any type: (rows, width)."""
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(stored)
            each = ITEM_BYTES[found.get_dtype()]
            row: torch.Tensor = found[rows.start * width // each : rows.stop * width // each]
            return row.contiguous().view(-1).view(torch.uint8).view(-1, width)

    def _state(self, source: str, path: str, layer: QuantisedLinear) -> dict[str, Any]:
        file, stored = self._files[f"{path}.{STATE}"]
        with safe_open(file, framework="pt") as opened:
            state: dict[str, Any] = json.loads(bytes(opened.get_tensor(stored).tolist()))
        needed = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(layer.shape)}
        if layer.quantisation.double:
            needed["nested_blocksize"] = NESTED_BLOCK
        odd = [f"{key} is {state.get(key)}, not {value}" for key, value in needed.items() if state.get(key) != value]
        if odd:
            raise BadInputError(
                f"model.name_or_path: {path} of {source!r} is quantised in another way: {'; '.join(odd)}; name the "
                "model that it was quantised from, with adapter.quantize=nf4"
            )
        return state

    def _require_sizes(self, source: str, plain: dict[str, torch.Tensor]) -> None:
        """Raises BadInputError for tensors that are cut short or longer than the model's."""
        needed = {name: (parameter.numel(), "values") for name, parameter in plain.items()}
        for path, layer in self._layers.items():
            needed[f"{path}.weight"] = layer.weight.numel(), "bytes"
            needed[f"{path}.weight.absmax"] = layer.weight_absmax.numel(), "bytes"
            if layer.quantisation.double:  # the first row is of the state
                needed[f"{path}.weight.nested_absmax"] = layer.weight_nested.numel() - SCALE_BYTES, "bytes"
        odd = []
        for name, (count, unit) in needed.items():
            file, stored = self._files[name]
            with safe_open(file, framework="pt") as opened:
                found = opened.get_slice(stored)
                held = math.prod(found.get_shape())
                held *= ITEM_BYTES.get(found.get_dtype(), 8) if unit == "bytes" else 1
            if held != count:
                odd.append(f"{name} has {held:,} {unit}, not {count:,}")
        if odd:
            raise BadInputError(
                f"model.name_or_path: {len(odd)} tensors of {source!r} have another size than its config.json says: "
                f"{odd[0]}; download it again, or name another model"
            )


def _stored_parts(layer: QuantisedLinear) -> list[str]:
    nested = ["weight.nested_absmax"] if layer.quantisation.double else []
    return ["weight", "weight.absmax", STATE, *nested]
