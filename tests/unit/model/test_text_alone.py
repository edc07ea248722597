"""Models that read more than text, and cannot be trained on rows of text alone: refused before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import cases
from support.every_multimodal import small_config
from support.packed_rows import Documents, packed
from support.tiny import llama
from transformers import AutoModelForMultimodalLM, LlamaConfig, LlamaForCausalLM

from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import TextSamples, sample_of, stack
from toolkit.data.samples.sequence_parts import Part
from toolkit.errors import BadInputError
from toolkit.model.load import NoTokens, _build, load_without_weights
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.schema import ModelSection
from toolkit.run.checks.comparison import on_text_alone
from toolkit.run.checks.packing_check import check_causal, check_leaks
from toolkit.run.checks.sequence_check import check_parts
from toolkit.verify.plain_losses import PlainCausal

TABLES = cases(__file__)

CPU = torch.device("cpu")

FIRST = {"blip": "pixel_values", "pi0": "state", "pix2struct": "flattened_patches", "pp_formulanet": "pixel_values"}
"""By type, what it reads first."""


@pytest.mark.parametrize("kind", list(FIRST))
def test_a_model_that_begins_with_something_else_is_refused(kind: str, tmp_path: Path) -> None:
    small_config(kind).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match=rf"^model.name_or_path: \w+ cannot .* reads first is {FIRST[kind]};"):
        load_without_weights(ModelSection(name_or_path=str(tmp_path)), NoTokens())


@pytest.mark.parametrize(("kind", "mend"), [("t5gemma2", "objective.kind=seq2seq"), ("florence2", "name a decoder")])
def test_an_encoder_decoder_is_refused_where_texts_are_continued(kind: str, mend: str, tmp_path: Path) -> None:
    small_config(kind).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match=rf"^model.name_or_path: \w+ is an encoder-decoder, .*{mend}$"):
        load_without_weights(ModelSection(name_or_path=str(tmp_path)), NoTokens())


@pytest.mark.parametrize(("kind", "told"), TABLES["REFUSED"])
def test_a_model_that_continues_no_text_is_refused(kind: str, told: str, tmp_path: Path) -> None:
    small_config(kind).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match=told):
        load_without_weights(ModelSection(name_or_path=str(tmp_path)), NoTokens())


def test_a_class_that_writes_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    config = small_config("shieldgemma2")
    config.architectures = ["ShieldGemma2ForImageClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match=r"ShieldGemma2ForImageClassification .* does not write text"):
        load_without_weights(ModelSection(name_or_path=str(tmp_path)), NoTokens())


def rows_of_text(are_packed: bool) -> TextSamples:
    """Six rows, which share samples or not."""
    rows = Documents(6)
    lengths = np.array([len(row) for row in rows.rows])
    apart = TextSamples(rows, whole(np.arange(6), lengths, 32), list(range(1, 7)), 32, False, 0)
    return packed(rows) if are_packed else apart


def wants_images() -> Any:
    """A small Idefics, which takes one of several inputs beside the text."""
    model = AutoModelForMultimodalLM.from_config(small_config("idefics"))
    model.config.architectures = [type(model).__name__]
    return model


def test_a_model_that_wants_one_of_several_inputs_is_refused() -> None:
    model = wants_images()
    with pytest.raises(BadInputError, match=r"cannot run on rows of text alone .*pixel_values"):
        check_causal(model, CausalLM(model, packed=False), CPU)


def fails(model: Any, error: Exception) -> Any:
    """The model, whose forward raises the error."""

    def forward(*_args: Any, **_inputs: Any) -> None:
        raise error

    model.forward = forward
    return model


def test_half_a_row_is_not_the_first_that_a_model_without_its_image_gets() -> None:
    """With `sharding.sequence` and rows apart no other check runs before this one."""
    model = wants_images()
    objective = CausalLM(model, packed=False)
    with pytest.raises(BadInputError, match=r"cannot run on rows of text alone \(ValueError: .*pixel_values"):
        check_parts(model, objective, rows_of_text(False), Part(0, 2), CPU, False)


def test_a_packed_row_is_not_the_first_that_a_model_without_its_image_gets() -> None:
    model = wants_images()
    with pytest.raises(BadInputError, match=r"cannot run on rows of text alone \(ValueError: .*pixel_values"):
        check_leaks(model, CausalLM(model), rows_of_text(True), 1, CPU, False)


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("no kernel image", 209), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_what_a_device_or_too_little_memory_raises_is_not_called_a_missing_image(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, on_text_alone(wants_images()):
        raise error
    assert raised.value is error


def test_what_a_model_of_text_alone_raises_is_not_called_a_missing_image() -> None:
    """Its samples are named where it cannot share them, and alone its error is its own."""
    alone = fails(llama(), KeyError("layers"))
    with pytest.raises(KeyError, match="layers"):
        check_parts(alone, CausalLM(alone, packed=False), rows_of_text(False), Part(0, 2), CPU, False)
    shared, forward = llama(), LlamaForCausalLM.forward

    def without_positions(input_ids: torch.Tensor, position_ids: Any = None, **inputs: Any) -> Any:
        if position_ids is not None:
            raise TypeError("no positions here")
        return forward(shared, input_ids=input_ids, **inputs)

    shared.forward = without_positions
    told = r"^data\.packing: LlamaForCausalLM .* rows that share a sample \(TypeError: no positions here\)\. Set data"
    with pytest.raises(BadInputError, match=told):
        check_leaks(shared, CausalLM(shared), rows_of_text(True), 1, CPU, False)


@pytest.mark.parametrize("packed", [False, True])
def test_molmo2_is_told_while_it_trains_that_every_token_is_text(packed: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(small_config("molmo2"), dtype=torch.float32).eval()
    rows = [list(range(10, 19)), list(range(30, 43))]
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    model.train()
    samples = [[row] for row in rows] if not packed else [rows]
    batch = stack([sample_of([(row, [True] * len(row)) for row in each], 24, 0) for each in samples])
    objective = CausalLM(model, packed=packed)
    for logits in (objective.logits(model, objective.on_host(batch)), PlainCausal().forward(model, batch)):
        found = logits[0] if packed else torch.cat([each[: len(row)] for each, row in zip(logits, rows, strict=True)])
        torch.testing.assert_close(found[:22], torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_a_tower_without_its_library_is_refused_by_the_librarys_name() -> None:
    """Building a small FastVLM takes timm, which the tests do not have; with it there is nothing to refuse."""

    class Lacks:
        @staticmethod
        def from_config(*_: Any, **__: Any) -> Any:
            raise ImportError("TimmWrapperModel requires the timm library but it was not found in your environment.")

    told = r"^model\.name_or_path: a model of type llama needs what is not installed: .* the timm library"
    with pytest.raises(BadInputError, match=told):
        _build(Lacks, LlamaConfig(), {"attn_implementation": "sdpa"}, "model.name_or_path")
