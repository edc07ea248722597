"""Adapters: what has one, the merged weights, what peft makes of the saved files, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from support.cases import cases
from support.tiny import llama, tiny_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapter_checks import (
    require_kept,
    require_mergeable,
    require_new_rows_trained,
    require_one_type,
)
from toolkit.model.adapters.adapters import adapters_off, add_adapter, merged, state_in_layers, write_adapter
from toolkit.model.adapters.per_expert import write_per_expert
from toolkit.model.adapters.targets import layers_to_quantise, stacked_experts, targets_beside_experts
from toolkit.model.load import NoTokens, load
from toolkit.model.part_sizes import adapter_fact
from toolkit.model.routers import find_routers
from toolkit.model.weights.weights import Fit
from toolkit.recipe.adapter_file import PER_EXPERT, WEIGHTS
from toolkit.recipe.schema import AdapterSection, ExportSection, ModelSection

TABLES = cases(__file__)


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family))
    return model.eval()


def adapt(model: PreTrainedModel, **fields: Any) -> peft.PeftModel:
    """With adapters that change what the model says."""
    adapted = add_adapter(model, AdapterSection(kind="lora", r=2, **fields), "base")
    for name, parameter in list(adapted.named_parameters()):
        if parameter.requires_grad:  # and on the meta device
            owner, _, leaf = name.rpartition(".")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
            setattr(adapted.get_submodule(owner), leaf, nn.Parameter(values))
    return adapted


def within_block(name: str) -> str:
    """A parameter's name behind the number of its block."""
    return name.partition("layers.")[2].partition(".")[2].removesuffix(".weight")


IDS = torch.arange(3, 19)[None]


def test_a_gate_that_forgets_is_no_router_and_stacks_of_unequal_lengths_are_experts() -> None:
    with torch.device("meta"):
        kimi, longcat = build("kimi_linear"), build("longcat_flash")
    targets = targets_beside_experts(kimi, stacked_experts(kimi), ("language",))
    adapted = {within_block(name) for name in (*targets.modules, *targets.parameters)}
    assert adapted >= {"self_attn.forget_gate.f_a_proj", "self_attn.forget_gate.f_b_proj", "mlp.experts.gate_up_proj"}
    assert "mlp.gate" not in adapted
    config = longcat.config
    shapes = {name.rpartition(".")[2]: len(longcat.get_parameter(name)) for name in stacked_experts(longcat)}
    both = config.n_routed_experts + config.zero_expert_num
    assert shapes == {"gate_up_proj": both, "down_proj": config.n_routed_experts}


@pytest.mark.parametrize("family", TABLES["ADAPTED"])
def test_every_linear_layer_and_every_expert_has_an_adapter(family: str, tmp_path: Path) -> None:
    base = build(family)
    plain = base(input_ids=IDS, use_cache=False).logits
    adapted = adapt(copy.deepcopy(base))
    logits = adapted(input_ids=IDS, use_cache=False).logits
    logits.sum().backward()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is not None for parameter in trained.values())
    assert (logits - plain).abs().max() > 1e-3

    whole = dict(merged(adapted, state_in_layers(adapted).items()))
    # Tied heads stand there once; a bias of a router is saved beside the parameters.
    before = {name: tensor for name, tensor in base.state_dict().items() if name in whole}
    assert before.keys() >= {name for name, _ in base.named_parameters()}
    assert before.keys() == whole.keys()
    changed = {within_block(name) for name, tensor in before.items() if not torch.equal(tensor, whole[name])}
    assert changed == set(TABLES["ADAPTED"][family])
    by_peft = copy.deepcopy(adapted).merge_and_unload().state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=0, atol=1e-6)

    write_adapter(adapted, adapted.state_dict().items(), tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(loaded(input_ids=IDS, use_cache=False).logits, logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in TABLES["IN_FILES"]),
        ("qwen2_moe", r".*\.experts\..*_proj"),
    ],  # without shared experts
)
def test_each_expert_has_its_rows_and_columns_for_servers(family: str, targets: str, tmp_path: Path) -> None:
    base = build(family)
    base.save_pretrained(tmp_path)
    layers = {name.removesuffix(".weight") for name in load_file(tmp_path / "model.safetensors")}
    experts, (place, files) = stacked_experts(base), TABLES["IN_FILES"][family]
    adapted = adapt(base, target_modules=targets)
    stacked = write_adapter(adapted, adapted.state_dict().items(), tmp_path)
    write_per_expert(adapted, stacked, tmp_path)
    found = load_file(tmp_path / PER_EXPERT / WEIGHTS)
    config = peft.PeftConfig.from_pretrained(str(tmp_path / PER_EXPERT))
    read = {path for path in layers if check_target_module_exists(config, path)}
    assert read == {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in found}
    for name in experts:
        owner, _, leaf = name.rpartition(".")
        inner = owner if leaf == "down_proj" else f"{owner}.base_layer"
        a, b = (stacked[f"base_model.model.{inner}.lora_{half}.weight"] for half in "AB")
        for expert in range(4):
            halves = b[:, expert::4].chunk(len(files[leaf].split()))
            for last, half in zip(files[leaf].split(), halves, strict=True):
                path = f"base_model.model.{place.format(owner.split('.')[2], expert)}{last}"
                assert torch.equal(found[f"{path}.lora_A.weight"], a[2 * expert : 2 * expert + 2])
                assert torch.equal(found[f"{path}.lora_B.weight"], half)


@pytest.mark.parametrize(
    ("family", "targets"),  # in one tensor in files, too; and vLLM wants every matrix of an expert
    [*((each, "all-linear") for each in ("gpt_oss", "granitemoe", "jetmoe")), ("mixtral", r".*experts\.down_proj")],
)
def test_what_servers_have_no_name_for_is_not_written(family: str, targets: str, tmp_path: Path) -> None:
    adapted = adapt(build(family), target_modules=targets)
    write_per_expert(adapted, write_adapter(adapted, adapted.state_dict().items(), tmp_path), tmp_path)
    assert not (tmp_path / PER_EXPERT).exists()


def test_the_share_of_the_weights_with_adapters_is_told() -> None:
    fact = adapter_fact(adapt(build("mixtral")), ("language",))
    assert fact == "on 98.9% of the blocks' weights; none on mlp.gate"
    assert adapter_fact(adapt(build("mixtral"), target_modules=["q_proj"]), ("language",)).startswith("on 4.5%")


def test_a_pattern_means_whole_paths() -> None:
    """peft takes the last word of what a pattern matches in these families, and would adapt all blocks."""
    for pattern, paths in {
        r".*\.1\.self_attn\..*b_proj": {"self_attn.q_b_proj", "self_attn.kv_b_proj"},
        r".*\.1\..*experts\.(gate_up|down|up)_proj": {
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            "mlp.shared_experts.up_proj.weight",
            "mlp.shared_experts.down_proj.weight",
        },
    }.items():
        config = adapt(build("deepseek_v3"), target_modules=pattern).peft_config["default"]
        found = {*(config.target_modules or ()), *(config.target_parameters or ())}
        assert found == {f"model.layers.1.{path}" for path in paths}


@pytest.mark.parametrize(("field", "value"), [("dropout", 0.1), ("use_dora", True)])
def test_what_peft_cannot_do_with_experts_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=rf"adapter\.{field}: .* experts .*model\.layers\.0\.mlp\.experts"):
        adapt(build("mixtral"), **{field: value})
    assert adapt(build("mixtral"), target_modules=["q_proj"], **{field: value})


def test_an_adapter_of_the_embeddings_is_merged() -> None:
    adapted = adapt(llama(tie_word_embeddings=False), target_modules=["embed_tokens", "q_proj"])
    require_mergeable(adapted)
    whole = dict(merged(adapted, state_in_layers(adapted).items()))
    by_peft = copy.deepcopy(adapted).merge_and_unload().state_dict()
    assert whole.keys() == by_peft.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=0, atol=1e-6)


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


AUTO: dict[str, Any] = {"texts": AutoModelForSequenceClassification, "words": AutoModelForTokenClassification}


@pytest.mark.parametrize("kind", AUTO)
@pytest.mark.parametrize("name", TABLES["MODELS"])
def test_all_linear_leaves_the_head_to_be_trained_in_full(name: str, kind: str) -> None:
    section = AdapterSection(kind="lora", target_modules="all-linear")
    with torch.device("meta"):
        model = AUTO[kind].from_config(AutoConfig.for_model(name, **TABLES["MODELS"][name]))
    linear = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    head = {path for path in linear if "classifier" in path or "score" in path}
    chosen = layers_to_quantise(model, section)
    adapted = add_adapter(model, section, None)
    trained = [name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad]
    # What stands inside a head is trained with it.
    assert {name.partition(".modules_to_save.")[0] for name in trained if "lora_" not in name} >= {
        path for path in head if not any(path.startswith(f"{other}.") for other in ("classifier", "score"))
    }
    with_adapters = {name.partition(".lora_")[0] for name in trained if "lora_" in name}
    assert with_adapters == linear - head
    assert not head & set(chosen)
