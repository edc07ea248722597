"""Loading: each rank its slices, tied weights tied, values equal to transformers', host memory counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_on_ranks
from support.tiny import llama, save_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

TEXTS = ["a king and a queen walked by the river"]


def loaded_and_sharded(model_section: dict[str, Any], tokenizer_folder: str) -> Any:
    """The model as the toolkit loads and shards it on the ranks at hand."""
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    from toolkit import sharding_kwargs
    from toolkit.model.load import load
    from toolkit.optim.build import build_optimizer
    from toolkit.recipe.schema import ModelSection, OptimizerSection

    accelerator = Accelerator(**sharding_kwargs("zero3"))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    loaded = load(ModelSection(**model_section), tokenizer, seed=5)
    model = loaded.model
    accelerator.state.fsdp_plugin.load_weights = loaded.load_weights
    assert {p.device.type for p in model.parameters()} == {"meta"}
    optimizer = build_optimizer(model, OptimizerSection(learning_rate=1e-3))
    model, optimizer = accelerator.prepare(model, optimizer)
    bound = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert bound == {id(p) for p in model.parameters()}, "the optimizer holds the sharded parameters"
    return model


def values_of(cases: list[dict[str, Any]], tokenizer_folder: str) -> list[dict[str, torch.Tensor]]:
    from toolkit.sharding.plugin import reset_accelerate

    found = []
    for case in cases:
        model = loaded_and_sharded(case, tokenizer_folder)
        named = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters(remove_duplicate=False)}
        found.append({**named, **{name: b.clone() for name, b in model.named_buffers()}})
        reset_accelerate()
    return found


def test_loaded_values_equal_those_of_transformers(tmp_path: Path) -> None:
    tied = save_llama(tmp_path / "tied", TEXTS, tied=True)
    untied = save_llama(tmp_path / "untied", TEXTS, tied=False)
    LlamaForCausalLM.from_pretrained(untied).save_pretrained(tmp_path / "files", max_shard_size="40KB")
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=24, n_layer=2, n_head=2, n_positions=64))
    gpt2.save_pretrained(tmp_path / "gpt2")
    bare = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "gpt2/model.safetensors").items()}
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text((tmp_path / "gpt2/config.json").read_text())
    save_file(bare, tmp_path / "bare/model.safetensors", metadata={"format": "pt"})
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 2

    headless = load_file(untied / "model.safetensors")
    headless.pop("lm_head.weight")
    (tmp_path / "headless").mkdir()
    (tmp_path / "headless/config.json").write_text((untied / "config.json").read_text())
    save_file(headless, tmp_path / "headless/model.safetensors", metadata={"format": "pt"})

    random = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2}
    random |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 331}
    folders = [tied, untied, tmp_path / "files", tmp_path / "gpt2", tmp_path / "bare"]
    cases: list[dict[str, Any]] = [{"name_or_path": str(folder)} for folder in folders]
    cases += [
        {"name_or_path": str(tmp_path / "headless"), "allow_new_weights": ["lm_head.*"]},
        {"config": random, "tokenizer": str(tied)},
    ]
    cases += [{"name_or_path": str(untied), "dtype": "bfloat16"}]

    expected = []
    for folder in folders:
        expected.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    torch.manual_seed(5)
    expected.append(AutoModelForCausalLM.from_pretrained(tmp_path / "headless", dtype=torch.float32))
    torch.manual_seed(5)
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    fields = {key: value for key, value in random.items() if key != "model_type"}
    expected.append(AutoModelForCausalLM.from_config(LlamaConfig(**fields, **special)))
    expected.append(AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16))

    for num_ranks in (1, 3):  # 3 ranks: 320 and 331 rows are not divisible
        for found in run_on_ranks(values_of, num_ranks, cases, str(tied)):
            for number, (values, model) in enumerate(zip(found, expected, strict=True)):
                plain = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
                assert set(values) == set(plain)
                for name, value in values.items():
                    assert torch.equal(value, plain[name].detach()), (number, name)
                    assert value.dtype == plain[name].dtype, (number, name)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; mapped pages of the weights' file are the kernel's to drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def peak_while_loading(folder: str, tokenizer_folder: str) -> tuple[int, int]:
    """(most anonymous bytes above the start, bytes of this rank's shards)"""
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    model = loaded_and_sharded({"name_or_path": folder}, tokenizer_folder)
    done.set()
    thread.join()
    return peak[0] - before, sum(p.to_local().numel() * 4 for p in model.parameters())


def test_loading_holds_no_whole_copy_on_any_rank(tmp_path: Path) -> None:
    tokenizer = save_llama(tmp_path / "tokenizer", TEXTS, tied=True)
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5}
    model = llama(**sizes, num_attention_heads=8, num_key_value_heads=8)
    whole = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    del model
    assert whole > 250e6
    for above, shards in run_on_ranks(peak_while_loading, 4, str(tmp_path / "model"), str(tokenizer)):
        assert shards == pytest.approx(whole / 4, rel=0.01)
        # The largest parameter is 5 % of the model; padding and copying one at a time stay below 20 %.
        assert above < shards + 0.20 * whole, f"{above / whole:.2f} of the model, shards are 0.25"
        print(f"peak {above / 1e6:.0f} MB above the start; shards {shards / 1e6:.0f} MB of {whole / 1e6:.0f} MB")
