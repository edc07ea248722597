"""transformers' own tests of every model, on models that are sharded on one rank where a test moves them to the device.

Run by pytest in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from in_place import STRATEGY
from support.tiny import tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import test_modeling_common as suite
from toolkit.sharding.apply import apply
from toolkit.sharding.plan.strategy import STRATEGIES
from toolkit.sharding.plan.units import plan_units

ROWS, TOKENS = 2, 8
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(str(Path(tempfile.mkdtemp(), "store")), 1), rank=0, world_size=1
)
mesh = init_device_mesh("cpu", (1,))
plain_to = PreTrainedModel.to


def sharded_to(self: PreTrainedModel, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """Moves a model, and shards it with the stock calls of FSDP2 or with the backend, the first time."""
    model = plain_to(self, *args, **kwargs)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    if STRATEGY == "stock":
        blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
    else:
        apply(model, plan_units(model), STRATEGIES[STRATEGY], mesh, "no", is_last_micro_batch=lambda: True)
    return model


PreTrainedModel.to = sharded_to


def inputs(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration of a small model, and a batch of tokens."""
    config = tiny_config(kind)
    torch.manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (ROWS, TOKENS))
    return config, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


for kind in os.environ["CONFORMANCE_TYPES"].split():
    config = tiny_config(kind)
    tester = SimpleNamespace(
        prepare_config_and_inputs_for_common=lambda kind=kind: inputs(kind),
        get_config=lambda kind=kind: tiny_config(kind),
        is_training=True,
        batch_size=ROWS,
        seq_length=TOKENS,
        **{name: getattr(config, name) for name in SIZES},
    )
    members = {"model_tester": tester, "all_model_classes": (AutoModelForCausalLM._model_mapping[type(config)],)}
    globals()[kind] = type(f"Test_{kind}", (suite.ModelTesterMixin, unittest.TestCase), members)
