"""LLaMA-Factory's arguments."""

from __future__ import annotations

from typing import Any

from toolkit.suggest.from_tools.conversion import (
    Conversion,
    Table,
    fraction,
    if_true,
    no_counterpart,
    not_needed,
    number,
    to,
    words,
)
from toolkit.suggest.from_tools.trl import ATTENTION, LOSSES, TRAINING_ARGUMENTS, beta_of

STAGES = {"sft": "causal_lm", "pt": "causal_lm", "dpo": "preference", "rm": "reward", "kto": "kto"}


def _dataset(conversion: Conversion, name: str, value: Any) -> None:
    """Takes the names of data sets as files, because dataset_info.json is not read."""
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
    key = "data.train" if name == "dataset" else "data.validation"
    files = [one if "/" in one or "." in one else f"{one}.json" for one in names]
    note = "Check the paths: dataset_info.json says which file or data set of the hub a name stands for."
    shares = conversion.given.get("interleave_probs")
    if name == "dataset" and isinstance(shares, str):
        weights = [number(one) for one in shares.split(",")]
        conversion.take(key, [{"path": p, "weight": w} for p, w in zip(files, weights, strict=False)], name, note)
    else:
        conversion.take(key, files if len(files) > 1 else files[0], name, note)


def _targets(conversion: Conversion, name: str, value: Any) -> None:
    listed = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
    conversion.take("adapter.target_modules", "all-linear" if listed == ["all"] else listed, name)


def _bits(conversion: Conversion, name: str, value: Any) -> None:
    kinds = {4: "nf4", 8: "int8"}
    if value in kinds:
        conversion.take("adapter.quantize", kinds[value], name)
    else:
        conversion.no_counterpart[name] = f"{value!r}: adapter.quantize takes nf4 and int8"


def _loss(conversion: Conversion, name: str, value: Any) -> None:
    if conversion.given.get("stage") != "dpo":
        conversion.not_needed[name] = "the stage is not dpo"
    else:
        words("objective.loss", LOSSES, "losses of pairs here are dpo, ipo, simpo and orpo")(conversion, name, value)


def _beta(conversion: Conversion, name: str, value: Any) -> None:
    if conversion.given.get("stage") in ("dpo", "kto"):
        loss = LOSSES.get(str(conversion.given.get("pref_loss"))) if conversion.given["stage"] == "dpo" else None
        beta_of(conversion, name, value, loss)
    else:
        conversion.not_needed[name] = "only losses of pairs have it"


def _lora(key: str) -> Any:
    """Takes a setting of LoRA if LoRA is trained."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if conversion.given.get("finetuning_type", "lora") == "lora":
            conversion.take(key, value, name)
        elif name in conversion.given:
            conversion.not_needed[name] = "only LoRA has it"

    return rule


def _checkpointing(conversion: Conversion, name: str, value: Any) -> None:
    if value is True:
        conversion.not_needed[name] = "off, as by default here"
    else:
        conversion.take("sharding.activation_checkpointing", 1, name, "1 checkpoints every block.")


FREEZE = "training some layers in full is not implemented"
WEB = "there is no such page; the report shows the run"

TABLE: Table = {
    "model_name_or_path": to("model.name_or_path"),
    "model_revision": to("model.revision"),
    "trust_remote_code": to("model.trust_remote_code"),
    "flash_attn": words("model.attention", {**ATTENTION, "auto": "auto"}, "model.attention is auto"),
    "add_tokens": to("model.add_tokens", change=lambda text: text.split(",") if isinstance(text, str) else text),
    "add_special_tokens": to(
        "model.add_tokens", change=lambda text: text.split(",") if isinstance(text, str) else text
    ),
    "train_from_scratch": no_counterpart("describe the model in model.config"),
    "stage": words("objective.kind", STAGES, "stages here are sft, pt, dpo, rm and kto; `docs/own_loop.md` has others"),
    "finetuning_type": words(
        "adapter.kind", {"full": "none", "lora": "lora"}, f"{FREEZE}; adapter.kind takes none and lora"
    ),
    "freeze_trainable_layers": no_counterpart(FREEZE),
    "freeze_vision_tower": not_needed("model.train says which parts of a multimodal model are trained"),
    "freeze_multi_modal_projector": not_needed("model.train says which parts of a multimodal model are trained"),
    "dataset": _dataset,
    "eval_dataset": _dataset,
    "dataset_dir": not_needed("data.train has the paths"),
    "media_dir": to("data.image_root"),
    "image_max_pixels": to("data.max_pixels"),
    "image_min_pixels": to("data.min_pixels"),
    "template": not_needed("the tokenizer's own chat template is used; data.chat_template takes chatml and alpaca"),
    "enable_thinking": no_counterpart("set data.template_arguments={enable_thinking: true}"),
    "cutoff_len": to("data.max_length"),
    "train_on_prompt": if_true("data.targets", "all"),
    "mask_history": if_true("data.targets", "last_turn"),
    "packing": to("data.packing"),
    "neat_packing": if_true("data.packing", True, "Rows never see each other."),
    "mix_strategy": not_needed("with weights sources are mixed, without they follow one another"),
    "interleave_probs": not_needed("with dataset"),
    "streaming": to("data.streaming"),
    "val_size": fraction,
    "max_samples": no_counterpart("rows are not left out; name a smaller file, or a split such as train[:1000]"),
    "overwrite_cache": not_needed("tokenised rows are found by their content"),
    "preprocessing_num_workers": to("data.num_proc"),
    "tokenized_path": to("data.cache_dir"),
    "disable_shuffling": to("data.shuffle", change=lambda off: not off),
    "lora_rank": _lora("adapter.r"),
    "lora_alpha": _lora("adapter.alpha"),
    "lora_dropout": _lora("adapter.dropout"),
    "lora_target": _targets,
    "additional_target": to("adapter.modules_to_save", change=lambda text: text.split(",")),
    "adapter_name_or_path": to("adapter.start_from"),
    "use_rslora": to("adapter.use_rslora"),
    "use_dora": to("adapter.use_dora"),
    "pissa_init": no_counterpart("adapters begin as LoRA's do"),
    "loraplus_lr_ratio": no_counterpart("A and B have one learning rate"),
    "use_galore": no_counterpart("optimizers here are adamw, adamw_8bit, adamw_4bit, adamw_fp8 and muon"),
    "use_badam": no_counterpart("optimizers here are adamw, adamw_8bit, adamw_4bit, adamw_fp8 and muon"),
    "use_muon": if_true("optimizer.kind", "muon"),
    "quantization_bit": _bits,
    "quantization_method": not_needed("bitsandbytes' bytes"),
    "double_quantization": to("adapter.double_quantization"),
    "pref_beta": _beta,
    "pref_loss": _loss,
    "pref_ftx": no_counterpart("the loss of pairs has no part of SFT; orpo has one"),
    "simpo_gamma": to("objective.gamma", change=number),
    "dpo_label_smoothing": to("objective.label_smoothing", change=number),
    "kto_chosen_weight": to("objective.desirable_weight", change=number),
    "kto_rejected_weight": to("objective.undesirable_weight", change=number),
    "pure_bf16": if_true("model.dtype", "bfloat16", "float32 master weights are safer."),
    "upcast_layernorm": not_needed("weights stay in float32"),
    "disable_gradient_checkpointing": _checkpointing,
    "enable_liger_kernel": not_needed("the loss never builds whole logits"),
    "use_unsloth": not_needed("the loss never builds whole logits, and blocks can be compiled"),
    "plot_loss": not_needed("report.html has the curves"),
    "include_num_input_tokens_seen": not_needed("tokens are recorded"),
    "compute_accuracy": not_needed("the accuracy of tokens is recorded on held-out rows"),
    "export_dir": not_needed("a run exports into its folder"),
    "export_size": to("export.max_shard_gib", change=number),
    "export_hub_model_id": to("export.push_to_hub"),
    "infer_backend": no_counterpart("`toolkit generate` and docs/serving.md"),
    "use_swanlab": if_true("logging.trackers", ["swanlab"]),
    "do_predict": no_counterpart("`toolkit generate --eval` answers and scores rows"),
    "predict_with_generate": no_counterpart("`toolkit generate --eval` answers and scores rows"),
    "ray_run_name": no_counterpart("runs start by `toolkit train` or Accelerate's launcher"),
    **TRAINING_ARGUMENTS,
}

DEFAULTS = {
    "finetuning_type": "lora",
    "stage": "sft",
    "cutoff_len": 2048,
    "learning_rate": 5e-5,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "output_dir": "outputs/llamafactory",
    "disable_gradient_checkpointing": False,
    "lora_rank": 8,
}


def convert(given: dict[str, Any]) -> Conversion:
    """Returns the recipe of LLaMA-Factory's arguments. It cuts long rows, and alpha is twice the rank."""
    conversion = Conversion("LLaMA-Factory", given)
    defaults: dict[str, Any] = DEFAULTS
    if isinstance(rank := given.get("lora_rank", 8), int):
        defaults = {**DEFAULTS, "lora_alpha": 2 * rank}
    if not given.get("neat_packing"):
        defaults = {**defaults, "packing": given.get("stage") == "pt"}
    conversion.apply(TABLE, defaults)
    if conversion.draft.get("objective.kind") == "causal_lm":
        conversion.draft.set("data.long_rows", "truncate", "LLaMA-Factory cuts long rows.")
    return conversion
