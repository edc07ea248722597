"""axolotl's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.suggest.from_tools.conversion import (
    Conversion,
    Table,
    fraction,
    if_true,
    no_counterpart,
    not_needed,
    number,
    share_or_steps,
    steps,
    to,
    words,
)
from toolkit.suggest.from_tools.trl import ATTENTION, OPTIMIZERS, SCHEDULES, TRAINING_ARGUMENTS, rate

COLUMNS = {
    "field": "text",
    **{
        f"field_{name}": name
        for name in ("messages", "instruction", "input", "output", "system", "tools", "chosen", "rejected")
    },
}
"""A key of a data set -> the column of `data.columns`."""

READ = {*COLUMNS, "path", "data_files", "ds_type", "name", "split", "type", "roles_to_train", "train_on_eos", "shards"}
"""Keys of a data set that are read."""


def _datasets(conversion: Conversion, name: str, value: Any) -> None:
    """Takes data sets as sources, and what they say of columns and templates."""
    sources = []
    for one in value:
        path = one.get("path")
        files = one.get("data_files")
        if path in FILES or one.get("ds_type") in FILES:
            path = files if isinstance(files, str) else files[0] if files else path
        source = {"path": path, "config": one.get("name"), "split": _other_split(one.get("split"))}
        sources.append({key: each for key, each in source.items() if each is not None})
        kind = one.get("type")
        for key, column in COLUMNS.items():
            told = kind.get(key) if isinstance(kind, Mapping) else None
            if (found := one.get(key) or told) not in (None, column):
                conversion.draft.set(f"data.columns.{column}", found, f"From {name}: {key}.")
        if isinstance(kind, str) and kind.startswith("alpaca") and not conversion.given.get("chat_template"):
            conversion.draft.set(
                "data.chat_template", "alpaca", f"From {name}: type: {kind}, which writes these words."
            )
        if one.get("roles_to_train") == [] or one.get("train_on_eos") == "none":
            conversion.no_counterpart[f"{name}: train_on_eos"] = "the end of each learned turn is learned"
        for key in sorted(one.keys() - READ):
            conversion.no_counterpart[f"{name}: {key}"] = f"{one[key]}: rows are read by their columns; see data.map"
        for key in sorted(kind.keys() - READ) if isinstance(kind, Mapping) else ():
            conversion.no_counterpart[f"{name}: type.{key}"] = "rows are written by the chat template; see data.map"
        if shards := one.get("shards"):
            conversion.no_counterpart[f"{name}: shards"] = (
                f"{shards}: name a smaller file, or a split such as train[:10%]"
            )
    plain = [one["path"] if [*one] == ["path"] else one for one in sources]
    key = "data.train" if name == "datasets" else "data.validation"
    conversion.take(key, plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain, name)


FILES = ("json", "jsonl", "csv", "parquet", "arrow", "text")


def _other_split(split: Any) -> Any:
    return None if split == "train" else split


def _adapter(conversion: Conversion, name: str, value: Any) -> None:
    if value not in ("lora", "qlora"):
        conversion.no_counterpart[name] = f"{value!r}: adapter.kind takes lora; qlora is lora with adapter.quantize"
        return
    conversion.take("adapter.kind", "lora", name)
    if value == "qlora":
        conversion.take("adapter.quantize", "nf4", name)


def _preferences(conversion: Conversion, name: str, value: Any) -> None:
    losses = {"dpo": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
    if value in losses:
        conversion.take("objective.kind", "preference", name)
        conversion.take("objective.loss", losses[value], name)
    elif value == "kto":
        conversion.take("objective.kind", "kto", name)
    else:
        conversion.no_counterpart[name] = f"{value!r}: recipes have no online training; see docs/own_loop.md"


def _template(conversion: Conversion, name: str, value: Any) -> None:
    if value in ("chatml", "alpaca"):
        conversion.take("data.chat_template", value, name)
    else:
        conversion.not_needed[name] = f"{value}: the tokenizer's own template is used"


def _precision(word: str) -> Any:
    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if value in (True, "auto", "full", "true"):
            conversion.take("training.mixed_precision", word, name)
        else:
            conversion.not_needed[name] = "off"

    return rule


def _sharding(conversion: Conversion, name: str, value: Any) -> None:
    if name == "fsdp" and conversion.given.get("fsdp_config"):
        conversion.not_needed[name] = "fsdp_config says it"
        return
    settings = value if isinstance(value, Mapping) else {}
    version = "zero2" if settings.get("reshard_after_forward") is False else "zero3"
    conversion.take("sharding.strategy", version, name, "Blocks are found from the model.")
    if settings.get("offload_params") or settings.get("fsdp_offload_params"):
        conversion.take("sharding.offload", "optimizer", name, "Optimizer states go to the host, weights do not.")
    if settings.get("activation_checkpointing"):
        conversion.take("sharding.activation_checkpointing", 1, name)


def _checkpointing(conversion: Conversion, name: str, value: Any) -> None:
    if value in (True, "true", "unsloth", "offload", "offload_disk"):
        conversion.take("sharding.activation_checkpointing", 1, name, "1 checkpoints every block.")
        if value in ("offload", "offload_disk", "unsloth"):
            conversion.take("sharding.offload_checkpoints", True, name)
    else:
        conversion.not_needed[name] = "off, as by default here"


def _tokens(conversion: Conversion, name: str, value: Any) -> None:
    conversion.take("model.add_tokens", value if isinstance(value, list) else [value], name)


def _special_tokens(conversion: Conversion, name: str, value: Any) -> None:
    conversion.no_counterpart[name] = (
        "the tokenizer's own are used, and one to pad with is found; model.add_tokens adds"
    )


def _learned_roles(conversion: Conversion, name: str, value: Any) -> None:
    if value == ["assistant"]:
        conversion.take("data.targets", "assistant", name)
    else:
        conversion.no_counterpart[name] = f"{value}: data.targets takes assistant, last_turn, all and each_turn"


def _targets(conversion: Conversion, name: str, value: Any) -> None:
    if conversion.given.get("lora_target_linear"):
        conversion.not_needed[name] = "lora_target_linear has all of them"
    else:
        conversion.take("adapter.target_modules", value, name)


def _wandb(conversion: Conversion, name: str, value: Any) -> None:
    conversion.take("logging.trackers", ["wandb"], name)
    conversion.take("logging.project_name", value, name)


def _evaluations(key: str) -> Any:
    return no_counterpart(f"{key} counts steps; by default a share of the run is taken")


KERNELS = "the loss never builds whole logits; Triton kernels of other projects are not used"

TABLE: Table = {
    **{name: rule for name, rule in TRAINING_ARGUMENTS.items() if name != "num_train_epochs"},
    "base_model": to("model.name_or_path"),
    "base_model_config": not_needed("the model's own configuration is read"),
    "revision_of_model": to("model.revision"),
    "tokenizer_config": to("model.tokenizer"),
    "model_type": not_needed("the class is found from the configuration"),
    "tokenizer_type": not_needed("the class is found from the configuration"),
    "is_llama_derived_model": not_needed("the class is found from the configuration"),
    "trust_remote_code": to("model.trust_remote_code"),
    "attn_implementation": words("model.attention", ATTENTION, "model.attention is auto"),
    "flash_attention": if_true("model.attention", "auto", "auto takes flash attention where it is installed."),
    "sdp_attention": if_true("model.attention", "sdpa"),
    "flex_attention": if_true("model.attention", "flex_attention"),
    "xformers_attention": no_counterpart("model.attention is auto"),
    "tokens": _tokens,
    "special_tokens": _special_tokens,
    "hub_model_id": to("export.push_to_hub"),
    "hub_strategy": not_needed("the export is pushed at the end"),
    "datasets": _datasets,
    "test_datasets": _datasets,
    "pretraining_dataset": _datasets,
    "val_set_size": fraction,
    "chat_template": _template,
    "train_on_inputs": if_true("data.targets", "all"),
    "roles_to_train": _learned_roles,
    "train_on_eos": not_needed("the end of each learned turn is learned"),
    "sequence_len": to("data.max_length"),
    "excess_length_strategy": words(
        "data.long_rows", {"drop": "drop", "truncate": "truncate", "raise": "error"}, "long_rows"
    ),
    "sample_packing": to("data.packing"),
    "eval_sample_packing": not_needed("held-out rows are read as those to train on"),
    "pad_to_sequence_len": not_needed("packed samples need no padding"),
    "sample_packing_sequentially": no_counterpart("the seed orders the rows"),
    "multipack_real_batches": not_needed("rows are packed"),
    "streaming": to("data.streaming"),
    "shuffle_merged_datasets": to("data.shuffle"),
    "dataset_processes": to("data.num_proc"),
    "dataset_num_proc": to("data.num_proc"),
    "dataset_prepared_path": to("data.cache_dir"),
    "dataset_exact_deduplication": no_counterpart("rows are counted as they are; `toolkit data` shows repeated ones"),
    "adapter": _adapter,
    "lora_model_dir": to("adapter.start_from"),
    "lora_r": to("adapter.r"),
    "lora_alpha": to("adapter.alpha"),
    "lora_dropout": to("adapter.dropout", change=number),
    "lora_target_linear": if_true("adapter.target_modules", "all-linear"),
    "lora_target_modules": _targets,
    "lora_modules_to_save": to("adapter.modules_to_save"),
    "lora_fan_in_fan_out": not_needed("found from the layers"),
    "lora_mlp_kernel": not_needed(KERNELS),
    "lora_qkv_kernel": not_needed(KERNELS),
    "lora_o_kernel": not_needed(KERNELS),
    "peft_use_dora": to("adapter.use_dora"),
    "peft_use_rslora": to("adapter.use_rslora"),
    "load_in_4bit": if_true("adapter.quantize", "nf4"),
    "load_in_8bit": if_true("adapter.quantize", "int8"),
    "rl": _preferences,
    "rl_beta": to("objective.beta", change=number),
    "dpo_beta": to("objective.beta", change=number),
    "simpo_gamma": to("objective.gamma", change=number),
    "orpo_alpha": to("objective.odds_weight", change=number),
    "kto_desirable_weight": to("objective.desirable_weight", change=number),
    "kto_undesirable_weight": to("objective.undesirable_weight", change=number),
    "center_rewards_coefficient": to("objective.center_rewards_coefficient", change=number),
    "reward_model": if_true("objective.kind", "reward"),
    "micro_batch_size": to("training.micro_batch_size"),
    "num_epochs": TRAINING_ARGUMENTS["num_train_epochs"],
    "optimizer": words("optimizer.kind", OPTIMIZERS, f"optimizers here: {', '.join(sorted(set(OPTIMIZERS.values())))}"),
    "learning_rate": rate,
    "lr_scheduler": words("schedule.kind", SCHEDULES, "schedules here: constant, linear, cosine, warmup_stable_decay"),
    "cosine_min_lr_ratio": to("schedule.min_factor", change=number),
    "warmup_steps": share_or_steps,
    "warmup_ratio": share_or_steps,
    "bf16": _precision("bf16"),
    "bfloat16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "tf32": not_needed("torch decides"),
    "gradient_checkpointing": _checkpointing,
    "activation_offloading": if_true("sharding.offload_checkpoints", True),
    "unfrozen_parameters": no_counterpart("training some parameters in full is not implemented"),
    "plugins": no_counterpart("training.extensions has your own code"),
    "liger_rope": not_needed(KERNELS),
    "liger_rms_norm": not_needed(KERNELS),
    "liger_glu_activation": not_needed(KERNELS),
    "liger_fused_linear_cross_entropy": not_needed(KERNELS),
    "cut_cross_entropy": not_needed(KERNELS),
    "fsdp": _sharding,
    "fsdp_config": _sharding,
    "fsdp_version": not_needed("FSDP2"),
    "dp_replicate_size": no_counterpart("set sharding.strategy=hybrid, and the sizes in the Accelerate config"),
    "context_parallel_size": to("sharding.sequence"),
    "sequence_parallel_degree": to("sharding.sequence"),
    "expert_parallel_size": to("sharding.experts"),
    "evals_per_epoch": _evaluations("training.eval_every_steps"),
    "saves_per_epoch": _evaluations("checkpoint.every_steps"),
    "eval_steps": steps("training.eval_every_steps"),
    "early_stopping_patience": to("training.patience"),
    "eval_table_size": no_counterpart("logging.held_out_samples shows answers to held-out prompts"),
    "loss_watchdog_threshold": no_counterpart("a loss that is not finite ends a run: training.max_non_finite_steps"),
    "loss_watchdog_patience": to("training.max_non_finite_steps"),
    "auto_resume_from_checkpoints": not_needed("a run resumes by itself"),
    "strict": not_needed("unknown keys are errors"),
    "debug": not_needed("`toolkit train --dry-run` looks at everything"),
    "wandb_project": _wandb,
    "wandb_entity": no_counterpart("the login of wandb decides"),
    "wandb_name": no_counterpart("the run is called as its folder"),
    "wandb_watch": no_counterpart("gradients are not sent"),
    "wandb_log_model": no_counterpart("checkpoints are not sent"),
    "wandb_run_id": no_counterpart("the tracker chooses it"),
    "use_tensorboard": if_true("logging.trackers", ["tensorboard"]),
    "merge_lora": to("export.merge"),
}

DEFAULTS = {
    "sequence_len": 512,
    "sample_packing": False,
    "micro_batch_size": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "weight_decay": 0.0,
    "output_dir": "outputs/axolotl",
    "learning_rate": 5e-5,
}


def convert(given: dict[str, Any]) -> Conversion:
    """Returns the recipe of an axolotl configuration. axolotl drops long rows."""
    conversion = Conversion("axolotl", given)
    # Rows to pretrain on are joined.
    idle = {"sample_packing"} if given.get("pretraining_dataset") else set()
    conversion.apply(TABLE, {name: value for name, value in DEFAULTS.items() if name not in idle})
    if conversion.draft.get("objective.kind") is None and not given.get("excess_length_strategy"):
        conversion.draft.set("data.long_rows", "drop", "axolotl drops long rows.")
    if given.get("warmup_steps") is None and given.get("warmup_ratio") is None:
        conversion.draft.set("schedule.warmup_fraction", 0.03, "The default in axolotl, there at most 100 steps.")
    return conversion
