"""What a step takes: peaks of memory, and FLOPs."""

from __future__ import annotations

import resource
import sys

import torch
from transformers import PreTrainedModel


def peak_device_bytes(device: torch.device) -> int:
    """Most bytes ever allocated on this rank's device; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops_per_token(model: PreTrainedModel, max_length: int) -> float:
    """Forward and backward of one token: 6 N + 12 L H T (PaLM, arXiv 2204.02311, appendix B).

    N are the parameters of matrix products: all but input embeddings that are not also the head. Backward
    makes no gradient of frozen ones: 4 N.
    """
    config = getattr(model, "config", None)
    flops: float = sum(
        (6.0 if parameter.requires_grad else 4.0) * parameter.numel() for parameter in model.parameters()
    )
    if not getattr(config, "tie_word_embeddings", False):
        for parameter in model.get_input_embeddings().parameters():
            flops -= (6.0 if parameter.requires_grad else 4.0) * parameter.numel()
    layers = int(getattr(config, "num_hidden_layers", 0))
    width = int(getattr(config, "hidden_size", 0))
    return flops + 12.0 * layers * width * max_length
