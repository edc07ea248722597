"""Copies of models that a plan runs: as `copy.deepcopy` makes them, also of tied weights and of odd modules."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from support.tiny import llama
from torch import nn

from toolkit.planning.workload.workload import copied


def told(model: nn.Module) -> dict[str, Any]:
    """What a copy has to have: names, classes, values, and which names share a tensor or a module."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {
        "modules": [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()],
        "shared": {name: first[id(tensor)] for name, tensor in tensors.items()},
        "values": {name: tensor.tolist() for name, tensor in tensors.items()},
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
    }


def test_a_copy_is_what_deepcopy_makes() -> None:
    model = llama("sdpa", tie_word_embeddings=True).eval()
    model.model.layers[0].attended = nn.MultiheadAttention(8, 2)  # which has a `__setstate__` of its own
    model.also = model.model.layers[1]  # one module under two names
    model.kept = [model.model.norm, {"one": torch.arange(3)}]  # and in a list
    model.forward = functools.partial(model.forward, use_cache=False)
    model.register_forward_hook(lambda *_: None)
    found, expected = copied(model), copy.deepcopy(model)
    assert told(found) == told(expected) == told(model)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.also is found.model.layers[1]
    assert found.kept[0] is found.model.norm
    assert found.forward.func.__self__ is found, "a bound method is the copy's"
    assert found.config is found.model.config
    ours = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers(), model.config)}
    assert not ours & {id(each) for each in (*found.modules(), *found.parameters(), *found.buffers(), found.config)}
    found.model.layers[0].self_attn._forward_pre_hooks[0] = print
    assert not model.model.layers[0].self_attn._forward_pre_hooks, "empty dictionaries are its own, too"
