"""Frozen linear layers held in 4 or 8 bits (QLoRA), quantised while the weights stream in.

The packed values and their scales are ordinary frozen parameters of bytes, a row for each block of 64 weights or, in
8 bits, for each output. So FSDP2 shards, gathers and frees them as it does all others, in as many bits as they have,
and DDP, checkpointing and offload need not know. bitsandbytes has the kernels and the format that the hub has; its
own layers keep the scales whole on every rank, an eighth of the weights' size.

Reference: Dettmers et al., arXiv 2305.14314 (NF4, double quantisation); arXiv 2208.07339 (8 bits, a scale a row).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import BadInputError, first_line
from toolkit.model.weights.weights import Weights, all_rows
from toolkit.paths import install_command
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.fsdp2.shards import Rows, shard_chunk, shard_group

BLOCK = 64
"""Weights that share a scale, one after another in a matrix's rows; bitsandbytes' default."""

NESTED_BLOCK = 256
"""Number of scales that share one in double quantisation."""

PIECE = 2**20
"""Number of weights that are quantised at a time: on a CPU bitsandbytes needs some 20 bytes for each."""

SCALE_BYTES = 4
"""Bytes of a float32 scale. Scales are held as bytes because FSDP2 would cast floats to the compute dtype."""


PARTS = ("weight", "weight_absmax", "weight_nested")
"""Names of the parameters of a matrix; the last one exists only in double quantisation."""


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of frozen linear layers.

    Attributes:
        kind: nf4 for 4 bits and a scale for each block of 64 weights, int8 for 8 bits and a scale for each row.
        double: whether the scales of nf4 are held in 8 bits, with a scale for each 256 of them.
        stored: whether the base's files hold the layers so.
    """

    kind: Literal["nf4", "int8"]
    double: bool = False
    stored: bool = False

    def describe(self) -> str:
        """For people."""
        return f"{self.kind}, double quantisation" if self.double else self.kind

    def for_transformers(self, kept: list[str]) -> dict[str, Any]:
        """Arguments of transformers' BitsAndBytesConfig that make the same weights; `kept`: layers left as they are."""
        if self.kind == "int8":
            return {"load_in_8bit": True, "llm_int8_skip_modules": kept}
        how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": self.double}
        return {"load_in_4bit": True, "llm_int8_skip_modules": kept, **how}


def quantisation_of(section: AdapterSection | None) -> Quantisation | None:
    """Returns the quantisation that a recipe asks for, or None."""
    if section is None or section.quantize == "none":
        return None
    return Quantisation(section.quantize, section.double_quantization)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer, on the meta device until it is given its bytes.

    Its parameters are frozen bytes: `weight`, (blocks, 32) or in 8 bits (outputs, inputs); `weight_absmax`, the
    largest value of each block or row, (blocks, 4) or, in double quantisation, (blocks, 1); and, only in double
    quantisation, `weight_nested`, (1 + blocks / 256, 4): the offset of the scales, and the largest of each 256.

    Args:
        linear: the layer whose shape and bias it takes.
    """

    weight_absmax: nn.Parameter
    weight_nested: nn.Parameter
    nested_code: torch.Tensor

    def __init__(self, linear: nn.Linear, quantisation: Quantisation) -> None:
        nn.Module.__init__(self)  # no weights of 16 bits are made
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantisation = quantisation
        for name, (shape, dtype) in _parameter_shapes(linear, quantisation).items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        if quantisation.double:
            from bitsandbytes.functional import create_dynamic_map

            self.register_buffer("nested_code", create_dynamic_map(), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix: (outputs, inputs)."""
        return self.out_features, self.in_features

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """peft asks a layer that has this name (HQQ's) to `dequantize` itself, for DoRA; the bytes, (blocks, 32)."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Returns the matrix, (outputs, inputs), in float32."""
        return self.matrix(self.bytes())

    def matrix(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the float32 matrix, (outputs, inputs), of such bytes as `bytes` gives."""
        code = [self.nested_code.to(parts[0].device)] if self.quantisation.double else []
        return _dequantise(self.quantisation, self.shape, torch.float32, [*parts, *code])

    def read_matrix(self, weights: Weights, path: str) -> torch.Tensor:
        """Returns the float32 matrix, (outputs, inputs), read as a run does; the layer may be on meta or sharded."""
        likes = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in self.bytes()]
        return self.matrix(
            [weights.read(f"{path}.{n}", like, all_rows(like)) for n, like in zip(PARTS, likes, strict=False)]
        )

    def bytes(self) -> list[nn.Parameter]:
        """Returns the parameters that stand for the matrix, in the shapes of the class's docstring."""
        return [cast(nn.Parameter, self._parameters[name]) for name in PARTS[: 3 if self.quantisation.double else 2]]

    def packed(self) -> list[torch.Tensor]:
        """Returns the tensors in the order of `_dequantise`'s arguments."""
        return [*self.bytes(), *([self.nested_code] if self.quantisation.double else [])]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps (..., inputs) to (..., outputs), in the type of the inputs, or of autocast."""
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product = _Product.apply(inputs.to(dtype), bias, self.quantisation, self.shape, *self.packed())  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, product)


@contextmanager
def weights_as_numbers(model: nn.Module, dtype: torch.dtype) -> Iterator[set[str]]:
    """Makes the `weight` of quantised layers the matrix, (outputs, inputs), until the block ends.

    Args:
        dtype: dtype of the matrices that are read.

    Yields:
        A set that collects the paths of the layers whose weights are read.
    """
    layers, read = dict(quantised_layers(model)), set[str]()
    paths = {layer: path for path, layer in layers.items()}

    class WithNumbers(QuantisedLinear):
        @property
        def weight(self) -> torch.Tensor:  # type: ignore[override]
            packed = self._parameters["weight"]
            if isinstance(packed, DTensor):  # FSDP2 looks at what it has sharded
                return packed
            read.add(paths[self])
            return self.dequantize().to(dtype)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # torch's own product, as if the layer had never been quantised; autocast takes its type.
            bias = None if self.bias is None else self.bias.to(inputs.dtype)
            return F.linear(inputs, self.dequantize().to(inputs.dtype), bias)

    try:
        for layer in layers.values():
            layer.__class__ = WithNumbers
        yield read
    finally:
        for layer in layers.values():
            layer.__class__ = QuantisedLinear


def _parameter_shapes(linear: nn.Linear, quantisation: Quantisation) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Returns shapes and types of the parameters of a matrix."""
    outputs, inputs = linear.out_features, linear.in_features
    if quantisation.kind == "int8":
        return {"weight": ((outputs, inputs), torch.int8), "weight_absmax": ((outputs, SCALE_BYTES), torch.uint8)}
    blocks = outputs * inputs // BLOCK
    packed = {"weight": ((blocks, BLOCK // 2), torch.uint8)}
    if not quantisation.double:
        return packed | {"weight_absmax": ((blocks, SCALE_BYTES), torch.uint8)}
    nested = 1 + -(-blocks // NESTED_BLOCK)
    return packed | {
        "weight_absmax": ((blocks, 1), torch.uint8),
        "weight_nested": ((nested, SCALE_BYTES), torch.uint8),
    }


class _Product(torch.autograd.Function):
    """x W^T + b and the gradient of x. W is computed again in backward; kept, it would take 16 bits a weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        bias: torch.Tensor | None,
        quantisation: Quantisation,
        shape: tuple[int, int],
        *packed: torch.Tensor,
    ) -> torch.Tensor:
        ctx.quantisation, ctx.shape = quantisation, shape
        ctx.save_for_backward(*packed)
        return F.linear(inputs, _dequantise(quantisation, shape, inputs.dtype, packed), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed = ctx.saved_tensors  # once: checkpointing refuses a second look
        matrix = _dequantise(ctx.quantisation, ctx.shape, gradient.dtype, packed)
        return gradient @ matrix, *(None for _ in range(3 + len(packed)))


def _dequantise(
    quantisation: Quantisation, shape: tuple[int, int], dtype: torch.dtype, packed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns the matrix, (outputs, inputs), computed in float32 and rounded to `dtype`."""
    weight, absmax = packed[:2]
    if quantisation.kind == "int8":
        return (weight * (absmax.view(torch.float32) / 127)).to(dtype)
    if quantisation.double:
        nested, code = packed[2].view(torch.float32).view(-1), packed[3]
        scales = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax.view(-1), nested[1:], code, NESTED_BLOCK, torch.float32
        )
        scales += nested[0]
    else:
        scales = absmax.view(torch.float32).view(-1)
    return matrix_of_blocks(weight.view(-1, 1), scales, BLOCK, "nf4", dtype).view(shape)


# Which layers


def quantise_layers(model: nn.Module, quantisation: Quantisation, paths: list[str]) -> None:
    """Replaces each of these linear layers by a `QuantisedLinear`.

    Args:
        model: the model, on the meta device.
        paths: paths of the layers.

    Raises:
        BadInputError: if bitsandbytes is missing, `paths` is empty, or the weights of a layer do not fill blocks.
    """
    require_bitsandbytes()
    if not paths:
        raise BadInputError(
            f"adapter.quantize: {type(model).__name__} has no linear layer that can be quantised (Conv1D layers and "
            "stacked experts cannot); set adapter.quantize=none"
        )
    if quantisation.kind == "nf4":
        _require_blocks({path: model.get_submodule(path) for path in paths})
    for path in paths:
        model.set_submodule(path, QuantisedLinear(cast(nn.Linear, model.get_submodule(path)), quantisation))


@torch.no_grad()
def quantise_loaded(model: nn.Module, how: dict[str, Any] | None) -> None:
    """Quantises the layers of a model that has its weights, one after another.

    Args:
        how: the result of `Quantisation.for_transformers`; with None, nothing is quantised.
    """
    if how is None:
        return
    require_bitsandbytes()
    quantisation = Quantisation("int8" if "load_in_8bit" in how else "nf4", how.get("bnb_4bit_use_double_quant", False))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path not in how["llm_int8_skip_modules"]:
            layer = QuantisedLinear(module, quantisation)
            pack = _in_8_bits if quantisation.kind == "int8" else _in_4_bits
            weight, absmax = pack(module.weight if quantisation.kind == "int8" else module.weight.reshape(-1))
            absmax, *nested = _nested(absmax) if quantisation.double else (absmax,)
            for name, found in zip(PARTS, (weight, absmax, *nested), strict=False):
                layer.register_parameter(name, nn.Parameter(found, requires_grad=False))
            model.set_submodule(path, layer)


@torch.no_grad()
def dequantise_loaded(model: nn.Module) -> None:
    """Puts ordinary layers in float32 in place of the quantised ones, with the weights that those compute with."""
    for path, layer in list(quantised_layers(model)):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.matrix(layer.bytes()), requires_grad=False), layer.bias
        model.set_submodule(path, plain)


def _require_blocks(layers: dict[str, Any]) -> None:
    """Raises BadInputError for matrices that are not whole blocks: the rest would have no scale."""
    odd = [
        f"{path} {[layer.out_features, layer.in_features]}"
        for path, layer in layers.items()
        if layer.out_features * layer.in_features % BLOCK
    ]
    if odd:
        raise BadInputError(
            f"adapter.quantize: nf4 needs matrices of a multiple of {BLOCK} weights; {len(odd)} are not, for example "
            f"{odd[0]}; set adapter.quantize=int8 or none"
        )


def require_bitsandbytes() -> None:
    """Imports bitsandbytes.

    Raises:
        BadInputError: if it is missing or does not start.
    """
    # It reports kernels of its own that are not installed, and that nobody needs.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise BadInputError(
            f"adapter.quantize needs bitsandbytes ({first_line(error)}); {install_command('qlora')}, or set "
            "adapter.quantize=none"
        ) from error
    finally:
        logger.setLevel(level)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """Yields the quantised layers with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield path, module


def quantised_fact(model: nn.Module) -> str | None:
    """Describes how many weights are quantised, their bytes, and the other matrices; None if none are."""
    layers = dict(quantised_layers(model))
    if not layers:
        return None
    num_weights = sum(math.prod(layer.shape) for layer in layers.values())
    num_bytes = sum(p.numel() * p.element_size() for layer in layers.values() for p in layer.bytes())
    how = next(iter(layers.values())).quantisation.describe()
    inside = {f"{path}.{name}" for path, layer in layers.items() for name, _ in layer.named_parameters()}
    frozen = {n: p for n, p in model.named_parameters() if p.ndim > 1 and not p.requires_grad}
    others = {n: p.numel() * p.element_size() for n, p in frozen.items() if n not in inside}
    # A matrix once, and not for each block.
    names = sorted({re.sub(r"^.*\.\d+\.|^base_model\.model\.", "", name.replace(".base_layer", "")) for name in others})
    names = [name.removesuffix(".weight") for name in names]
    fact = f"{how}: {num_weights:,} weights in {num_bytes / num_weights:.3f} bytes each"
    share = sum(others.values()) / (num_bytes + sum(others.values()))
    return f"{fact}; {share:.1%} of the base's bytes stay as they are: {', '.join(names)}" if names else fact


def dequantised(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor | None]]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the tensors, with float32 matrices in place of their bytes, which must come one after another."""
    layers, ready = dict(quantised_layers(model)), list[Any]()
    for name, tensor in tensors:
        path, _, part = name.rpartition(".")
        layer = layers.get(path)
        if layer is None or part == "bias":
            yield name, tensor
            continue
        ready.append(tensor)
        if len(ready) == len(layer.bytes()):
            yield f"{path}.weight", None if tensor is None else layer.matrix(ready)
            ready = []


# Their bytes


class QuantisedWeights:
    """Quantises matrices while they are read: each rank the blocks that it will hold, with the bytes of one process.

    Args:
        base: the source of the matrices.
        model: the model with its quantised layers, under the names that `base` knows.
        dtype: matrices are rounded to it before they are quantised, as if they had been loaded so.
    """

    def __init__(self, base: Weights, model: nn.Module, dtype: torch.dtype) -> None:
        self._base, self._dtype = base, dtype
        self._layers = dict(quantised_layers(model))
        self._ready: dict[str, torch.Tensor] = {}

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `toolkit.model.weights.weights.Weights`. The scales of a matrix are asked for after its weights."""
        path, _, part = name.rpartition(".")
        layer = self._layers.get(path)
        if layer is None or part == "bias":
            return self._base.read(name, like, rows)
        if part != "weight":
            found = self._ready.pop(name)
            return found[rows] if part == "weight_nested" else found
        weight, absmax = self._quantised(path, layer, like, rows)
        if layer.quantisation.double:
            absmax, nested = _nested(_whole_scales(absmax, like))
            self._ready[f"{path}.weight_nested"] = nested
            absmax = absmax[rows]
        self._ready[f"{path}.weight_absmax"] = absmax
        return weight

    def _quantised(
        self, path: str, layer: QuantisedLinear, like: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows of the bytes, and of the scales that belong to them."""
        whole = torch.empty(layer.shape, dtype=self._dtype, device="meta")
        device = like.device_mesh.device_type if isinstance(like, DTensor) else "cpu"
        first, last, _ = rows[0].indices(layer.weight.shape[0])

        def read(begin: int, end: int) -> torch.Tensor:
            found = self._base.read(f"{path}.weight", whole, (slice(begin, end),))
            return found.to(device=device, dtype=self._dtype)

        if layer.quantisation.kind == "int8":
            return _in_8_bits(read(first, last))
        # The rows of the matrix in which the first and the last block lie.
        inputs, begin, end = layer.in_features, first * BLOCK, last * BLOCK
        top = begin // inputs
        flat = read(top, -(-end // inputs)).reshape(-1)
        return _in_4_bits(flat[begin - top * inputs : end - top * inputs])


def _in_4_bits(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks x 64,) -> bytes (blocks, 32) and scales (blocks, 4), both of uint8."""
    quantise = torch.ops.bitsandbytes.quantize_4bit
    # Blocks know nothing of each other: in pieces the bytes are those of the whole.
    pieces = [quantise(piece, BLOCK, "nf4", torch.uint8) for piece in torch.split(flat, PIECE) if piece.numel()]
    if not pieces:
        nothing = torch.empty(0, 1, dtype=torch.uint8, device=flat.device)
        return nothing.expand(0, BLOCK // 2), nothing.expand(0, SCALE_BYTES)
    weight = torch.cat([packed.view(-1, BLOCK // 2) for packed, _ in pieces])
    return weight, _as_bytes(torch.cat([absmax.float() for _, absmax in pieces]))


def _in_8_bits(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, inputs) -> int8 (rows, inputs) and scales (rows, 4), as bitsandbytes makes them: of float16 values."""
    if not matrix.numel():
        return matrix.to(torch.int8), torch.empty(0, SCALE_BYTES, dtype=torch.uint8, device=matrix.device)
    packed, absmax, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(matrix.to(torch.float16))
    return packed, _as_bytes(absmax.float())


def _nested(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix's scales, (blocks, 4) bytes, in 8 bits, (blocks, 1), and what they are scaled by."""
    from bitsandbytes.functional import create_dynamic_map

    scales = absmax.contiguous().view(torch.float32).view(-1)
    offset = scales.mean()
    code = create_dynamic_map().to(scales.device)
    packed, largest = torch.ops.bitsandbytes.quantize_blockwise(scales - offset, code, NESTED_BLOCK)
    return packed.view(-1, 1), _as_bytes(torch.cat([offset.view(1), largest.view(-1)]))


def _as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """(n,) of float32 -> (n, 4) of uint8."""
    return scales.contiguous().view(-1, 1).view(torch.uint8)


def _whole_scales(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the scales of all ranks' rows, (rows of `like`, 4), because their mean is the matrix's."""
    if not isinstance(like, DTensor):
        return own
    group, chunk = shard_group(like), shard_chunk(like)
    padded = own.new_zeros(chunk, SCALE_BYTES)
    padded[: own.shape[0]] = own
    whole = own.new_empty(chunk * dist.get_world_size(group), SCALE_BYTES)
    dist.all_gather_single(whole, padded, group=group)
    return whole[: like.shape[0]]


# bitsandbytes' own 4-bit layers, which transformers loads, are corrected on CPUs


def matrix_of_4_bits(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix, (outputs, inputs), that bitsandbytes has packed.

    Args:
        packed: its bytes.
        state: their `QuantState`.
        dtype: of the matrix.
    """
    from bitsandbytes.functional import dequantize_blockwise

    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return matrix_of_blocks(packed, scales.float(), state.blocksize, state.quant_type, dtype).view(state.shape)


def matrix_of_blocks(
    packed: torch.Tensor, scales: torch.Tensor, block: int, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    """Returns blocks of numbers, (blocks, `block`), from their bytes, (bytes, 1), and scales, (blocks,) in float32."""
    # One block a row: bitsandbytes' kernel for CPUs gives a block that lies in two rows the scale of another one.
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed, scales, block, kind, (len(scales), block), dtype
    )
    return found


def plain_layer(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """Returns an ordinary layer with the weights of one of bitsandbytes' 4-bit layers."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    matrix = matrix_of_4_bits(layer.weight.data, layer.weight.quant_state, dtype)
    plain.weight = nn.Parameter(matrix, requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.data.to(dtype), requires_grad=False)
    return plain


def make_exact_on_cpu(model: Any) -> None:
    """Has bitsandbytes' 4-bit layers of a model on a CPU compute with the weights that training had."""
    for path, layer in list(model.named_modules()):
        if type(layer).__name__ != "Linear4bit":
            continue
        if layer.in_features % layer.weight.quant_state.blocksize:
            model.set_submodule(path, plain_layer(layer, model.dtype))
        else:
            # The kernel for AVX-512 rounds scales and products to bfloat16, where training has float32, and fails for
            # outputs that are not multiples of 32.
            layer.support_avx512bf16_for_cpu = False
