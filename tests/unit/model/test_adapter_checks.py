"""What adapters would do wrong: refused before a run trains, or mended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import llama
from test_expert_adapters import adapt
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapter_checks import (
    require_kept,
    require_mergeable,
    require_new_rows_trained,
    require_one_type,
)
from toolkit.model.adapters.adapters import adapters_off
from toolkit.model.load import NoTokens, load
from toolkit.model.routers import find_routers
from toolkit.model.weights.weights import Fit
from toolkit.recipe.schema import AdapterSection, ExportSection, ModelSection


def test_shared_weights_of_which_one_user_is_trained_whole_are_not_merged() -> None:
    fields: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    with pytest.raises(BadInputError, match=r"export\.merge: .*adapter\.modules_to_save"):
        require_mergeable(adapt(llama(tie_word_embeddings=True), **fields))
    require_mergeable(adapt(llama(tie_word_embeddings=False), **fields))
    # Both, as the error advises: `test_new_rows.py` follows it to the export.
    both = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    require_mergeable(adapt(llama(tie_word_embeddings=True), **both))


def test_an_encoder_decoder_has_no_untied_export_and_no_rows_for_new_tokens() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    adapted = adapt(T5ForConditionalGeneration(T5Config(**sizes)), target_modules=["q"], modules_to_save=["lm_head"])
    with pytest.raises(BadInputError, match=r"leave lm_head out of adapter\.modules_to_save, or set export\.merge=fal"):
        require_mergeable(adapted)
    with pytest.raises(BadInputError, match=r"new rows of <a> .*set adapter\.kind=none"):
        require_new_rows_trained(adapted, ["<a>"])


def test_modules_that_are_trained_whole_need_one_type() -> None:
    adapted = adapt(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(BadInputError, match=r"lm_head is trained in float32 .*training\.mixed_precision=bf16"):
        require_one_type(adapted, "bfloat16", "no")
    require_one_type(adapted, "bfloat16", "bf16")
    require_one_type(adapted, "float32", "no")
    require_one_type(adapt(llama(), target_modules=["q_proj"]), "bfloat16", "no")


def test_weights_that_are_drawn_have_to_be_in_the_adapter() -> None:
    adapted = adapt(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    require_kept(adapted, Fit(drawn=["lm_head.weight"]), ExportSection())
    lost = Fit(drawn=["bert.pooler.dense.weight", "model.norm.weight"])
    with pytest.raises(BadInputError, match=r"drawn at random.*adapter\.modules_to_save=\[norm, pooler\]"):
        require_kept(adapted, lost, ExportSection())
    require_kept(adapted, lost, ExportSection(merge=True))


def test_dora_begins_at_the_base_where_a_transposed_weight_is_square(tmp_path: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    adapter = AdapterSection(kind="lora", target_modules=["c_proj"], use_dora=True)
    loaded = load(ModelSection(name_or_path=str(tmp_path)), NoTokens(), 0, None, adapter)
    loaded.load_weights(None)
    model = loaded.model.eval()
    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with adapters_off(model):
            plain = model(input_ids=ids).logits
    torch.testing.assert_close(adapted, plain, rtol=1e-5, atol=1e-6)


def test_a_folder_has_no_revisions(tmp_path: Any) -> None:
    llama().save_pretrained(tmp_path)
    section = ModelSection(name_or_path=str(tmp_path), revision="main")
    with pytest.raises(BadInputError, match=r"model\.revision: 'main' has no effect on the folder"):
        load(section, NoTokens(), 0)


def test_a_router_that_is_trained_whole_is_one_router() -> None:
    from support.moe import mixture

    plain = mixture("qwen3_moe")
    count = len(find_routers(plain))
    adapted = adapt(plain, target_modules=["q_proj"], modules_to_save=["gate"])
    routers = find_routers(adapted)
    assert len(routers) == count > 0
    assert all(isinstance(router.module, nn.Module) and ".original_module" not in router.path for router in routers)
