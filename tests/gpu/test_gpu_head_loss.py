"""The loss without full logits on a device: the same as with them, and without their memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.sanitized_threads import sanitized_threads  # noqa: F401 (a fixture of every test here)

from toolkit.objectives.losses.fused_linear_cross_entropy import AfterHead, summed_loss

TOKENS, VOCABULARY, WIDTH = 4096, 65_536, 512


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_loss_gradients_and_peak(dtype: torch.dtype, tolerance: float, cap: float | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn((TOKENS, WIDTH), device="cuda").to(dtype).requires_grad_()
    weight = (0.1 * torch.randn((VOCABULARY, WIDTH), device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = summed_loss(hidden, weight, None, targets, AfterHead(1.0, cap)).squeeze()
    found = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
    peak = torch.cuda.max_memory_allocated() - before
    tensors = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    logits = F.linear(*tensors)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    plain = F.cross_entropy(logits, targets, reduction="sum")
    expected = [plain.detach(), *torch.autograd.grad(plain, tensors)]
    for own, exact in zip(found, expected, strict=True):
        assert float((own.float() - exact).norm() / exact.norm()) <= tolerance
    # Two chunks of 2,048 tokens: 0.5 GiB of logits, twice with a cap, and the weight's gradient twice.
    assert peak < 1.6 * 2**30 < TOKENS * VOCABULARY * 10
