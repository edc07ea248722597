"""Decides how a model is cut for tensor parallelism, from the plan that transformers has of its type.

Only models are cut whose plan has the simple styles, and cuts attention by heads. All others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from toolkit.errors import BadInputError, listed

FIELD = "sharding.tensor"

COLUMNS, ROWS, GATHERED, SPLIT, SHARED = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
)
"""Styles of transformers' plans: a layer's outputs are cut, its inputs are, its outputs are and then gathered, its
inputs are whole and split; a layer is whole and runs on this rank's heads alone."""


@dataclass(frozen=True)
class TensorPlan:
    """How a model is cut.

    Attributes:
        layers: modules inside the blocks with their styles, by their paths in the model without wrappers.
        keys: paths of the layers of keys and values that stay whole, as there are fewer of their heads than ranks.
        heads: attention heads of a rank.
        key_heads: heads of keys and values of the whole model.
        blocks: paths of the blocks in order, if ranks can have some tokens alone between them. Empty if they are in
            several lists, or take more than the stream of hidden states from each other.
    """

    layers: dict[str, str]
    keys: frozenset[str]
    heads: int
    key_heads: int
    blocks: tuple[str, ...] = ()


def base_model(model: nn.Module) -> Any:
    """Returns the model without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def tensor_plan(model: nn.Module, size: int) -> TensorPlan:
    """Returns how the ranks of a tensor group cut a model.

    Args:
        model: on any device.
        size: the ranks of a group, n.

    Raises:
        BadInputError: if its type has no plan, or one with other styles; or n does not divide what is to be cut.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    kind = config.model_type
    layers = _layers(base)
    other = {path: style for path, style in layers.items() if style not in (COLUMNS, ROWS, GATHERED, SPLIT, SHARED)}
    if other:
        path, style = next(iter(other.items()))
        raise _refused(kind, f"transformers cuts its {path} in the style {style}, which is not built")
    attentions = {path.rpartition(".")[0] for path in layers if path.endswith(".q_proj") and layers[path] == COLUMNS}
    if not attentions:
        raise _refused(kind, "transformers has no plan that cuts its attention by heads (q_proj in the style colwise)")
    parents = {path.rpartition(".")[0] for path, style in layers.items() if style == COLUMNS}
    if missing := _left_out(base, layers, parents):
        raise _refused(kind, f"the plan of transformers leaves out {listed(missing)}")
    _require_vocabulary(base, kind, size)
    heads, key_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    key_heads = key_heads or heads
    if heads % size or (key_heads % size and size % key_heads):
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise BadInputError(
            f"{FIELD}: {size} does not cut the {heads} attention heads and {key_heads} key heads of {kind} evenly; set "
            f"it to one of {', '.join(map(str, allowed))}"
        )
    few = attentions if key_heads % size else ()
    keys = frozenset(f"{path}.{name}" for path in few for name in ("k_proj", "v_proj"))
    for path, style in layers.items():
        if style != SHARED and path not in keys:
            _require_layer(path, base.get_submodule(path), 1 if style in (ROWS, SPLIT) else 0, size)
    return TensorPlan(layers, keys, heads // size, key_heads, _blocks(base, parents))


def _layers(base: Any) -> dict[str, str]:
    """Returns the styles of the modules inside the blocks, by path."""
    plan: dict[str, str] = dict(getattr(base, "tp_plan", None) or {})
    found = {}
    for path, _ in base.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is not None and re.search(r"\.\d+\.", path):
            found[path] = style
    return found


def _blocks(base: Any, parents: Collection[str]) -> tuple[str, ...]:
    """Returns the paths of the blocks that have layers which are cut, in order; empty if they are in several lists."""
    found = [match[0] for path in parents if (match := re.match(r"(.*?)\.\d+(?=\.)", path))]
    lists = {path.rpartition(".")[0] for path in found}
    blocks = sorted(set(found), key=lambda path: int(path.rpartition(".")[2]))
    is_whole_list = len(lists) == 1 and len(base.get_submodule(next(iter(lists)))) == len(blocks)
    return tuple(blocks) if is_whole_list else ()


def _left_out(base: Any, layers: Collection[str], parents: Collection[str]) -> list[str]:
    """Returns the parameters that the plan does not know: matrices of blocks, and all outside of layers that are cut.

    What runs on this rank's heads alone has a gradient that is to be summed, which only the plan can tell.
    """
    found = []
    for name, parameter in base.named_parameters():
        path = re.sub(r"\.(base_layer|lora_\w+(\.\w+)?)$", "", name.rpartition(".")[0])
        is_beside = any(path == parent or path.startswith(f"{parent}.") for parent in parents)
        is_matrix = parameter.ndim > 1 and re.search(r"\.\d+\.", path) is not None
        if path not in layers and (is_beside or is_matrix):
            found.append(name)
    return found


def _require_vocabulary(base: Any, kind: str, size: int) -> None:
    """Raises BadInputError if embeddings and head cannot be cut by tokens. A head of classes or scores stays whole."""
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or type(head) not in (nn.Linear, type(None)):
        odd = table if not isinstance(table, nn.Embedding) else head
        if hasattr(odd, "lora_A") or hasattr(odd, "modules_to_save"):
            raise BadInputError(
                f"{FIELD}: adapters on embeddings or head are not cut; leave these out of adapter.target_modules and "
                "adapter.modules_to_save"
            )
        found = type(odd).__name__
        raise _refused(kind, f"its embeddings or its head are a {found}; only nn.Embedding and nn.Linear are cut")
    for length in {layer.weight.shape[0] for layer in (table, head) if layer is not None}:
        if size * (size - 1) >= length:
            raise BadInputError(f"{FIELD}: {size} ranks cannot share a vocabulary of {length} tokens; lower it")


def _require_layer(path: str, layer: Any, dim: int, size: int) -> None:
    """Raises BadInputError if a layer cannot be cut along a dimension of its weight."""
    linear = linear_of(layer)
    if type(linear) is not nn.Linear:
        raise BadInputError(
            f"{FIELD} is not possible with {path}, a {type(linear).__name__}; remove it, or the adapter or the "
            "quantisation that put it there"
        )
    if dim == 1 and linear.bias is not None and len(getattr(layer, "lora_magnitude_vector", ())):
        raise BadInputError(
            f"{FIELD} is not possible with adapter.use_dora on {path}, whose inputs ranks cut and which has a bias, as "
            "DoRA takes the bias off each rank's share of the output; set adapter.use_dora=false, or leave the layer "
            "out of adapter.target_modules"
        )
    if linear.weight.shape[dim] % size:
        what = "inputs" if dim else "outputs"
        raise BadInputError(
            f"{FIELD}: {size} does not divide the {linear.weight.shape[dim]} {what} of {path}; lower it"
        )


def linear_of(layer: Any) -> nn.Linear:
    """Returns the linear layer inside of peft's wrapper, or the layer itself."""
    return getattr(layer, "base_layer", layer)  # type: ignore[no-any-return]


def _refused(kind: str, why: str) -> BadInputError:
    return BadInputError(
        f"{FIELD} is not possible with {kind}: {why}; remove it. zero3 shards every parameter over all ranks, and "
        "sharding.sequence shares long rows"
    )
