"""The kernel against AdamW written out, and its rounding against torch's."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.sharding.offload import kernel as kernels
from toolkit.sharding.offload.kernel import AdamWKernel, Segment, load_kernel

NUMEL = 10_007  # no multiple of any vector's length


@pytest.fixture(scope="module")
def kernel() -> AdamWKernel:
    return load_kernel()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "master": torch.randn(NUMEL, generator=generator),
        "exp_avg": torch.randn(NUMEL, generator=generator) * 0.1,
        "exp_avg_sq": torch.rand(NUMEL, generator=generator) * 0.1,
        "gradient": torch.randn(NUMEL, generator=generator),
    }


def written_out(t: dict[str, torch.Tensor], segment: Segment, scale: float) -> dict[str, torch.Tensor]:
    """AdamW (arXiv 1711.05101, algorithm 2) in float64."""
    rows = slice(segment.offset, segment.offset + segment.numel)
    p, m, v, g = (t[name][rows].double() for name in ("master", "exp_avg", "exp_avg_sq", "gradient"))
    g = g * scale
    m = segment.beta1 * m + (1 - segment.beta1) * g
    v = segment.beta2 * v + (1 - segment.beta2) * g * g
    unbiased_m = m / (1 - segment.beta1**segment.step)
    unbiased_v = v / (1 - segment.beta2**segment.step)
    p = p - segment.lr * (unbiased_m / (unbiased_v.sqrt() + segment.eps) + segment.weight_decay * p)
    return {"master": p, "exp_avg": m, "exp_avg_sq": v}


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernel_is_adamw(kernel: AdamWKernel, gradient: torch.dtype, weights: torch.dtype, threads: int) -> None:
    t = tensors()
    t["gradient"] = t["gradient"].to(gradient)
    segments = [
        Segment(3, 5000, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7),
        Segment(5100, 4900, lr=3e-3, beta1=0.4, beta2=0.95, eps=1e-6, weight_decay=0.0, step=1),
    ]
    before = {name: tensor.clone() for name, tensor in t.items()}
    out = torch.full((NUMEL,), 7.0, dtype=weights)
    kernel.step(t["master"], t["exp_avg"], t["exp_avg_sq"], t["gradient"], out, segments, 0.37, threads)
    for segment in segments:
        rows = slice(segment.offset, segment.offset + segment.numel)
        for name, expected in written_out(before, segment, 0.37).items():
            torch.testing.assert_close(t[name][rows].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(out[rows], t["master"][rows].to(weights))
    outside = torch.ones(NUMEL, dtype=torch.bool)
    for segment in segments:
        outside[segment.offset : segment.offset + segment.numel] = False
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(t[name][outside], before[name][outside]), "elements of no segment are not touched"
    assert (out[outside] == 7).all()
    assert torch.equal(t["gradient"], before["gradient"])


def test_the_number_of_threads_changes_nothing(kernel: AdamWKernel) -> None:
    results = []
    for threads in (1, 2, 5):
        t, out = tensors(), torch.empty(NUMEL, dtype=torch.bfloat16)
        segment = Segment(0, NUMEL, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3)
        kernel.step(t["master"], t["exp_avg"], t["exp_avg_sq"], t["gradient"], out, [segment], 1.0, threads)
        results.append((t["master"], out))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_weights_are_rounded_as_torch_rounds(kernel: AdamWKernel) -> None:
    """To the nearest, ties to even; infinities and what is not a number stay so. The step itself moves nothing."""
    bits = torch.arange(-(2**31), 2**31, 65_521, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.3895e38, 1e-45])
    ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    master = torch.cat([bits.view(torch.float32), special, ties])
    zeros = torch.zeros_like(master)
    out = torch.empty_like(master, dtype=torch.bfloat16)
    segment = Segment(0, master.numel(), 0.0, 0.9, 0.999, 1e-8, 0.0, 1)
    expected = master.bfloat16()
    kernel.step(master, zeros.clone(), zeros.clone(), zeros, out, [segment], 1.0, 1)
    assert torch.equal(out.isnan(), expected.isnan())
    usable = ~expected.isnan()
    assert torch.equal(out[usable], expected[usable])


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolkitError, match="no-such-compiler"):
        load_kernel.__wrapped__()


def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", ("-no-such-flag",))
    with pytest.raises(ToolkitError, match="does not compile"):
        load_kernel.__wrapped__()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_kernel.__wrapped__()
    monkeypatch.setattr(subprocess, "run", None)
    assert isinstance(load_kernel.__wrapped__(), AdamWKernel)
