"""Quantised moments that are saved as values and quantised again are what they were."""

from __future__ import annotations

import pytest
import torch

from toolkit.checkpoint.state import quantise_into

subclass_4bit = pytest.importorskip("torchao.optim.subclass_4bit")
subclass_8bit = pytest.importorskip("torchao.optim.subclass_8bit")
subclass_fp8 = pytest.importorskip("torchao.optim.subclass_fp8")

KINDS = {
    "8 bit, signed": lambda: subclass_8bit.OptimState8bit.zeros((64, 256), True),
    "8 bit": lambda: subclass_8bit.OptimState8bit.zeros((64, 256), False),
    "4 bit, signed": lambda: subclass_4bit.OptimState4bit.zeros((64, 256), True),
    "4 bit": lambda: subclass_4bit.OptimState4bit.zeros((64, 256), False),
    "float8": lambda: subclass_fp8.OptimStateFp8.zeros((64, 256)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_resuming_ten_times_changes_nothing(kind: str) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    values[0] = 0  # a block that no gradient has reached
    if "bit" in kind and "signed" not in kind:
        values.square_()
    first, again = KINDS[kind](), KINDS[kind]()
    first.copy_(values)
    saved = first.dequantize().float()
    for _ in range(10):
        quantise_into(again, saved)
        saved = again.dequantize().float()
    assert torch.equal(again.codes.view(torch.uint8), first.codes.view(torch.uint8))
    torch.testing.assert_close(again.scale, first.scale, rtol=1e-6, atol=0)
