"""TRL's arguments of scripts and configurations (SFT, DPO, KTO, reward), and those of transformers' trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.suggest.from_tools.conversion import (
    Conversion,
    Table,
    if_true,
    no_counterpart,
    not_needed,
    number,
    share_or_steps,
    steps,
    to,
    words,
)

OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_4bit",
    "muon": "muon",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}
ATTENTION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "kernels-community/flash-attn2": "flash_attention_2",
    "flex_attention": "flex_attention",
    "fa2": "flash_attention_2",
    "flash": "flash_attention_2",
    "disabled": "eager",
}
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "bf16": "bfloat16", "fp16": "float16"}
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def trackers(conversion: Conversion, name: str, value: Any) -> None:
    """Takes the trackers of `report_to`."""
    asked = [one for one in (value if isinstance(value, list) else [value]) if one not in ("none", None)]
    if unknown := [one for one in asked if one not in TRACKERS]:
        conversion.no_counterpart[name] = f"{', '.join(map(str, unknown))}; allowed: {', '.join(TRACKERS)}"
    elif asked:
        conversion.take("logging.trackers", asked, name)
    else:
        conversion.not_needed[name] = "none, as by default here"


def _sharding(conversion: Conversion, name: str, value: Any) -> None:
    """Takes FSDP or DeepSpeed as one word; the settings of either have no counterpart."""
    text = str(value)
    if value in (False, "false", "") or "no_shard" in text:
        conversion.not_needed[name] = "not sharded"
        return
    stage = next((word for mark, word in STAGES.items() if mark in text.lower()), "zero3")
    conversion.take("sharding.strategy", stage, name, "Blocks are found from the model.")
    if "offload" in text.lower():
        conversion.take("sharding.offload", "optimizer", name)


STAGES = {
    "zero1": "zero1",
    "z1": "zero1",
    "z0": "ddp",
    "zero2": "zero2",
    "z2": "zero2",
    "shard_grad_op": "zero2",
    "hybrid": "hybrid",
}
"""A part of a setting's text -> the strategy; any other is zero3."""


def _max_steps(conversion: Conversion, name: str, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        conversion.draft.drop("training.num_epochs")
        conversion.take("training.max_steps", value, name)
    else:
        conversion.not_needed[name] = "epochs decide"


def _epochs(conversion: Conversion, name: str, value: Any) -> None:
    if (conversion.given.get("max_steps") or 0) > 0:
        conversion.not_needed[name] = "max_steps decides"
    else:
        conversion.take("training.num_epochs", number(value), name)


def _strategy_of_steps(key: str) -> Any:
    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if value == "epoch":
            conversion.no_counterpart[name] = f"{key} counts steps; by default a share of the run is taken"
        else:
            conversion.not_needed[name] = f"{key} says it"

    return rule


def rate(conversion: Conversion, name: str, value: Any) -> None:
    """Takes the learning rate."""
    conversion.take("optimizer.learning_rate", number(value), name)


SAME = "it is always so here"

TRAINING_ARGUMENTS: Table = {
    "output_dir": to("training.output_dir"),
    "overwrite_output_dir": no_counterpart("a folder that holds another run is refused; delete it by hand"),
    "num_train_epochs": _epochs,
    "max_steps": _max_steps,
    "per_device_train_batch_size": to("training.micro_batch_size", "With packing a sample holds several rows."),
    "per_device_eval_batch_size": not_needed("training.micro_batch_size is used"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "learning_rate": rate,
    "optim": words("optimizer.kind", OPTIMIZERS, f"optimizers here: {', '.join(sorted(set(OPTIMIZERS.values())))}"),
    "adam_beta1": to("optimizer.beta1", change=number),
    "adam_beta2": to("optimizer.beta2", change=number),
    "adam_epsilon": to("optimizer.eps", change=number),
    "weight_decay": to("optimizer.weight_decay", change=number),
    "max_grad_norm": to("training.max_grad_norm", change=number),
    "lr_scheduler_type": words(
        "schedule.kind", SCHEDULES, "schedules here: constant, linear, cosine, warmup_stable_decay"
    ),
    "lr_scheduler_kwargs": no_counterpart("set schedule.min_factor (a share of the peak) or schedule.decay_fraction"),
    "warmup_steps": share_or_steps,
    "warmup_ratio": share_or_steps,
    "bf16": if_true("training.mixed_precision", "bf16"),
    "fp16": if_true("training.mixed_precision", "fp16"),
    "tf32": not_needed("torch decides"),
    "gradient_checkpointing": if_true("sharding.activation_checkpointing", 1),
    "gradient_checkpointing_kwargs": not_needed("checkpoints are always of the kind without reentry"),
    "torch_compile": if_true("training.compile", True),
    "use_liger_kernel": not_needed("the loss never builds whole logits"),
    "do_train": not_needed(SAME),
    "do_eval": not_needed("held-out rows are evaluated where there are any"),
    "eval_strategy": _strategy_of_steps("training.eval_every_steps"),
    "evaluation_strategy": _strategy_of_steps("training.eval_every_steps"),
    "eval_steps": steps("training.eval_every_steps"),
    "save_strategy": _strategy_of_steps("checkpoint.every_steps"),
    "save_steps": steps("checkpoint.every_steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "save_only_model": no_counterpart("a checkpoint holds all that resuming needs; the export is the model alone"),
    "load_best_model_at_end": if_true("checkpoint.keep_best", True, "The export is of the last step."),
    "metric_for_best_model": no_counterpart("training.best_by takes loss or answers"),
    "resume_from_checkpoint": not_needed("a run resumes by itself"),
    "logging_steps": steps("logging.every_steps"),
    "logging_first_step": not_needed("the first step is recorded"),
    "logging_strategy": not_needed("logging.every_steps says it"),
    "logging_dir": not_needed("the run's folder has the records"),
    "report_to": trackers,
    "run_name": no_counterpart("the run is called as its folder"),
    "seed": to("training.seed"),
    "data_seed": no_counterpart("training.seed orders the rows"),
    "dataloader_num_workers": not_needed("rows are tokenised before the first step"),
    "dataloader_pin_memory": not_needed("rows are tokenised before the first step"),
    "remove_unused_columns": not_needed("columns that no layout reads are left out, and named"),
    "ddp_timeout": no_counterpart("training.stall_minutes watches the ranks"),
    "ddp_find_unused_parameters": not_needed("they are found"),
    "push_to_hub": no_counterpart("set export.push_to_hub to the repository's name"),
    "hub_model_id": to("export.push_to_hub"),
    "hub_private_repo": to("export.hub_private"),
    "deepspeed": _sharding,
    "fsdp": _sharding,
    "fsdp_config": not_needed("blocks are found from the model"),
    "neftune_noise_alpha": no_counterpart("noise in embeddings is not implemented"),
    "average_tokens_across_devices": not_needed("the loss is the mean over the target tokens of all ranks"),
    "group_by_length": no_counterpart("the seed orders the rows; data.packing leaves no padding"),
    "full_determinism": not_needed("a run with the same ranks gives the same bits"),
}
"""Arguments of transformers' trainer, which several tools pass on."""


def _dataset(conversion: Conversion, name: str, value: Any) -> None:
    source = {"path": value, "config": conversion.given.get("dataset_config")}
    if (split := conversion.given.get("dataset_train_split")) not in (None, "train"):
        source["split"] = split
    source = {key: one for key, one in source.items() if one is not None}
    conversion.take("data.train", value if [*source] == ["path"] else [source], name)
    if conversion.given.get("eval_strategy", "no") != "no":
        test = conversion.given.get("dataset_test_split") or "test"
        conversion.take("data.validation", [{**source, "split": test}], name, "TRL's scripts evaluate on this split.")


def _datasets(conversion: Conversion, name: str, value: Any) -> None:
    sources = [
        {
            here: one[there]
            for there, here in (("path", "path"), ("name", "config"), ("split", "split"))
            if one.get(there)
        }
        for one in value
    ]
    conversion.take("data.train", sources, name)


def _loss_type(conversion: Conversion, name: str, value: Any) -> None:
    kind = _loss_of(conversion.given)
    if kind in LOSSES:
        conversion.take("objective.loss", LOSSES[kind], name)
    elif kind == "kto":
        conversion.not_needed[name] = "objective.kind says it"
    elif kind in ("nll", "chunked_nll"):
        conversion.not_needed[name] = "the loss is the mean over target tokens"
    else:
        conversion.no_counterpart[name] = f"{value!r}: losses of pairs here are dpo, ipo, simpo and orpo"


LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}


def _kind(given: Mapping[str, Any]) -> str:
    """Returns `objective.kind` of a configuration, which does not name its trainer."""
    if {"desirable_weight", "undesirable_weight"} & given.keys() or given.get("loss_type") == "kto":
        return "kto"
    if "center_rewards_coefficient" in given:
        return "reward"
    return "preference" if "beta" in given or _loss_of(given) in LOSSES else "causal_lm"


def _loss_of(given: Mapping[str, Any]) -> Any:
    kind = given.get("loss_type")
    if isinstance(kind, list):
        return kind[0] if len(kind) == 1 else ", ".join(map(str, kind))
    return kind


def _beta(conversion: Conversion, name: str, value: Any) -> None:
    beta_of(conversion, name, value, LOSSES.get(_loss_of(conversion.given)))


def beta_of(conversion: Conversion, name: str, value: Any, loss: str | None) -> None:
    """Takes `beta` as the setting of a loss that it is: of orpo it weights the odds."""
    conversion.take("objective.odds_weight" if loss == "orpo" else "objective.beta", number(value), name)


def _assistant_only(conversion: Conversion, name: str, value: Any) -> None:
    if value in (True, "true", "True"):
        conversion.take("data.targets", "assistant", name)
    elif conversion.given.get("completion_only_loss") in (False, "false", "False"):
        conversion.not_needed[name] = "completion_only_loss says it"
    elif _kind(conversion.given) == "causal_lm":
        conversion.no_counterpart[name] = (
            "false: TRL learns every token of rows with messages, here only the assistant's are; set data.targets=all "
            "for such rows"
        )
    else:
        conversion.not_needed[name] = "completions are learned"


def _completion_only(conversion: Conversion, name: str, value: Any) -> None:
    if value in (False, "false", "False"):
        conversion.take("data.targets", "all", name)
    else:
        conversion.not_needed[name] = "the answer is learned of prompt and completion"


def _four_bits(conversion: Conversion, name: str, value: Any) -> None:
    if value:
        conversion.take("adapter.quantize", "nf4", name)
    else:
        conversion.not_needed[name] = "off"


def _targets(conversion: Conversion, name: str, value: Any) -> None:
    listed = value.split(",") if isinstance(value, str) else list(value)
    every = listed in (["all-linear"], ["all"])
    conversion.take("adapter.target_modules", "all-linear" if every else [one.strip() for one in listed], name)


def _adapter(key: str) -> Any:
    """Takes a setting of LoRA if the configuration asks for LoRA."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if conversion.given.get("use_peft"):
            conversion.take(key, number(value), name)
        elif name in conversion.given:
            conversion.not_needed[name] = "without use_peft it has no effect"

    return rule


TABLE: Table = {
    "model_name_or_path": to("model.name_or_path"),
    "model_revision": to("model.revision"),
    "trust_remote_code": to("model.trust_remote_code"),
    "dtype": not_needed("weights stay in float32, and training.mixed_precision computes in 16 bits"),
    "torch_dtype": not_needed("weights stay in float32, and training.mixed_precision computes in 16 bits"),
    "attn_implementation": words(
        "model.attention", ATTENTION, "model.attention has not got it; auto takes what there is"
    ),
    "model_init_kwargs": no_counterpart("set model.dtype and model.attention"),
    "dataset_name": _dataset,
    "dataset_config": not_needed("with dataset_name"),
    "dataset_train_split": not_needed("with dataset_name"),
    "dataset_test_split": not_needed("with dataset_name"),
    "datasets": _datasets,
    "dataset_streaming": to("data.streaming"),
    "dataset_text_field": to("data.columns.text"),
    "dataset_num_proc": to("data.num_proc"),
    "dataset_kwargs": no_counterpart("layouts are found from the columns"),
    "max_length": to("data.max_length"),
    "max_seq_length": to("data.max_length"),
    "max_prompt_length": no_counterpart("data.max_length counts prompt and answer together"),
    "max_completion_length": no_counterpart("data.max_length counts prompt and answer together"),
    "truncation_mode": not_needed("data.long_rows: truncate keeps the start"),
    "packing": to("data.packing"),
    "packing_strategy": not_needed("rows are packed best-fit decreasing"),
    "padding_free": not_needed("data.packing leaves no padding"),
    "eval_packing": not_needed("held-out rows are read as those to train on"),
    "assistant_only_loss": _assistant_only,
    "completion_only_loss": _completion_only,
    "chat_template_path": words(
        "data.chat_template", {"chatml": "chatml", "alpaca": "alpaca"}, "the tokenizer's own is used"
    ),
    "eos_token": not_needed("the template decides which token ends a turn"),
    "pad_token": not_needed("one is found"),
    "shuffle_dataset": to("data.shuffle"),
    "activation_offloading": if_true("sharding.offload_checkpoints", True),
    "loss_type": _loss_type,
    "beta": _beta,
    "label_smoothing": to("objective.label_smoothing"),
    "precompute_ref_log_probs": not_needed(
        "the reference is computed with the adapter off, or from the sharded weights"
    ),
    "desirable_weight": to("objective.desirable_weight"),
    "undesirable_weight": to("objective.undesirable_weight"),
    "center_rewards_coefficient": to("objective.center_rewards_coefficient"),
    "use_peft": if_true("adapter.kind", "lora"),
    "lora_r": _adapter("adapter.r"),
    "lora_alpha": _adapter("adapter.alpha"),
    "lora_dropout": _adapter("adapter.dropout"),
    "lora_target_modules": _targets,
    "lora_modules_to_save": to("adapter.modules_to_save"),
    "use_rslora": to("adapter.use_rslora"),
    "use_dora": to("adapter.use_dora"),
    "lora_task_type": not_needed("the objective says it"),
    "load_in_4bit": _four_bits,
    "load_in_8bit": if_true("adapter.quantize", "int8"),
    "bnb_4bit_quant_type": not_needed("nf4"),
    "use_bnb_nested_quant": if_true("adapter.double_quantization", True),
    **TRAINING_ARGUMENTS,
}

RATES = {"preference": 1e-6, "kto": 1e-6, "reward": 1e-4}
"""`objective.kind` -> the default of learning_rate, which is 2e-5 for the others."""

DEFAULTS = {
    "max_length": 1024,
    "packing": False,
    "assistant_only_loss": False,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "output_dir": "outputs/trl",
    "bf16": True,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}


def convert(given: dict[str, Any]) -> Conversion:
    """Returns the recipe of TRL's arguments. TRL cuts long rows."""
    conversion, kind = Conversion("TRL", given), _kind(given)
    if kind == "causal_lm":
        conversion.draft.set("data.long_rows", "truncate", "TRL cuts long rows.")
    else:
        conversion.draft.set("objective.kind", kind, "From arguments that only such a trainer has.")
    conversion.apply(TABLE, {**DEFAULTS, "learning_rate": RATES.get(kind, 2e-5)})
    if given.get("use_peft") and not given.get("lora_target_modules"):
        conversion.no_counterpart["lora_target_modules"] = (
            "unset: peft adapts a few layers by the type of the model, of Llama's q_proj and v_proj, and here every "
            "linear layer is adapted; set adapter.target_modules"
        )
    return conversion
