"""Measures of a step: peaks of memory, tokens and FLOPs."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.data.samples.samples import Batch
from toolkit.model.quantised.quantised import QuantisedLinear, quantised_layers
from toolkit.model.routers import experts_of_a_token


def forget_peaks(device: torch.device) -> None:
    """Resets the peaks: one process may do several runs, as a notebook does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # Linux alone has it, see proc(5)
        Path("/proc/self/clear_refs").write_text("5")


def peak_device_bytes(device: torch.device) -> int:
    """Returns the most bytes allocated on this rank's device since `forget_peaks`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def peak_host_bytes() -> int:
    """Returns the largest resident set of this process (bytes); on Linux, since `forget_peaks`."""
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Counts:
    """Counts of some micro-batches.

    Attributes:
        targets: terms of the loss's sum.
        tokens: tokens without padding.
        padded_tokens: tokens with padding, all of which the model computes.
        pairs: pairs of tokens of the same document, n^2 for n tokens; attention's work grows with them. A source of s
            and a target of t tokens have s^2 + s t + t^2.
    """

    targets: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    pairs: int = 0

    @staticmethod
    def total(counts: Iterable[Counts]) -> Counts:
        """Returns the sum of each field."""
        listed = list(counts)
        return Counts(*(sum(getattr(count, field.name) for count in listed) for field in fields(Counts)))


def counts_of(batch: Batch, targets: int) -> Counts:
    """Counts a micro-batch on the CPU. A batch without `lengths` has no padding."""
    ids = batch["input_ids"]
    lengths = batch.get("lengths", torch.full(ids.shape[:1], ids.shape[-1]))
    if "target_lengths" in batch:
        written = batch["target_lengths"]
        # Of the encoder, of the decoder, and between the two.
        pairs = lengths**2 + written**2 + lengths * written
        padded = ids.numel() + batch["labels"].numel()
        return Counts(targets, int((lengths + written).sum()), padded, int(pairs.sum()))
    if "position_ids" not in batch:
        return Counts(targets, int(lengths.sum()), ids.numel(), int((lengths**2).sum()))
    # Positions restart with each document: 1 + 3 + ... + (2 n - 1) = n^2.
    real = torch.arange(ids.shape[-1]) < lengths[:, None]
    pairs = (2 * batch["position_ids"] + 1)[real].sum()
    return Counts(targets, int(lengths.sum()), ids.numel(), int(pairs))


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward; recomputation does not count.

    Attributes:
        per_token: FLOPs of matrix products; of an encoder-decoder, those for a token of a source.
        per_pair: FLOPs of attention, for each pair of tokens of a document.
        per_target: of an encoder-decoder, the difference between a token of a target and one of a source.
    """

    per_token: float
    per_pair: float
    per_target: float = 0.0

    def of(self, counts: Counts) -> float:
        """Returns the FLOPs of the tokens without padding."""
        return self.per_token * counts.tokens + self.per_target * counts.targets + self.per_pair * counts.pairs


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Returns 6 N a token and 12 L H a pair (PaLM, arXiv 2204.02311, appendix B), less if parameters are frozen.

    A matrix takes 2 FLOPs for each parameter in forward, 2 more for the gradient of its input if a layer before it is
    trained, and 2 more for its own gradient if it is trained itself. N counts the parameters of matrix products,
    without embeddings that are not also the head. As in PaLM, causal attention counts like full attention. Encoder
    and decoder are assumed to have equally many layers.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = int(getattr(config, "num_hidden_layers", 0))
    heads = int(getattr(config, "num_attention_heads", 0))
    width = heads * int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads))
    forward, to_inputs, to_weights = _matrix_flops(model, config)
    # Attention has no weights of its own: its backward runs where that of the matrices around it does.
    backward = 2 * to_inputs / max(1.0, forward)
    whole, per_pair = forward + to_inputs + to_weights, 4.0 * (1 + backward) * layers * width
    if not getattr(config, "is_encoder_decoder", False):
        return ModelFlops(whole, per_pair)
    of_source = sum(_matrix_flops(model, config, _runs_for_source))
    return ModelFlops(of_source, per_pair, whole - 2 * of_source)


def _runs_for_source(path: str) -> bool:
    """Tells by its path whether a module of an encoder-decoder runs for the tokens of a source."""
    names = path.split(".")
    crosses = any(name in ("EncDecAttention", "encoder_attn") for name in names)
    is_key_or_value = any(name in ("k", "v", "k_proj", "v_proj") for name in names)
    return (crosses and is_key_or_value) or ("encoder" in names and "decoder" not in names)


def _matrix_flops(
    model: nn.Module, config: object, counts: Callable[[str], bool] = lambda _path: True
) -> tuple[float, float, float]:
    """Returns FLOPs of matrix products for a token: forward, gradients of inputs, and gradients of weights.

    Args:
        counts: tells whether the module of this path counts.
    """
    forward = to_inputs = to_weights = 0.0
    is_trained_before = False
    packed = {id(parameter) for _, layer in quantised_layers(model) for parameter in layer.bytes()}
    for (
        path,
        module,
    ) in model.named_modules():  # in the order in which they are registered, which is nearly that of forward
        own = list(module.parameters(recurse=False))
        if isinstance(module, QuantisedLinear) and counts(path):
            flops = 2.0 * math.prod(module.shape)
            forward, to_inputs = forward + flops, to_inputs + flops * is_trained_before
        for parameter in own if counts(path) and not isinstance(module, nn.Embedding) else ():
            if parameter.ndim not in (2, 3) or id(parameter) in packed:
                continue  # norms and biases are added or multiplied, element by element
            # A token meets so many of the experts, whose matrices stand in one parameter of three dimensions.
            num_met = experts_of_a_token(config, path) if parameter.ndim == 3 else parameter.shape[0]
            share = min(1.0, num_met / parameter.shape[0])
            flops = 2.0 * parameter.numel() * share
            forward += flops
            to_inputs += flops * is_trained_before
            to_weights += flops * parameter.requires_grad
        is_trained_before |= any(parameter.requires_grad for parameter in own)
    return forward, to_inputs, to_weights
