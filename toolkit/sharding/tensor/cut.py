"""Cuts a model for tensor parallelism: each rank of a group keeps its part of the matrices, as plain tensors.

FSDP2 then shards the parts over the ranks that hold the same ones, and each shard is shown as a DTensor of the whole
parameter on the mesh of all ranks, so that optimizer, norm, checkpoints and exports see whole parameters. Layers
compute with plain tensors, and moves.py has what goes between ranks: in a block two gathers and two sums of which each
rank gets its tokens, and as many in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from toolkit.sharding.tensor.moves import TensorRanks, joined
from toolkit.sharding.tensor.plan import COLUMNS, GATHERED, ROWS, SHARED, SPLIT, TensorPlan, base_model, linear_of

Key = tuple[nn.Module, str]
"""The module that owns a parameter, and the parameter's name in it."""

CUT = "_toolkit_cut"
"""Attribute of a model that is cut, with its `Cut`."""

PARTS = "_toolkit_tensor_parts"
"""Attribute of a head whose vocabulary is cut."""


@dataclass
class Cut:
    """A model that is cut.

    Attributes:
        ranks: those of the group.
        dims: the dimension along which a parameter is cut; those that are whole are not there.
        partial: parameters that are whole, but whose gradients are each rank's share of a sum.
        shapes: the whole shapes of all parameters.
        layers: the linear layers that are cut, with the dimension of their weights and the whole weights' shapes.
        undone: actions that undo what depends on heads, each with the one that does it again.
    """

    ranks: TensorRanks
    dims: dict[Key, int] = field(default_factory=dict)
    partial: set[Key] = field(default_factory=set)
    shapes: dict[Key, torch.Size] = field(default_factory=dict)
    layers: dict[nn.Module, tuple[int, int]] = field(default_factory=dict)
    undone: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)

    def keep_part(self, owner: nn.Module, name: str, dim: int) -> None:
        """Replaces a parameter by this rank's part along `dim`."""
        whole = getattr(owner, name)
        part = whole.data.movedim(dim, 0)[self.ranks.part(whole.shape[dim])].movedim(0, dim).contiguous()
        owner.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        self.dims[owner, name] = dim

    def keep_layer(self, layer: nn.Linear, dim: int) -> None:
        """Cuts a linear layer: its outputs if `dim` is 0, its inputs if it is 1."""
        self.layers[layer] = dim, layer.weight.shape[dim]
        self.keep_part(layer, "weight", dim)
        if layer.bias is None:
            return
        if dim == 0:
            self.keep_part(layer, "bias", 0)
            return
        # One rank adds it, before the sum over all.
        self.partial.add((layer, "bias"))
        layer.forward = functools.partial(_with_bias_once, layer, self.ranks)  # type: ignore[method-assign]


def cut_of(model: nn.Module) -> Cut | None:
    """Returns how a model is cut, or None if it is not."""
    return getattr(model, CUT, None)


def ranks_of_head(head: nn.Module) -> TensorRanks | None:
    """Returns the ranks that share the vocabulary of a head, or None if it is whole."""
    return getattr(head, PARTS, None)


@torch.no_grad()
def cut_model(model: nn.Module, plan: TensorPlan, ranks: TensorRanks) -> Cut:
    """Cuts a model in place.

    Args:
        model: on any device, not sharded.
        plan: of this model, for as many ranks.
        ranks: those of the group.
    """
    cut = Cut(ranks)
    cut.shapes = {
        (owner, name): parameter.shape
        for owner in model.modules()
        for name, parameter in owner.named_parameters(recurse=False)
    }
    base = base_model(model)
    _cut_vocabulary(base, cut)
    begins: dict[str, None] = {}
    for path, style in plan.layers.items():
        layer = base.get_submodule(path)
        if style == SHARED or path in plan.keys:
            cut.partial.update(key for inner in layer.modules() for key in _own(inner))
        if style == COLUMNS:
            begins[path.rpartition(".")[0]] = None
            if path not in plan.keys:
                _cut_columns(layer, cut)
        elif style == GATHERED:
            _cut_columns(layer, cut)
            _on_input(layer, ranks.entered)
            _on_output(layer, functools.partial(ranks.gathered, length=linear_of(layer).out_features))
        elif style in (ROWS, SPLIT):
            if style == SPLIT:
                _on_input(layer, ranks.split)
            _cut_rows(layer, cut)
            _on_output(layer, ranks.left)
    for path in begins:
        _on_input(base.get_submodule(path), ranks.entered)
    if plan.blocks:
        _split_tokens(base, plan, cut, list(begins))
    if plan.keys:
        _take_own_keys(base, plan, cut)
    object.__setattr__(model, CUT, cut)
    return cut


def _split_tokens(base: Any, plan: TensorPlan, cut: Cut, parents: Sequence[str]) -> None:
    """Gives each rank some tokens between the layers that are cut. What runs on these has a share of its gradient."""
    cut.ranks.by_tokens = True
    _on_input(base.get_submodule(plan.blocks[0]), cut.ranks.began)
    _on_output(base.get_submodule(plan.blocks[-1]), cut.ranks.ended)
    inside = {module for path in parents for module in base.get_submodule(path).modules()}
    for path in plan.blocks:
        for module in base.get_submodule(path).modules():
            if module not in inside:
                cut.partial.update(key for key in _own(module) if key not in cut.dims)


def _cut_columns(layer: nn.Module, cut: Cut) -> None:
    """Cuts the outputs of a layer. Its adapters' first matrices stay whole: each rank has its share of the gradient."""
    linear = linear_of(layer)
    cut.keep_layer(linear, 0)
    for first, second in _adapters(layer):
        cut.partial.update(_own(first))
        cut.keep_layer(second, 0)
    for magnitudes in _magnitudes(layer):
        cut.keep_part(magnitudes, "weight", 0)
        cut_dora(magnitudes, cut.ranks, 0, linear.out_features)


def _cut_rows(layer: nn.Module, cut: Cut) -> None:
    """Cuts the inputs of a layer. Its adapters' second matrices stay whole, and add to each rank's share of the sum."""
    linear = linear_of(layer)
    cut.keep_layer(linear, 1)
    for first, second in _adapters(layer):
        cut.keep_layer(first, 1)
        cut.partial.update(_own(second))
    for magnitudes in _magnitudes(layer):
        cut.partial.update(_own(magnitudes))
        cut_dora(magnitudes, cut.ranks, 1, linear.in_features)


def _cut_vocabulary(base: Any, cut: Cut) -> None:
    """Cuts the embeddings, and the head if it writes text, by tokens of the vocabulary."""
    table, head, ranks = base.get_input_embeddings(), base.get_output_embeddings(), cut.ranks
    is_tied = head is not None and head.weight is table.weight
    size = table.weight.shape[0]
    _cut_table(table, size, cut)
    if head is None:
        return
    if is_tied:
        cut.dims[head, "weight"] = 0
        cut.layers[head] = 0, size
        head.weight = table.weight
        if head.bias is not None:
            cut.keep_part(head, "bias", 0)
    else:
        cut.keep_layer(head, 0)
    setattr(head, PARTS, ranks)
    _on_input(head, ranks.copied)
    head.forward = functools.partial(_whole_logits, head, ranks)


def _cut_table(table: nn.Embedding, size: int, cut: Cut) -> None:
    """Cuts the rows of an embedding table: each rank looks its own tokens up, and the rest is zero before the sum."""
    ranks, forward, whole_padding = cut.ranks, table.forward, table.padding_idx
    cut.keep_part(table, "weight", 0)
    rows = ranks.part(size)
    padding = whole_padding
    if padding is not None:
        # The row whose gradient torch leaves at zero is on one rank, at another place.
        padding = padding - rows.start if rows.start <= padding < rows.stop else None
    table.padding_idx = padding

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        if ranks.whole:
            return _looked_up_whole(table, forward, ids, size, whole_padding, ranks)
        elsewhere = (ids < rows.start) | (ids >= rows.stop)
        # A row that is not the padding's, whose gradient the mask takes away.
        found: torch.Tensor = forward((ids - rows.start).masked_fill(elsewhere, 0))
        return ranks.summed(found.masked_fill(elsewhere[..., None], 0.0))

    table.forward = look_up  # type: ignore[method-assign,assignment]


def _looked_up_whole(
    table: Any, forward: Any, ids: torch.Tensor, size: int, padding: int | None, ranks: TensorRanks
) -> torch.Tensor:
    part = table.weight
    whole = joined(part.detach(), ranks, size, 0)
    table._parameters["weight"], own, table.padding_idx = nn.Parameter(whole, False), table.padding_idx, padding
    try:
        found: torch.Tensor = forward(ids)
    finally:
        table._parameters["weight"], table.padding_idx = part, own
    return found


def _whole_logits(head: nn.Linear, ranks: TensorRanks, hidden: torch.Tensor) -> torch.Tensor:
    """Returns full logits (..., V) of hidden states (..., D)."""
    return ranks.gathered(F.linear(hidden, head.weight, head.bias), head.out_features)


def _with_bias_once(layer: nn.Linear, ranks: TensorRanks, inputs: torch.Tensor) -> torch.Tensor:
    assert layer.bias is not None
    # Times zero, so that it has a gradient on every rank.
    bias = layer.bias if ranks.index == 0 else layer.bias * 0
    return F.linear(inputs, layer.weight, bias)


def _take_own_keys(base: Any, plan: TensorPlan, cut: Cut) -> None:
    """Makes each rank take the one head of whole keys and values that its queries use."""
    ranks = cut.ranks
    for path in {path.rpartition(".")[0] for path in plan.keys}:
        attention = base.get_submodule(path)
        head = ranks.index * plan.key_heads // ranks.size
        before = attention.num_key_value_groups
        attention.num_key_value_groups = plan.heads
        undo = functools.partial(setattr, attention, "num_key_value_groups", before)
        cut.undone.append((undo, functools.partial(setattr, attention, "num_key_value_groups", plan.heads)))
        for name in ("k_proj", "v_proj"):
            layer = getattr(attention, name)
            width = linear_of(layer).out_features // plan.key_heads
            _on_output(layer, functools.partial(_columns, ranks, slice(head * width, (head + 1) * width)))


def _columns(ranks: TensorRanks, columns: slice, output: torch.Tensor) -> torch.Tensor:
    return output if ranks.whole else output[..., columns]


def _adapters(layer: Any) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    for name in getattr(layer, "lora_A", ()):
        yield layer.lora_A[name], layer.lora_B[name]


def _magnitudes(layer: Any) -> Iterator[nn.Module]:
    """Yields DoRA's modules, each with the magnitudes (outputs,) as its `weight`."""
    yield from getattr(layer, "lora_magnitude_vector", nn.ModuleDict()).values()


def _own(module: nn.Module) -> Iterator[Key]:
    yield from ((module, name) for name, _ in module.named_parameters(recurse=False))


def _on_input(module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Applies `act` to the hidden states that a module is given, its first argument or of that name."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (act(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": act(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (act(output[0]), *output[1:]) if isinstance(output, tuple) else act(output)

    module.register_forward_hook(hook)


class _WholeLinear(torch.autograd.Function):
    """A linear layer with the whole weight, gathered for forward and for backward. The weight gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, part: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(part)
        ctx.gather = gather
        return inputs @ gather(part).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (part,) = ctx.saved_tensors
        return gradient @ ctx.gather(part), None, None


@contextmanager
def whole_layers(cut: Cut) -> Iterator[None]:
    """Makes every layer compute with its whole matrices inside the `with` block, as a model that is not cut does.

    Each matrix is gathered when it is used, one after another. Gradients are those of inputs alone.
    """
    before = {layer: layer.__dict__.get("forward") for layer in cut.layers}
    for layer, (dim, length) in cut.layers.items():
        gather = functools.partial(joined, ranks=cut.ranks, length=length, dim=dim)
        layer.forward = functools.partial(_run_whole, layer, gather, dim)
    for undo, _ in cut.undone:
        undo()
    cut.ranks.whole = True
    try:
        yield
    finally:
        cut.ranks.whole = False
        for _, again in cut.undone:
            again()
        for layer, forward in before.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _run_whole(layer: Any, gather: Callable[..., torch.Tensor], dim: int, inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _WholeLinear.apply(inputs, layer.weight, gather)  # type: ignore[no-untyped-call]
    if layer.bias is None:
        return found
    return found + (gather(layer.bias.detach()) if dim == 0 else layer.bias)


# ---- DoRA on layers whose matrices ranks cut: the norms of whole rows, from each rank's part of them ----
# peft's layer scales outputs by magnitudes over the norms of the rows of W + s B A. Where ranks cut outputs, a rank has
# whole rows. Where they cut inputs, it has parts, whose squares are summed; each rank's share of the output is scaled
# alike. The norms have no gradient (arXiv 2402.09353, section 4.3).


def cut_dora(magnitudes: nn.Module, ranks: TensorRanks, dim: int, length: int) -> None:
    """Makes peft's module of a layer's magnitudes compute with matrices that are cut.

    Args:
        dim: the dimension of the layer's weight that is cut: 0 for outputs, whose magnitudes are cut too; 1 for inputs.
        length: of that dimension in the whole weight.
    """
    module: Any = magnitudes
    if dim == 1:
        module.get_weight_norm = functools.partial(_norms_of_parts, ranks)
    module.forward = functools.partial(_run, module, module.forward, ranks, dim, length)


@torch.no_grad()
def _norms_of_parts(
    ranks: TensorRanks,
    weight: torch.Tensor,
    lora_weight: torch.Tensor,
    scaling: float,
    adapter_name: str | None = None,
) -> torch.Tensor:
    """Returns the norms of whole rows (outputs,), of parts of them (outputs, inputs / n)."""
    parts = weight + scaling * lora_weight
    squares = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float32).square()
    if not ranks.is_planned:
        dist.all_reduce(squares, group=ranks.group)
    norms: torch.Tensor = squares.sqrt().to(weight.dtype)
    return norms


def _run(
    module: Any,
    forward: Callable[..., torch.Tensor],
    ranks: TensorRanks,
    dim: int,
    length: int,
    inputs: torch.Tensor,
    **given: Any,
) -> torch.Tensor:
    """Returns what is added to the layer's output, as peft's forward does; of whole matrices in `whole_layers`."""
    if not ranks.whole:
        return forward(inputs, **given)
    base, first, second, scaling = given["base_layer"], given["lora_A"], given["lora_B"], given["scaling"]
    with torch.no_grad():
        product = second.weight @ first.weight  # this rank's rows, or columns, of the whole
        weight = joined(base.weight + scaling * product, ranks, length, dim)
        scale = module.weight.detach() if dim else joined(module.weight.detach(), ranks, length, 0)
        scale = scale / torch.linalg.norm(weight, dim=1).to(scale.dtype)
    output = base(inputs) if given["base_result"] is None else given["base_result"]
    if base.bias is not None:
        output = output - joined(base.bias.detach(), ranks, length, 0)
    added: torch.Tensor = (scale - 1) * output + scale * second(first(inputs)) * scaling
    return added
