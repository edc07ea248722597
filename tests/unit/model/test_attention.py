"""toolkit.model.attention.attention: what `auto` chooses where, with the libraries' availability made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import cases
from support.tiny import llama
from transformers.utils import import_utils

from toolkit.errors import BadInputError
from toolkit.model.attention import attention
from toolkit.model.attention.attention import attention_of
from toolkit.model.attention.document_attention import BY_DOCUMENT
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.schema import ModelSection

TABLES = cases(__file__)

GPU = torch.device("cuda")


def settle(model: Any, device: torch.device, asked: str = "auto", in_16_bits: bool = True) -> str:
    return attention.settle_attention(model, asked, device, in_16_bits, packed=True, compiled=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(major: int, *installed: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
        for version in (2, 3):
            found = version in installed
            monkeypatch.setattr(import_utils, f"is_flash_attn_{version}_available", lambda found=found: found)

    return make


@pytest.mark.parametrize(("major", "installed", "expected"), TABLES["NEWEST"])
def test_the_newest_flash_attention_that_runs_on_the_gpu(
    machine: Any, major: int, installed: tuple[int, ...], expected: str | None
) -> None:
    machine(major, *installed)
    assert attention.best_flash(llama("sdpa"), GPU, in_16_bits=True)[0] == expected  # type: ignore[arg-type]


def test_the_choice_is_made_and_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(9, 3)
    model: Any = llama("sdpa")
    monkeypatch.setattr(
        model, "set_attn_implementation", lambda name: setattr(model.config, "_attn_implementation_internal", name)
    )
    assert settle(model, GPU) == "flash_attention_3 (installed, for this GPU)"
    assert attention_of(model) == "flash_attention_3"


def test_where_it_is_refused_the_run_keeps_what_it_has(machine: Any) -> None:
    machine(9, 3)  # which transformers does not find here
    model: Any = llama("sdpa")
    found = settle(model, GPU)
    assert found.startswith("sdpa (flash_attention_3 refused: ")


@pytest.mark.parametrize(
    ("asked", "device", "in_16_bits", "expected"),
    [
        ("auto", "cpu", True, "sdpa_by_document (no GPU)"),
        ("auto", "cuda", False, "sdpa (float32 compute: flash attention takes 16 bits)"),
        ("auto", "cuda", True, f"sdpa ({attention.NOT_INSTALLED})"),
        ("sdpa", "cuda", True, "sdpa (model.attention)"),
    ],
)
def test_sdpa_otherwise(machine: Any, asked: str, device: str, in_16_bits: bool, expected: str) -> None:
    machine(9)
    assert settle(llama("sdpa"), torch.device(device), asked, in_16_bits) == expected


@pytest.mark.parametrize(("packed", "compiled"), [(False, False), (False, True), (True, True)])
def test_documents_are_seen_by_themselves_where_there_are_several_and_shapes_are_free(
    packed: bool, compiled: bool
) -> None:
    cpu = torch.device("cpu")
    assert attention.settle_attention(llama("sdpa"), "auto", cpu, False, packed, compiled) == "sdpa (no GPU)"
    assert attention.settle_attention(llama("eager"), "auto", cpu, False, True, False) == "eager (no GPU)"


def test_asked_for_but_not_installed() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from toolkit.model.load import _build

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    asked = ModelSection(name_or_path="m", attention="flash_attention_3").attention
    with pytest.raises(BadInputError, match=r"model.attention: flash_attention_3 .*auto"):
        _build(AutoModelForCausalLM, config, {"attn_implementation": asked}, "model.name_or_path")


@pytest.mark.parametrize(
    ("name", "is_flash"),
    [
        ("flash_attention_2", True),
        ("kernels-community/flash-attn2", True),
        ("kernels-community/vllm-flash-attn3", True),
        ("flex_attention", False),
        ("sdpa", False),
        (BY_DOCUMENT, False),
    ],
)
def test_rows_that_share_a_sample_are_one_row_for_flash_kernels_whatever_their_name(name: str, is_flash: bool) -> None:
    """Its kernels tell documents apart by where they begin, and in a single row only."""
    model: Any = llama("sdpa")
    model.config._attn_implementation_internal = name
    objective = CausalLM(model, packed=True)
    ids = torch.arange(1, 17).view(2, 8)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(4).repeat(2, 2)}
    inputs = objective.inputs(objective.on_host(batch))
    assert inputs["input_ids"].shape == ((1, 16) if is_flash else (2, 8))
    assert ("cu_seq_lens_q" in inputs) is is_flash
    if is_flash:
        assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 8, 12, 16]
