"""Loads a model that is larger than a device: each rank holds a share of every block, and gathers one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, GenerationConfig

from toolkit import ranks
from toolkit.errors import BadInputError
from toolkit.generation.text.load import (
    Loaded,
    Place,
    adapter_base,
    adapter_quantisation,
    beginning,
    find_model,
    positions_of,
    stop_tokens,
    tokenizer_of,
)
from toolkit.model.adapters.adapters import base_of
from toolkit.model.load import load
from toolkit.model.structure.model_parts import LANGUAGE, PROJECTOR, VISION
from toolkit.recipe.adapter_file import started_settings
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.sharding.apply import apply
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.plan.strategy import STRATEGIES
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units
from toolkit.terminal import format_bytes


@contextmanager
def sharded_model(source: str, dtype: str, device: str) -> Iterator[Loaded]:
    """Loads a model and its tokenizer, as `load_model` does, on all ranks together. Collective.

    All ranks run each forward together, on the same tokens, as zero3 does in training.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        BadInputError: if it cannot be loaded, generates no text, or is too large for these devices.
    """
    place = find_model(source)
    base = adapter_base(place) if place.is_adapter else place
    tokenizer = tokenizer_of(place, base)
    config = AutoConfig.from_pretrained(base.name, trust_remote_code=False)
    stored = str(config.dtype or "float32").removeprefix("torch.")
    section = ModelSection(name_or_path=base.name, dtype=stored if dtype == "auto" else dtype)  # type: ignore[arg-type]
    objective = "seq2seq" if config.is_encoder_decoder else "causal_lm"
    parts = (LANGUAGE, PROJECTOR, VISION)  # any may have adapters, and none is trained here
    loaded = load(section, tokenizer, 0, adapter=_adapter_section(place, base), objective=objective, parts=parts)
    inner = base_of(loaded.model)  # adapters are inside it
    if len(tokenizer) > inner.get_input_embeddings().weight.shape[0]:
        raise BadInputError(f"{source!r}: the adapter has added tokens; run toolkit merge, and name the merged folder")
    for parameter in inner.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():  # adapters are trained in float32
            parameter.data = parameter.data.to(inner.dtype)
    units = plan_units(inner)
    _require_room(source, device_bytes(units, ranks.world_size()), device)
    mesh = init_device_mesh(device, (ranks.world_size(),))
    apply(inner, units, STRATEGIES["zero3"], mesh, "no", lambda: True, load_weights=loaded.load_weights)
    inner.eval()
    inner._is_fsdp_managed_module = True  # transformers' mark: `generate` goes on until every rank has ended
    stops = stop_tokens(inner, tokenizer)
    inner.generation_config = GenerationConfig(**beginning(inner))
    reads = bool(config.is_encoder_decoder)
    with UnitStates(inner).generating():
        yield Loaded(source, inner, tokenizer, stops, positions_of(inner), reads, collective=True)


def _adapter_section(place: Place, base: Place) -> AdapterSection | None:
    """Returns the settings of an adapter, as a run has them that continues it."""
    if not place.is_adapter:
        return None
    quantised = adapter_quantisation(place, base) or {}
    bits: dict[str, Any] = {}
    if quantised:
        bits["quantize"] = "nf4" if quantised.get("load_in_4bit") else "int8"
        bits["double_quantization"] = bool(quantised.get("bnb_4bit_use_double_quant"))
    return AdapterSection(kind="lora", start_from=place.name, **bits, **started_settings(place.name))


def device_bytes(units: UnitPlan, num_ranks: int) -> int:
    """Returns the bytes of weights that each rank holds at once: its shares, the root, and two gathered units."""
    root = sum(unit.num_bytes for unit in units.units if unit.kind == "root")
    largest = max(unit.num_bytes for unit in units.units if unit.kind != "root")
    return units.num_bytes // num_ranks + root + 2 * largest


def _require_room(source: str, needed: int, device: str) -> None:
    """Raises BadInputError if a GPU has less free memory than the weights need."""
    if device != "cuda":
        return
    free = min(ranks.gather_objects(torch.cuda.mem_get_info()[0]))
    if free < needed:
        raise BadInputError(
            f"--gpus {ranks.world_size()}: {source!r} needs {format_bytes(needed)} on each GPU for weights alone, and "
            f"{format_bytes(free)} are free; take more GPUs, or --dtype bfloat16"
        )
