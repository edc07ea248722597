"""Linear layers whose weights a model's code reads itself, instead of calling the layer.

Mamba multiplies by `self.dt_proj.weight`, the indexers of sparse attention cast to `self.weights_proj.weight.dtype`.
Whatever is in the place of such a layer must have its weights, as numbers of the type of compute: a quantised
layer has bytes. An adapter's product is added by calling the layer, so it is not in the weights that are read.

Some layers are called without gradients: the indexers of sparse attention choose tokens, which nothing is learned from.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

_SETS_UP = ("__init__", "init_", "_init", "reset_parameters", "tie_weights", "resize_", "get_", "set_")
"""How methods begin that run before training, or not at all."""

_OF_THE_TENSOR = ("dtype", "device", "shape", "ndim")
"""Attributes that say nothing of the numbers."""


def read_weights(model: nn.Module, *, numbers: bool = False) -> set[str]:
    """Returns the paths of the linear layers whose `weight` the model's code reads.

    Only the code of the model's classes is looked at; nothing runs. A name that is not reached from `self` counts for
    every layer whose path ends so.

    Args:
        numbers: leave out those of which only the type, the device or the shape is read.
    """
    found: set[str] = set()
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for path, module in model.named_modules():
        kind: Any = type(module)
        for owner, layer, attribute in _weights_in_code(kind):
            if numbers and attribute in _OF_THE_TENSOR:
                continue
            if owner == "self":
                found.add(f"{path}.{layer}".lstrip("."))
            else:
                found |= {other for other in linear if f".{other}".endswith(f".{layer}")}
    return found & linear


def without_gradients(model: nn.Module) -> set[str]:
    """Returns the paths of linear layers inside indexers, and in modules whose `forward` runs without gradients."""
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    kinds: dict[str, Any] = {path: type(module) for path, module in model.named_modules()}
    frozen = [path for path, kind in kinds.items() if _computes_without_gradients(kind)]
    return {path for path in linear if any(f"{path}.".startswith(f"{outer}.") for outer in frozen)}


@cache
def _computes_without_gradients(kind: Any) -> bool:
    if kind.__module__.startswith(("torch.", "peft.")):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    decorators = [each for node in tree.body if isinstance(node, ast.FunctionDef) for each in node.decorator_list]
    is_indexer = kind.__name__.endswith("Indexer")  # chooses tokens by their largest scores; Qwen 4's has no decorator
    return is_indexer or any(word in ast.unparse(each) for each in decorators for word in ("no_grad", "inference_mode"))


@cache
def _weights_in_code(kind: type) -> frozenset[tuple[str, str, str]]:
    """For each `owner.layer.weight` in a class: the owner's name, the layer's path from it, and what is asked of it."""
    if kind.__module__.startswith(("torch.", "peft.")):
        return frozenset()
    return frozenset(entry for base in kind.__mro__[:-1] for entry in _in_class(base))


@cache
def _in_class(kind: type) -> frozenset[tuple[str, str, str]]:
    if kind.__module__.startswith(("torch.", "peft.", "transformers.modeling_")):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()  # made by a program; the check before the first step compares what it computes
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nodes = [node for method in methods if not method.name.startswith(_SETS_UP) for node in _run_by(method)]
    asked = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(
        (*place, asked.get(id(node), ""))
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr == "weight" and (place := _place(node.value))
    )


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the node and what is inside, without branches that transformers keeps for tensor parallelism."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "pretraining_tp" in ast.unparse(child.test)):
            yield from _run_by(child)


def _place(node: ast.expr) -> tuple[str, str] | None:
    """`self.a.b` -> ("self", "a.b"); None for anything else than names with dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, ".".join(reversed(parts))) if isinstance(node, ast.Name) and parts else None
