"""The private names of peft and transformers that toolkit/model leans on are still there.

When one of these fails after an upgrade, the named place in toolkit/model is what to mend.
"""

from __future__ import annotations

import inspect

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import AttentionInterface, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def test_what_switches_adapters_off() -> None:
    """`adapters.adapters_off` sets peft's own mark, without the rest of what `disable_adapter` does."""
    for layer in (BaseTunerLayer, AuxiliaryTrainingWrapper):
        assert "self._disable_adapters = True" in inspect.getsource(layer.enable_adapters)
        assert "return self._disable_adapters" in inspect.getsource(layer.disable_adapters.fget)


def test_what_says_whether_a_model_has_flash_attention() -> None:
    """`attention.best_flash` reads it before it asks for the kernels."""
    assert PreTrainedModel._supports_flash_attn is False
    assert LlamaForCausalLM._supports_flash_attn is True


def test_what_says_which_attention_a_model_has() -> None:
    """`attention.attention_of` reads the name from the configuration."""
    assert PretrainedConfig(attn_implementation="sdpa")._attn_implementation == "sdpa"


def test_what_attention_by_document_is_registered_with() -> None:
    """`document_attention.register_by_document`: the kernel is called as transformers calls its own."""
    assert callable(AttentionInterface.register)
    names = list(inspect.signature(sdpa_attention_forward).parameters)
    assert names[:7] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"]
