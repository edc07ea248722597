"""Text rows on models that read more than text: the plain loop's losses, and an export with the base's own tensors."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from support.peft_by_hand import adapted
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values
from support.tiny_multimodal import FAMILIES, save_multimodal
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForImageTextToText, AutoTokenizer

STEPS, ROWS, SEED, RATE = 3, 4, 3, 3e-3
TEXTS = [" ".join(text.split()[: 2 + i % 7]) for i, text in enumerate(make_texts(STEPS * ROWS, seed=4))]
LORA = {"kind": "lora", "r": 2, "target_modules": ["q_proj", "down_proj"]}
CASES = {"full": {}, "lora": LORA, "merged": LORA}
FAST = ("qwen3_5", "qwen3_vl", "mistral3", "gemma3", "llama4")
TRAINED = [kind for kind in FAMILIES if kind != "paligemma"]
LANGUAGE = ("language_model", "lm_head", "embed_tokens", "text_model")


def plain_losses(folder: Path, case: str) -> list[float]:
    """Row by row on transformers' whole model, of which the language model alone is trained."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in LANGUAGE))
    if CASES[case]:
        paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in ("q_proj", "down_proj")]
        paths = [path for path in paths if any(word in path for word in LANGUAGE)]
        model = adapted(model, {"r": 2, "lora_alpha": 4, "target_modules": paths})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, eps=1e-4)
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for text in TEXTS[step * ROWS :][:ROWS]:
            ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
            logits = model(input_ids=ids, use_cache=False).logits
            total = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses


def bytes_of_frozen(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of the frozen parameters of this process, and of their gradients and their state in the optimizer."""
    parameters = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and not each.is_meta]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    state = [tensor for parameter in frozen for tensor in optimizer.state.get(parameter, {}).values()]
    gradients = [parameter.grad for parameter in frozen if parameter.grad is not None]
    return sum(parameter.nbytes for parameter in frozen), sum(tensor.nbytes for tensor in gradients + state)


def runs(folder: Path, kinds: list[str]) -> dict[str, Any]:
    from toolkit import Recipe, finetune

    found: dict[str, Any] = {}
    held: list[tuple[int, int]] = []
    register_optimizer_step_post_hook(lambda optimizer, *_: held.append(bytes_of_frozen(optimizer)))
    for kind in kinds:
        for case, adapter in CASES.items():
            meet()
            values = recipe_values(folder / kind, folder / "rows.jsonl", folder / f"{kind}-{case}", folder / "cache")
            values["data"] |= {"max_length": 64, "packing": False}
            values["adapter"] = adapter
            values["export"] = {"merge": case == "merged"}
            values["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-4}
            values["schedule"] = {"kind": "constant"}
            values["training"] = {
                "output_dir": str(folder / f"{kind}-{case}"),
                "max_steps": STEPS,
                "micro_batch_size": ROWS // int(os.environ["WORLD_SIZE"]),
                "max_grad_norm": None,
                "seed": SEED,
            }
            values["checkpoint"] = {"every_steps": STEPS}
            result = finetune(Recipe.from_mapping(values))
            found[f"{kind}-{case}"] = [record["loss"] for record in result.metrics if record["split"] == "train"]
            assert len(held) == STEPS
            assert all(frozen > 0 and beside == 0 for frozen, beside in held), held
            held.clear()
    return found


@pytest.fixture(scope="module", params=[FAST, pytest.param(TRAINED[len(FAST) :], marks=pytest.mark.grid)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, kinds = tmp_path_factory.mktemp("whole"), list(request.param)
    for kind in kinds:
        save_multimodal(kind, folder / kind, TEXTS)
        (folder / kind / "preprocessor_config.json").write_text('{"image_size": 28}')
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder, run_on_ranks(runs, 2, folder, kinds)[0]


def test_the_language_model_is_trained_as_by_a_plain_loop(found: tuple[Path, dict[str, Any]]) -> None:
    folder, losses = found
    for name, of_run in losses.items():
        kind, case = name.rsplit("-", 1)
        assert of_run == pytest.approx(plain_losses(folder / kind, case), rel=1e-5), name


def test_an_export_holds_the_bases_tensors_under_their_names(found: tuple[Path, dict[str, Any]]) -> None:
    """Those that text cannot train are the base's bit for bit; `toolkit export` of the checkpoint writes the same."""
    from toolkit.checkpoint.consolidate import export_run

    folder, losses = found
    for kind in {name.rsplit("-", 1)[0] for name in losses}:
        base, run = load_file(folder / kind / "model.safetensors"), folder / f"{kind}-full"
        exported = load_file(run / "export/model.safetensors")
        assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in base.items()}, kind
        changed = {name for name in base if not torch.equal(base[name], exported[name])}
        assert changed, kind
        assert all(
            any(word in name for word in LANGUAGE) or name.startswith(("model.layers", "model.embed", "model.norm"))
            for name in changed
        ), kind
        assert not any("visi" in name or "multi_modal" in name or "connector" in name for name in changed), kind
        assert (run / "export/preprocessor_config.json").read_text() == '{"image_size": 28}'
        export_run(run, folder / f"{kind}-again", verify=False)
        again = load_file(folder / f"{kind}-again/model.safetensors")
        assert all(torch.equal(again[name], exported[name]) for name in exported), kind
        assert again.keys() == exported.keys()


def test_no_adapter_and_no_state_is_where_text_does_not_reach(found: tuple[Path, dict[str, Any]]) -> None:
    folder, losses = found
    for name in losses:
        manifest = json.loads((folder / name / f"checkpoints/step_0000000{STEPS}/manifest.json").read_text())
        with_state = [tensor for tensor in manifest["tensors"] if tensor.startswith("optimizer.")]
        assert with_state
        assert not any("visi" in tensor or "multi_modal" in tensor for tensor in with_state), name
        if name.endswith("-lora"):
            adapter = load_file(folder / name / "export/adapter_model.safetensors")
            assert adapter
            assert not any("visi" in tensor for tensor in adapter), name


@torch.no_grad()
def test_adapters_load_in_peft_on_the_bases_own_files_and_merged_ones_alone(found: tuple[Path, dict[str, Any]]) -> None:
    """Both give the same logits, which are not the base's. What was not merged is the base's, bit for bit."""
    folder, losses = found
    for kind in {name.rsplit("-", 1)[0] for name in losses}:
        merged_to = folder / f"{kind}-merged/export"
        tokenizer = AutoTokenizer.from_pretrained(folder / kind)
        ids = torch.tensor([tokenizer(TEXTS[6])["input_ids"]])
        base: Any = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).eval()
        before = base(input_ids=ids).logits
        adapted: Any = PeftModel.from_pretrained(base, folder / f"{kind}-lora/export").eval()
        merged: Any = AutoModelForImageTextToText.from_pretrained(merged_to, dtype=torch.float32).eval()
        by_peft, alone = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
        assert (by_peft - before).abs().max() > 1e-3, kind
        torch.testing.assert_close(alone, by_peft, rtol=0, atol=1e-5)
        own, whole = load_file(folder / kind / "model.safetensors"), load_file(merged_to / "model.safetensors")
        assert own.keys() == whole.keys(), kind
        changed = {name for name in own if not torch.equal(own[name], whole[name])}
        assert changed, kind
        assert all(any(word in name for word in ("q_proj", "down_proj", "gate_up_proj")) for name in changed), kind
        assert not any("visi" in name for name in changed), kind


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    save_multimodal("paligemma", tmp_path / "model", TEXTS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    values = recipe_values(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "cache")
    values["data"] |= {"max_length": 64}
    values["training"] |= {"max_steps": 1}
    values["schedule"] = {"kind": "constant"}
    with pytest.raises(BadInputError, match="PaliGemmaForConditionalGeneration the logits of a token depend on later"):
        finetune(Recipe.from_mapping(values))
