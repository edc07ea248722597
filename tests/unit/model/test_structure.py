"""How models are built from configurations, and which of their parts are trained, left unused or kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.every_multimodal import small_config
from support.tiny import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    SqueezeBertConfig,
    SqueezeBertForSequenceClassification,
    SqueezeBertForTokenClassification,
)

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import add_adapter
from toolkit.model.load import _random_configuration
from toolkit.model.possible_configs import require_lasting_rows
from toolkit.model.structure.model_parts import may_leave_unused, parts_of, untrained_modules, writer_class
from toolkit.model.structure.on_meta import LARGE, build_on_meta
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.recipe.schema import AdapterSection

TABLES = cases(__file__)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor on the host."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.is_tensor(made) and made.device.type == "cpu":
            self.found = max(self.found, made.numel())
        return made


@pytest.mark.parametrize(
    ("kind", "width"), [("deepseek_v3", "moe_intermediate_size"), ("llama4_text", "intermediate_size")]
)
def test_a_stack_of_experts_is_never_on_the_host(kind: str, width: str) -> None:
    config = tiny_config(kind)
    setattr(config, width, 2 * LARGE // config.hidden_size // 4)
    config.num_local_experts = 4
    plain = AutoModelForCausalLM.from_config(tiny_config(kind))
    with Largest() as largest:
        model = build_on_meta(lambda: AutoModelForCausalLM.from_config(config))
    assert max(parameter.numel() for parameter in model.parameters()) >= LARGE
    assert all(parameter.is_meta for parameter in model.parameters())
    assert largest.found < LARGE
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


class Odd(nn.Module):
    """Asks for a value while it is built, which no tensor on the meta device has."""

    def __init__(self) -> None:
        super().__init__()
        width = int(torch.tensor(3).item())
        self.weight = nn.Parameter(torch.zeros(width, LARGE))
        self.register_buffer("mask", torch.ones(2, LARGE))


def test_a_model_that_needs_values_and_a_large_buffer_are_built_as_before() -> None:
    model: Any = build_on_meta(Odd)
    assert model.weight.is_meta
    assert float(model.mask.sum()) == 2 * LARGE


def test_a_size_that_is_a_tensor_of_one_number() -> None:
    """As the width of Inkling's norms."""

    def build() -> nn.Module:
        model = nn.Linear(LARGE, 1, bias=False)
        model.norm = nn.Parameter(torch.ones(torch.tensor(7, device="cpu")))
        return model

    built = build_on_meta(build)
    assert built.weight.is_meta
    assert tuple(built.norm.shape) == (7,)


SEEING: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 4,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    "text_config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2},
}


class Tokens:
    bos_token_id, eos_token_id, pad_token_id = None, 3, 1

    def __len__(self) -> int:
        return 350


def test_the_language_model_has_the_tokenizers_vocabulary_and_special_tokens() -> None:
    config: Any = _random_configuration({**SEEING, "text_config": dict(SEEING["text_config"])}, Tokens())
    text = config.text_config
    assert (text.vocab_size, text.eos_token_id, text.pad_token_id, text.bos_token_id) == (350, 3, 1, None)
    assert (text.hidden_size, config.vision_config.patch_size, config.image_token_index) == (32, 14, 4)
    assert writer_class(config) is AutoModelForImageTextToText, "the whole model, though no class is named"
    assert "text_config" not in _random_configuration({"model_type": "llama"}, Tokens()).to_dict()


@pytest.mark.parametrize(("fields", "told"), TABLES["UNKNOWN"])
def test_a_field_that_nobody_knows_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        _random_configuration({**SEEING, **fields}, Tokens())


@pytest.mark.parametrize(("kind", "is_kept"), [("youtu", False), ("llama", True), ("opt", True), ("xglm", True)])
def test_a_type_whose_row_of_padding_does_not_outlast_a_load_is_refused(
    kind: str, is_kept: bool, tmp_path: Path
) -> None:
    config = tiny_config(kind)
    config.pad_token_id = 3
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bool(again.get_input_embeddings().weight[3].all()) == is_kept
    if is_kept:
        require_lasting_rows(model, "model.name_or_path", "its config.json")
        return
    with pytest.raises(BadInputError, match=r"row 3, of the padding token.*set pad_token_id to null in its config"):
        require_lasting_rows(model, "model.name_or_path", "its config.json")
    config.pad_token_id = None
    require_lasting_rows(type(model)(config), "model.name_or_path", "its config.json")


def _fails_midway(model: nn.Module) -> None:
    x = torch.ones(1, 4)
    with without_dropout(model):
        assert torch.equal(model(x), model(x))
        raise RuntimeError("midway")


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_before_after_an_error_too(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(training)
    with pytest.raises(RuntimeError, match="midway"):
        _fails_midway(model)
    assert [module.training for module in model.modules()] == [training] * 3


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPS = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}


@pytest.mark.parametrize(
    ("kind", "config", "unused"),
    [
        (SqueezeBertForTokenClassification, SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16), True),
        (SqueezeBertForSequenceClassification, SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16), False),
        (BertForSequenceClassification, BertConfig(**SIZES), False),
    ],
)
def test_only_a_pooler_that_no_classifier_reads_is_unused(kind: Any, config: Any, unused: bool) -> None:
    assert may_leave_unused(kind(config), ("language",)) == unused


def test_a_frozen_pooler_is_not_looked_for() -> None:
    model = SqueezeBertForTokenClassification(SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16))
    model.transformer.pooler.requires_grad_(False)
    assert not may_leave_unused(model, ("language",))


WITHIN = TABLES["WITHIN"]


@pytest.mark.parametrize("kind", list(WITHIN))
def test_text_rows_train_what_stands_beside_the_towers(kind: str) -> None:
    config = small_config(kind)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForMultimodalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.config.architectures = [type(model).__name__]  # as `load` and files have it
    parts = parts_of(model)
    assert parts
    assert {name for name, part in parts.items() if part != "language"} == {
        name for name in parts if name.startswith(tuple(WITHIN[kind]))
    }
    assert {path.removesuffix(".") for path in WITHIN[kind]} <= set(untrained_modules(model, ("language",)))


def test_all_linear_adapts_the_experts_of_words_and_none_of_images() -> None:
    config = small_config("ernie4_5_vl_moe")
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    adapted = add_adapter(model, AdapterSection(kind="lora", r=2, target_modules="all-linear"), "base")
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any("text_moe.experts" in name for name in names)
    assert not [name for name in names if "visi" in name]
