"""What is replaced in FSDP2 is what toolkit/sharding/fsdp2/fsdp_replaced.py lists, on the records of a model alone."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from support.backend import accelerated
from support.offload_loops import KeptNorms
from support.ranks import run_on_ranks
from support.tiny import llama
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import LlamaForCausalLM

from toolkit.sharding.fsdp2.fsdp import fsdp_groups
from toolkit.sharding.fsdp2.fsdp_replaced import REPLACED


def replaced(model: Any) -> dict[str, set[str]]:
    """Class of a record -> names of its methods that an attribute of the record hides."""
    found: dict[str, set[str]] = defaultdict(set)
    for group in fsdp_groups(model):
        for record in (group, *group.fsdp_params):
            kind = type(record)
            found[kind.__name__] |= {name for name in vars(record) if callable(getattr(kind, name, None))}
    return found


def replaced_by_features() -> list[dict[str, set[str]]]:
    """Of models with offload, and with parameters in float32."""
    found = []
    for strategy, kind in (("zero3+offload", LlamaForCausalLM), ("zero3", KeptNorms)):
        model: Any = llama()
        model.__class__ = kind
        accelerator = accelerated(strategy, precision="bf16")
        found.append(replaced(accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]))
    return found


def test_the_methods_that_are_replaced_are_listed_and_no_class_is_changed() -> None:
    for of_features in run_on_ranks(replaced_by_features, 2):
        together: dict[str, set[str]] = defaultdict(set)
        for found in of_features:
            for kind, names in found.items():
                together[kind] |= names
        assert together == REPLACED
    for kind in (FSDPParamGroup, FSDPParam):
        for name in REPLACED[kind.__name__]:
            assert inspect.unwrap(getattr(kind, name)).__module__.startswith("torch."), name
