"""Finds whether a model's losses can be computed from its head's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from toolkit.errors import first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import unset_fake_temporarily
from toolkit.objectives.losses.fused_linear_cross_entropy import LOGITS_BIAS, AfterHead, HeadLoss
from toolkit.sharding.tensor.cut import ranks_of_head


def find_head_loss(model: nn.Module) -> HeadLoss | str:
    """Returns what computes the losses of `model` from its head's inputs, or why that is impossible.

    This runs the model's own forward without its decoder and with made-up outputs of its head, to see what the model
    does to them. Nothing is computed with parameters, so they may be on any device, on meta, sharded or fake.
    """
    base = base_of(model)
    try:
        head, decoder = base.get_output_embeddings(), base.get_decoder()
    except (AttributeError, NotImplementedError):
        head = decoder = None
    name = type(base).__name__
    body = None if head is None or decoder is None else _without_head(base, head, decoder)
    if head is None or body is None:
        return f"{name} does not tell its head from its decoder"
    is_cut = ranks_of_head(head) is not None
    if type(head).forward is not nn.Linear.forward or ("forward" in vars(head) and not is_cut):
        return f"the head of {name} is a {type(head).__name__}, not a plain Linear"
    try:
        with unset_fake_temporarily():
            after = _find_after_head(base, head, body)
    except Exception as error:  # whatever the code of a model raises
        return f"the head of {name} cannot be tried alone ({type(error).__name__}: {first_line(error)})"
    return after if isinstance(after, str) else HeadLoss(base, head, after, hasattr(base, LOGITS_BIAS))


def _without_head(base: Any, head: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """Returns the largest part of `base` that computes the head's inputs and nothing after them; None if it has none.

    A multimodal model's part around its decoder looks for places of images, which needs values of parameters.
    """
    if head in decoder.modules():  # Llama 4 and Kosmos-2.5 call a model with its head their decoder
        return getattr(decoder, "model", None)
    if getattr(base.config, "is_encoder_decoder", False):
        return decoder
    path = next((path for path, found in base.named_modules() if found is decoder), "").split(".")
    around = (base.get_submodule(".".join(path[: length + 1])) for length in range(len(path)))
    return next((module for module in around if head not in module.modules()), decoder)


class _StandIn(nn.Module):
    """Replaces a module's forward and drops its hooks; everything else comes from the real module."""

    def __init__(self, real: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._real = [real]  # in a list, so that it is not registered
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"][0], name)


class _OnlyHidden(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output with hidden states only; every other attribute is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@torch.no_grad()
def _find_after_head(base: Any, head: Any, body: nn.Module) -> AfterHead | str:
    """Returns what the model does to its head's outputs, or why `AfterHead` cannot describe it."""
    z = _probe_logits(head.out_features)
    calls = 0

    def forward(_hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return z.clone()

    width = getattr(base.config.get_text_config(), "hidden_size", head.in_features)
    hidden = torch.zeros((*z.shape[:2], width), dtype=head.weight.dtype, device=head.weight.device)
    outputs = _OnlyHidden(last_hidden_state=hidden)
    ids = torch.zeros(z.shape[:2], dtype=torch.long, device=hidden.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(base.config, "is_encoder_decoder", False):  # stands for an encoder that has run
        inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "decoder_input_ids": ids}
    with ExitStack() as stack:
        stack.enter_context(_forward_replaced(base, body, lambda *_args, **_kwargs: outputs))
        stack.enter_context(_forward_replaced(base, head, forward))
        stack.enter_context(_logits_bias_zeroed(base))
        found = type(base).forward(base, **inputs, use_cache=False).logits.cpu()
    name = type(base).__name__
    if calls != 1:
        return f"{name} calls its head {calls} times, not once"
    after = _fit_scale_and_cap(z, found) if found.shape == z.shape else None
    if after not in (None, AfterHead()) and hasattr(base, LOGITS_BIAS):
        after = None
    return after or f"{name} does more to its logits than to scale or cap them"


@contextmanager
def _forward_replaced(base: nn.Module, module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    path = next(path for path, found in base.named_modules() if found is module)
    parent, name = base.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    setattr(parent, name, _StandIn(module, forward))
    try:
        yield
    finally:
        setattr(parent, name, module)


@contextmanager
def _logits_bias_zeroed(base: Any) -> Iterator[None]:
    """Replaces the bias of the logits by zeros; `check_head_loss` covers its values."""
    bias = getattr(base, LOGITS_BIAS, None)
    if bias is None:
        yield
        return
    setattr(base, LOGITS_BIAS, torch.zeros(bias.shape))
    try:
        yield
    finally:
        setattr(base, LOGITS_BIAS, bias)


def _probe_logits(vocabulary: int) -> torch.Tensor:
    """Returns made-up outputs of a head, (1, 5, V): ones, then both signs from near 0 to what saturates any cap."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.01, 1.0, 40.0, 1e6])[:, None]
    rows = sizes * (2 * torch.rand((4, vocabulary), generator=draw) - 1)
    return torch.cat([torch.ones((1, vocabulary)), rows])[None]


def _fit_scale_and_cap(z: torch.Tensor, found: torch.Tensor) -> AfterHead | None:
    """Returns the scale and the cap that turn `z` into `found`, both (1, 5, V), in float32's precision; else None."""
    z, found = z.double(), found.double()
    linear = AfterHead(scale=float(found[0, 0, 0]))
    small, large = z[0, 1].abs().argmax(), z[0, 4].abs().argmax()
    cap = float(found[0, 4, large].abs())
    candidates = [linear]
    if cap > 0:
        # tanh(x) at x = 0.01 / cap is not quite x.
        scale = float(torch.atanh(found[0, 1, small] / cap) * cap / z[0, 1, small])
        candidates += [AfterHead(value, cap) for value in (round(scale), scale) if value > 0]
    for after in candidates:
        expected = after.scale * z
        if after.cap is not None:
            expected = after.cap * torch.tanh(expected / after.cap)
        if after.scale > 0 and torch.allclose(found, expected, rtol=2e-6, atol=1e-12):
            return after
    return None
