"""The paths that only a CUDA device takes. Skipped where there is none.

What runs here is the same code as on CPU ranks; what differs is nccl, the device's memory counter, fp16's
gradient scaler and where the export is checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_rows import Documents, packed
from support.sanitized_threads import sanitized_threads  # noqa: F401 (a fixture of every test here)
from support.tiny import llama, recipe_values, save_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "flash_attention_2"])
def test_rows_that_share_a_sample_do_not_see_each_other(attention: str) -> None:
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.run.checks.packing_check import check_leaks

    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    # Heads of 16: what flex_attention's kernels take at least.
    model = llama(attention, num_attention_heads=2, num_key_value_heads=1).to("cuda", torch.bfloat16)
    found = check_leaks(model, CausalLM(model), packed(Documents(30)), 3, torch.device("cuda"), True)
    assert found is not None


def test_auto_takes_an_attention_that_keeps_packed_rows_apart() -> None:
    from toolkit.model.attention.attention import settle_attention
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.run.checks.packing_check import check_leaks

    torch.manual_seed(0)
    model: Any = llama("sdpa")
    found = settle_attention(model, "auto", torch.device("cuda"), in_16_bits=True, packed=True, compiled=False)
    assert found.startswith(("sdpa (neither", "flash_attention_2 (installed", "flash_attention_3 (installed"))
    model.to("cuda", torch.bfloat16)
    assert check_leaks(model, CausalLM(model), packed(Documents(30)), 3, torch.device("cuda"), True) is not None


@pytest.fixture
def run(tmp_path: Path, text_file: Path) -> Any:
    from toolkit import Recipe, finetune

    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    model = save_llama(tmp_path / "model", texts, tied=True)

    def start(name: str, **training: Any) -> Any:
        values = recipe_values(model, text_file, tmp_path / name, tmp_path / "cache", micro_batch_size=8, **training)
        return finetune(Recipe.from_mapping(values))

    return start


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_follows_float32(run: Any, precision: str) -> None:
    plain = [record["loss"] for record in run("float32").metrics]
    mixed = run(precision, mixed_precision=precision)
    assert [record["loss"] for record in mixed.metrics] == pytest.approx(plain, rel=2e-2)
    assert mixed.logits_difference < 5e-2
    assert all(record["peak_device_bytes"] > 0 for record in mixed.metrics)


def test_float32_on_the_device_is_float32_on_the_host(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = [record["loss"] for record in run("device").metrics]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    host = [record["loss"] for record in run("host").metrics]
    assert device == pytest.approx(host, rel=1e-4)
