"""Models with random weights, from `model.config`: also such as have a configuration for each of their parts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from toolkit.errors import BadInputError
from toolkit.model.load import _random_configuration
from toolkit.model.structure.model_parts import writer_class

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


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"vision_confg": {}}, "vision_confg: unknown to the model type llava .did you mean 'vision_config'"),
        ({"text_config": {"hiden_size": 3}}, "model.config.text_config: hiden_size: unknown to the model type llama"),
        (
            {"vision_config": {"model_type": "siglip_vision_model", "pach_size": 3}},
            "model.config.vision_config: pach_size: unknown to the model type siglip_vision_model",
        ),
        ({"text_config": {"vocab_size": 10}}, "vocab_size: 10 is less than the tokenizer's 350 tokens"),
    ],
)
def test_a_field_that_nobody_knows_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        _random_configuration({**SEEING, **fields}, Tokens())
