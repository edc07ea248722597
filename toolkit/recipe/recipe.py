"""The typed recipe: what to train, on what, and how. Imports neither torch nor transformers.

A recipe is a YAML mapping of sections. `Recipe.load` reads it, applies `key.sub=value` overrides,
checks everything and reports every wrong field together. A loaded recipe is frozen.
"""

from __future__ import annotations

import copy
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from toolkit.errors import BadInputError, RecipeError

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow a data suffix; files are decompressed while they are read."""

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys and values of another type are errors; frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})


class ModelSection(Section):
    """Where the model and its tokenizer come from. Exactly one of `name_or_path` and `config`."""

    name_or_path: str | None = Field(None, description="Hub name or folder of a pretrained model.")
    config: dict[str, Any] | None = Field(
        None, description="Configuration of a model with random weights; `model_type` is required."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Type in which weights are held and updated. Keep float32 under mixed precision.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "auto",
        description="Attention implementation; auto: flash attention where installed, on a GPU in 16 bits, else sdpa, "
        "on a CPU for each document alone.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code shipped with the model.")
    tokenizer: str | None = Field(None, description="Tokenizer's name or folder, if not the model's.")
    add_tokens: list[str] | None = Field(
        None, description="Special tokens added to the tokenizer; the embeddings get rows for them."
    )
    train_tokenizer_vocab_size: int | None = Field(
        None, ge=300, description="Train a byte-pair tokenizer of this size on data.train (entries)."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.name_or_path is None) == (self.config is None):
            raise _contradiction("exactly one of model.name_or_path and model.config must be set")
        if self.config is not None and "model_type" not in self.config:
            raise _contradiction("model.config needs the key model_type, for example model_type: llama")
        if self.config is not None and self.revision is not None:
            raise _contradiction("model.revision has no effect with model.config; remove one of them")
        if self.tokenizer is not None and self.train_tokenizer_vocab_size is not None:
            raise _contradiction("model.tokenizer and model.train_tokenizer_vocab_size contradict each other; set one")
        if self.add_tokens is not None and self.train_tokenizer_vocab_size is not None:
            raise _contradiction("model.add_tokens has no effect with model.train_tokenizer_vocab_size; remove it")
        if self.config is not None and self.tokenizer is None and self.train_tokenizer_vocab_size is None:
            raise _contradiction(
                "a model from model.config brings no tokenizer; set model.tokenizer or model.train_tokenizer_vocab_size"
            )
        return self


class SourceSection(Section):
    """One source of rows; its bare `path` stands for it where nothing else is set."""

    path: str = Field(min_length=1, description="File, glob, folder that `datasets` saved, or hub name.")
    weight: PositiveFloat | None = Field(
        None, description="Share of the rows trained on that come from it, in proportion to the others' weights."
    )
    config: str | None = Field(None, description="Configuration name of a hub data set.")
    split: str | None = Field(None, description="Split of a hub data set (train when unset).")

    @model_validator(mode="after")
    def _consistent(self) -> SourceSection:
        if (self.config or self.split) and is_file_source(self.path):
            raise _contradiction(f"data: config and split have no effect on the files of {self.path!r}; remove them")
        return self


class ColumnsSection(Section):
    """Names of the columns to read, where they are not the usual ones. Setting some chooses the layout."""

    messages: str | None = Field(None, description="Conversation: role and content, or from and value (`messages`).")
    prompt: str | None = Field(None, description="What is answered: text or messages (`prompt`).")
    completion: str | None = Field(None, description="The answer: text or messages (`completion`).")
    instruction: str | None = Field(None, description="Task, answered by `output` (`instruction`).")
    input: str | None = Field(None, description="What the instruction is about, if anything (`input`).")
    output: str | None = Field(None, description="Answer to the instruction (`output`).")
    chosen: str | None = Field(None, description="Preferred completion: text or messages (`chosen`).")
    rejected: str | None = Field(None, description="The other completion: text or messages (`rejected`).")
    text: str | None = Field(None, description="Text, all of which is trained on or classified (`text`).")
    text_pair: str | None = Field(None, description="Second text of a pair to classify.")
    label: str | None = Field(None, description="Class of a text (`label`).")
    system: str | None = Field(None, description="System prompt of a conversation (`system`).")
    tools: str | None = Field(None, description="Tools of a conversation: a list, or JSON (`tools`).")


class DataSection(Section):
    """What is read. A source is a file, a glob, a folder or a hub name; a list concatenates sources, or mixes
    them by weight."""

    train: list[SourceSection] = Field(
        min_length=1, description="Training rows: jsonl, json, csv, parquet, arrow or txt files, or a hub name."
    )
    validation: list[SourceSection] | None = Field(None, min_length=1, description="Held-out rows, as data.train.")
    validation_fraction: OpenFraction | None = Field(
        None, description="Share of data.train's rows held out, chosen by training.seed."
    )
    columns: ColumnsSection = Field(ColumnsSection(), description="Columns by hand; see data.columns.")
    chat_template: Literal["chatml", "alpaca"] | None = Field(
        None, description="A template of ours for conversations, instead of the tokenizer's own."
    )
    targets: Literal["assistant", "last_turn", "all"] | None = Field(
        None, description="What of a conversation or a prompt's answer is learned; null: assistant."
    )
    max_length: int = Field(ge=8, description="Length of a training sample (tokens).")
    long_rows: Literal["error", "drop", "truncate", "split"] | None = Field(
        None,
        description="Rows longer than data.max_length. error: dropped, but an error if they are more than 1 %. "
        "Null: split for plain text, else error.",
    )
    packing: bool | None = Field(
        None,
        description="Several rows share a sample without seeing each other; off: rows are padded. Null: on, "
        "except for classification.",
    )
    streaming: bool = Field(
        False, description="Read while training, for data larger than the disk; every rank reads all of it."
    )
    shuffle: bool = Field(True, description="Shuffle samples anew each epoch, by training.seed.")
    max_validation_samples: PositiveInt | None = Field(
        None, description="Evaluate on the first so many samples only (samples)."
    )
    num_proc: PositiveInt = Field(1, description="Processes that tokenise (processes).")
    cache_dir: str | None = Field(
        None, description="Folder for tokenised data; by default finetune-toolkit in the user's cache."
    )

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _as_sections(cls, value: Any) -> Any:
        """A path, a mapping or a list of them, as a list of mappings."""
        if isinstance(value, str | Mapping):
            value = [value]
        if not isinstance(value, list):
            return value
        return [{"path": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if self.validation is not None and self.validation_fraction is not None:
            raise _contradiction("data.validation and data.validation_fraction contradict each other; set one")
        if self.max_validation_samples is not None and not self.has_validation:
            raise _contradiction(
                "data.max_validation_samples has no effect without data.validation or data.validation_fraction"
            )
        self._check_weights()
        self._check_streaming()
        return self

    def _check_weights(self) -> None:
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            raise _contradiction("data.train: give every source a weight, or none")
        if weighted == [True]:
            raise _contradiction("data.train.0.weight has no effect on a single source; remove it")
        if any(source.weight is not None for source in self.validation or []):
            raise _contradiction("data.validation: weights have no effect, each row is evaluated once; remove them")

    def _check_streaming(self) -> None:
        if self.streaming and self.validation_fraction is not None:
            raise _contradiction(
                "data.validation_fraction is not possible with data.streaming, whose rows are not known before; "
                "name held-out rows in data.validation"
            )
        if self.streaming and self.num_proc > 1:
            raise _contradiction("data.num_proc has no effect with data.streaming; remove one of them")

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.validation_fraction is not None


PREFERENCE_SETTINGS = {
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "simpo": ("beta", "gamma"),
    "orpo": ("odds_weight",),
}
"""Preference loss -> the settings that have an effect on it; their defaults stand beside the losses."""


class ObjectiveSection(Section):
    """What is minimised."""

    kind: Literal["causal_lm", "sequence_classification", "preference"] = Field(
        "causal_lm",
        description="causal_lm: next-token cross-entropy. sequence_classification: cross-entropy of a text's class. "
        "preference: chosen completions over rejected ones.",
    )
    loss: Literal["dpo", "ipo", "simpo", "orpo"] | None = Field(
        None, description="Preference loss (arXiv 2305.18290, 2310.12036, 2405.14734, 2403.07691); null: dpo."
    )
    beta: PositiveFloat | None = Field(None, description="dpo, ipo (null: 0.1) and simpo (null: 2): scale of rewards.")
    label_smoothing: float | None = Field(
        None, ge=0.0, lt=0.5, description="dpo: share of pairs taken to be the wrong way round; null: 0."
    )
    gamma: float | None = Field(None, ge=0.0, description="simpo: margin to reach; null: 1.")
    odds_weight: PositiveFloat | None = Field(None, description="orpo: weight of the odds ratio; null: 0.1.")
    labels: list[str] | None = Field(
        None, description="Names of the classes in the order of their numbers; null: those of data.train, sorted."
    )
    class_weights: Literal["balanced"] | list[PositiveFloat] | None = Field(
        None, description="Weight of each class in the loss; balanced: rows / (classes x rows of the class)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveSection:
        if self.kind != "sequence_classification":
            for key in ("labels", "class_weights"):
                if getattr(self, key) is not None:
                    raise _contradiction(f"objective.{key} has no effect with objective.kind {self.kind}; remove it")
        self._check_preference()
        if self.labels is not None and (len(set(self.labels)) < 2 or len(set(self.labels)) < len(self.labels)):
            raise _contradiction("objective.labels: needs two names or more, all different")
        return self

    def _check_preference(self) -> None:
        settings = ("beta", "label_smoothing", "gamma", "odds_weight")
        if self.kind != "preference":
            for key in ("loss", *settings):
                if getattr(self, key) is not None:
                    raise _contradiction(f"objective.{key} has no effect with objective.kind {self.kind}; remove it")
            return
        loss = self.loss or "dpo"
        for key in settings:
            if getattr(self, key) is not None and key not in PREFERENCE_SETTINGS[loss]:
                raise _contradiction(
                    f"objective.{key} has no effect with objective.loss {loss}, which takes "
                    f"{', '.join(PREFERENCE_SETTINGS[loss])}; remove it"
                )


class AdapterSection(Section):
    """Which parameters are trained."""

    kind: Literal["none", "lora"] = Field(
        "none", description="none: every parameter of the model. lora: low-rank adapters, through peft."
    )
    r: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveFloat | None = Field(
        None, description="The adapters' product is scaled by alpha / r, with rsLoRA by alpha / sqrt(r); null: 2 r."
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout before the adapters.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="What is adapted: all-linear (every linear layer but the head), names of modules, or a pattern "
        "(regular expression) of whole paths.",
    )
    modules_to_save: list[str] | None = Field(None, description="Modules that are trained in full and saved.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) (arXiv 2312.03732).")
    use_dora: bool = Field(False, description="Magnitudes apart from directions (arXiv 2402.09353).")

    @model_validator(mode="after")
    def _consistent(self) -> AdapterSection:
        if self.kind == "none" and (idle := sorted(self.model_fields_set - {"kind"})):
            raise _contradiction(f"adapter.{idle[0]} has no effect with adapter.kind none; set adapter.kind=lora")
        return self


OFFLOAD_DETAILS = ("offload_executor", "device_state_gib", "offload_threads")
"""Fields of the sharding section that say how state is offloaded."""


class ShardingSection(Section):
    """How the model is sharded. The strategy may stand in the Accelerate config instead."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hybrid"] | None = Field(
        None, description="Overrides nothing: must agree with the Accelerate config if both name one."
    )
    unit_classes: list[str] | None = Field(
        None, description="Class names of the modules that form a unit each, instead of those found."
    )
    activation_checkpointing: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="Run every n-th block again in backward instead of keeping its activations; 1: all; auto: as few "
        "blocks as the plan says the memory needs.",
    )
    prefetch: PositiveInt | None = Field(
        None, description="Blocks whose parameters are gathered ahead of the one that computes; null: FSDP2's own one."
    )
    offload_checkpoints: bool = Field(False, description="Keep the inputs of checkpointed blocks in host memory.")
    offload: Literal["none", "optimizer"] | None = Field(
        None,
        description="optimizer: master weights and optimizer state in host memory. "
        "Unset: as the strategy in the Accelerate config says (`zero3+offload`).",
    )
    offload_executor: Literal["auto", "cpu_torch", "cpu_fused", "device_stream"] | None = Field(
        None, description="What steps the offloaded state; auto (also when unset) measures and picks."
    )
    device_state_gib: Annotated[float, Field(ge=0.0)] | Literal["auto"] | None = Field(
        None, description="Optimizer state of the first units that stays on each device (GiB); unset: none."
    )
    offload_threads: PositiveInt | None = Field(
        None, description="Threads of the step on the host; unset: the rank's share of the cores less two."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ShardingSection:
        for key in OFFLOAD_DETAILS:
            if self.offload == "none" and getattr(self, key) is not None:
                raise _contradiction(f"sharding.{key} has no effect with sharding.offload: none; remove one of them")
        if self.offload_checkpoints and self.activation_checkpointing is None:
            raise _contradiction("sharding.offload_checkpoints has no effect without sharding.activation_checkpointing")
        return self


class OptimizerSection(Section):
    """AdamW (arXiv 1711.05101) or Muon (arXiv 2502.16982); biases and norms are not decayed."""

    kind: Literal["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8", "muon"] = Field(
        "adamw",
        description="adamw: torch's fused AdamW. adamw_8bit, adamw_4bit, adamw_fp8: torchao's, with moments of so "
        "many bits. muon: the blocks' matrices by Muon, the rest by AdamW.",
    )
    learning_rate: float = Field(gt=0.0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0.0, description="Decoupled decay of matrices.")
    beta1: Beta = Field(0.9, description="Decay rate of the first moment; with muon, of what AdamW steps.")
    beta2: Beta = Field(0.999, description="Decay rate of the second moment.")
    eps: float = Field(1e-8, gt=0.0, description="Term added to the denominator.")
    momentum: Beta | None = Field(None, description="muon: momentum of the matrices; null: 0.95.")

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSection:
        if self.momentum is not None and self.kind != "muon":
            raise _contradiction(f"optimizer.momentum has no effect with optimizer.kind {self.kind}; remove it")
        return self


class ScheduleSection(Section):
    """The learning rate over the optimizer steps, as a factor of its peak."""

    kind: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "cosine", description="Shape after warm-up; warmup_stable_decay is flat, then linear."
    )
    warmup_steps: int | None = Field(None, ge=0, description="Linear warm-up (optimizer steps).")
    warmup_fraction: Fraction | None = Field(None, description="Linear warm-up (share of all steps).")
    min_factor: Fraction = Field(0.0, description="Factor reached at the last step.")
    decay_fraction: Fraction | None = Field(
        None, description="warmup_stable_decay only: share of all steps that decay (0.1 when unset)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleSection:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise _contradiction("schedule.warmup_steps and schedule.warmup_fraction contradict each other; set one")
        if self.kind != "warmup_stable_decay" and self.decay_fraction is not None:
            raise _contradiction(f"schedule.decay_fraction has no effect with schedule.kind {self.kind}")
        if self.kind == "constant" and self.min_factor != 0.0:
            raise _contradiction("schedule.min_factor has no effect with schedule.kind constant")
        if (self.warmup_fraction or 0.0) + (self.decay_fraction or 0.0) > 1.0:
            raise _contradiction("schedule.warmup_fraction and schedule.decay_fraction exceed 1 together")
        return self


MOST_PROFILED_STEPS = 20
"""Every operator of a profiled step is held in memory and written down (steps)."""


class TrainingSection(Section):
    """The loop. One optimizer step sees micro_batch_size x ranks x gradient_accumulation_steps samples."""

    output_dir: str = Field(description="Folder of the run; must not hold a run yet.")
    max_steps: PositiveInt | None = Field(None, description="Length of the run (optimizer steps).")
    num_epochs: float | None = Field(None, gt=0.0, description="Length of the run (passes over the data).")
    micro_batch_size: PositiveInt = Field(1, description="Samples of one forward on one rank (samples).")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Micro-batches per rank and step.")
    max_grad_norm: float | None = Field(1.0, gt=0.0, description="Clip the global gradient norm; null: off.")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = Field(
        None, description="Compute type; null: as the Accelerate config says. Reduction is in float32."
    )
    compile: bool = Field(
        False, description="torch.compile each block: shorter steps after a first one that takes up to minutes."
    )
    seed: int = Field(0, ge=0, description="Seeds weights, order of samples and dropout.")
    eval_every_steps: PositiveInt | None = Field(
        None, description="Evaluate so often (steps); null: at the start and the end."
    )
    profile_steps: list[PositiveInt] | None = Field(
        None, min_length=2, max_length=2, description="First and last step to profile (steps); null: none."
    )
    max_non_finite_steps: PositiveInt = Field(
        3, description="Stop after so many steps in a row with a non-finite loss or gradient."
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSection:
        if (self.max_steps is None) == (self.num_epochs is None):
            raise _contradiction("exactly one of training.max_steps and training.num_epochs must be set")
        self._check_profile()
        return self

    def _check_profile(self) -> None:
        if self.profile_steps is None:
            return
        first, last = self.profile_steps
        if not first <= last < first + MOST_PROFILED_STEPS:
            raise _contradiction(
                f"training.profile_steps: found {self.profile_steps}; needs the first and the last step, at most "
                f"{MOST_PROFILED_STEPS} of them, for example [3, 5]"
            )
        if self.max_steps is not None and last > self.max_steps:
            raise _contradiction(
                f"training.profile_steps: the last step is {last}, but training.max_steps is {self.max_steps}; lower it"
            )


class CheckpointSection(Section):
    """When the run's state is saved, what is kept, and what a run goes on from.

    A run that is asked to stop (Ctrl-C, SIGTERM, `time_limit_minutes`) saves its state in any case.
    """

    every_steps: PositiveInt | None = Field(
        None, description="Save the state so often (optimizer steps); null: only when the run is asked to stop."
    )
    keep_last: PositiveInt | None = Field(2, description="Keep the last so many; null: all.")
    keep_every: PositiveInt | None = Field(
        None, description="Keep those of multiples of so many steps for good (optimizer steps)."
    )
    keep_best: bool = Field(False, description="Keep the one with the lowest held-out loss, too.")
    asynchronous: bool = Field(True, description="Go on training while a copy on the host is written.")
    resume: str = Field(
        "auto",
        description="auto: go on from the last whole checkpoint of training.output_dir, if any; never; "
        "or the folder of a checkpoint or of a run.",
    )
    time_limit_minutes: PositiveFloat | None = Field(
        None, description="Save and end, with exit code 3, after the step in which so long is over (minutes)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointSection:
        for key in ("keep_every", "keep_best"):
            if getattr(self, key) and self.keep_last is None:
                raise _contradiction(f"checkpoint.{key} has no effect with checkpoint.keep_last: null, which keeps all")
            if getattr(self, key) and self.every_steps is None:
                raise _contradiction(f"checkpoint.{key} has no effect without checkpoint.every_steps")
        return self


class LoggingSection(Section):
    """What is shown and where it goes."""

    every_steps: PositiveInt = Field(10, description="A console line so often where there is no terminal (steps).")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list, description="Accelerate trackers that get every metric."
    )
    project_name: str = Field("finetune", description="Project's name in the trackers.")
    sample_prompt: str | None = Field(None, description="Prompt of the text printed at the end; null: none.")
    sample_max_new_tokens: PositiveInt = Field(80, description="Length of that text (tokens).")

    @model_validator(mode="after")
    def _consistent(self) -> LoggingSection:
        if self.sample_prompt is None and "sample_max_new_tokens" in self.model_fields_set:
            raise _contradiction("logging.sample_max_new_tokens has no effect without logging.sample_prompt")
        return self


class ExportSection(Section):
    """The folder that `from_pretrained` loads."""

    enabled: bool = Field(True, description="Write OUTPUT_DIR/export at the end.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type of the exported weights; null: model.dtype."
    )
    max_shard_gib: float = Field(4.0, gt=0.0, description="Largest safetensors file (GiB).")
    merge: bool = Field(False, description="Add adapters to the weights: a whole model instead of an adapter.")
    verify: bool = Field(True, description="Reload the folder and compare logits on one batch.")


class Recipe(Section):
    """A whole run. `Recipe.load("quickstart", ["training.max_steps=50"])`."""

    description: str = Field("", description="One line that `toolkit recipes` shows.")
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    adapter: AdapterSection = AdapterSection()
    sharding: ShardingSection = ShardingSection()
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    export: ExportSection = ExportSection()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.training.eval_every_steps is not None and not self.data.has_validation:
            raise _contradiction(
                "training.eval_every_steps has no effect without data.validation or data.validation_fraction"
            )
        if self.logging.sample_prompt is not None and not self.export.enabled:
            raise _contradiction("logging.sample_prompt needs export.enabled: the sample is made from the export")
        if self.data.streaming and self.training.num_epochs is not None:
            raise _contradiction(
                "training.num_epochs is not possible with data.streaming, whose length is not known; "
                "set training.max_steps"
            )
        if self.objective.kind == "sequence_classification":
            self._check_classification()
        if self.objective.kind == "preference":
            self._check_pairs()
        self._check_adapter()
        if self.sharding.offload == "optimizer" and self.optimizer.kind != "adamw":
            raise _contradiction(
                f"sharding.offload: optimizer is not possible with optimizer.kind {self.optimizer.kind}; set "
                "optimizer.kind=adamw or sharding.offload=none"
            )
        if not self.export.enabled and self.export.model_fields_set - {"enabled"}:
            raise _contradiction("settings of export have no effect with export.enabled: false")
        return self

    def _check_pairs(self) -> None:
        what = "with objective.kind preference"
        if self.data.streaming:
            raise _contradiction(f"data.streaming is not possible {what}; remove it")
        if self.data.long_rows in ("split", "truncate"):
            raise _contradiction(f"data.long_rows {self.data.long_rows} is not possible {what}; allowed: error, drop")
        if self.data.targets is not None:
            raise _contradiction(f"data.targets has no effect {what}: completions are compared; remove it")

    def _check_adapter(self) -> None:
        if self.adapter.kind == "none" and self.export.merge:
            raise _contradiction("export.merge has no effect without adapters; remove it, or set adapter.kind=lora")
        if self.adapter.kind != "none" and self.model.add_tokens is not None and not self.export.merge:
            raise _contradiction(
                "model.add_tokens: an adapter fits the embeddings of its base, which have no rows for them; "
                "set export.merge=true, and adapter.modules_to_save to the embeddings"
            )
        if self.adapter.kind != "none" and self.model.config is not None and not self.export.merge:
            raise _contradiction(
                "an adapter of a model with random weights fits no model that could be loaded later; "
                "set export.merge=true, or model.name_or_path"
            )

    def _check_classification(self) -> None:
        what = "with objective.kind sequence_classification"
        if self.data.packing:
            raise _contradiction(f"data.packing is not possible {what}; remove it")
        if self.data.streaming:
            raise _contradiction(f"data.streaming is not possible {what}; remove it")
        if self.data.long_rows == "split":
            raise _contradiction(f"data.long_rows split is not possible {what}; allowed: error, drop, truncate")
        for key in ("targets", "chat_template"):
            if getattr(self.data, key) is not None:
                raise _contradiction(f"data.{key} has no effect {what}; remove it")
        if self.logging.sample_prompt is not None:
            raise _contradiction(f"logging.sample_prompt has no effect {what}: the model writes no text; remove it")

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Reads a recipe by the name of a shipped one or by path.

        Args:
            name_or_path: `quickstart`, or the path of a YAML file.
            overrides: `section.key=value` texts; the value is YAML.

        Raises:
            RecipeError: with every wrong field, or where the file is no mapping.
            BadInputError: where there is no such recipe.
        """
        path = find_recipe(name_or_path)
        values = _read_yaml(path)
        origins = dict.fromkeys(_dotted(values), str(path))
        _anchor_paths(values, path.parent)
        problems = _apply_overrides(values, overrides, origins)
        recipe = cls._checked(values, str(path), problems)
        recipe._origins.update(origins)
        return recipe

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from nested mappings, checked as `load` does. Raises RecipeError."""
        return cls._checked(dict(values), "recipe", [])

    @classmethod
    def _checked(cls, values: dict[str, Any], origin: str, problems: list[str]) -> Recipe:
        try:
            recipe = cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(origin, problems + _problems(error.errors(), values)) from None
        if problems:
            raise RecipeError(origin, problems)
        return recipe

    def origins(self) -> dict[str, tuple[Any, str]]:
        """Dotted path -> (value, where it came from): a file, `override` or `default`."""
        flat = _dotted(self.model_dump(mode="json"))
        return {key: (value, self._origin_of(key)) for key, value in flat.items()}

    def _origin_of(self, key: str) -> str:
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "default"

    def to_yaml(self) -> str:
        """The resolved recipe; loading this text again gives an equal recipe."""
        return yaml.safe_dump(_written(self), sort_keys=False, allow_unicode=True, width=100)


def _written(section: Section) -> dict[str, Any]:
    """Every field with its value, except those whose mere mention would be an error in these settings."""
    written: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            written[name] = _written(value)
        elif isinstance(value, list) and value and isinstance(value[0], SourceSection):
            written[name] = [_source_written(source) for source in value]
        elif not _is_conditional(section, name):
            written[name] = value
    return written


def _source_written(source: SourceSection) -> str | dict[str, Any]:
    fields = source.model_dump(exclude_none=True)
    return source.path if list(fields) == ["path"] else fields


def _is_conditional(section: Section, name: str) -> bool:
    if isinstance(section, AdapterSection):
        return name != "kind" and section.kind == "none"
    if isinstance(section, LoggingSection):
        return name == "sample_max_new_tokens" and section.sample_prompt is None
    return isinstance(section, ExportSection) and name != "enabled" and not section.enabled


def is_file_source(source: str) -> bool:
    """True for a path or glob, False for a hub name."""
    bare = source
    for ending in COMPRESSIONS:
        bare = bare.removesuffix(ending)
    return bare.endswith(DATA_SUFFIXES) or source.startswith(("/", "./", "../", "~")) or os.path.exists(source)


def require_folder(name: str, field: str) -> None:
    """Raises BadInputError where `name` is a path, and not a hub name, and there is no such folder."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.exists()
    if is_path and not path.is_dir():
        found = "is a file" if path.is_file() else "does not exist"
        raise BadInputError(f"{field}: the folder {name!r} {found}; name a model's folder or a hub name")


def recipe_folder() -> Path:
    """The folder of the shipped recipes: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of every shipped recipe."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe. Raises BadInputError that lists the shipped ones."""
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_file():
        return path.resolve()
    shipped = shipped_recipes()
    if text in shipped:
        return shipped[text]
    names = ", ".join(shipped) or "none"
    if path.suffix in (".yaml", ".yml") or "/" in text:
        raise BadInputError(f"recipe {text!r}: there is no such file. Shipped recipes: {names}")
    hint = _did_you_mean(text, shipped)
    raise BadInputError(f"recipe {text!r}: there is no recipe of that name{hint}. Shipped recipes: {names}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (`3e-4` is a number) and no duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.construct_mapping = _unique_mapping  # type: ignore[method-assign, assignment]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise RecipeError(str(path), [f"not readable as YAML: {error}"]) from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise RecipeError(str(path), [f"a recipe is a mapping of sections (model, data, ...), found {found}"])
    return values


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Relative files named inside a recipe are relative to the recipe, wherever it is started from."""
    for section, keys in (("data", ("train", "validation")), ("model", ("name_or_path", "tokenizer"))):
        fields = values.get(section)
        if not isinstance(fields, dict):
            continue
        for key in keys:
            source = fields.get(key)
            if isinstance(source, list):
                fields[key] = [_anchored_source(item, folder) for item in source]
            else:
                fields[key] = _anchored_source(source, folder)


def _anchored_source(source: Any, folder: Path) -> Any:
    if isinstance(source, dict) and isinstance(source.get("path"), str):
        return {**source, "path": _anchored(source["path"], folder)}
    return _anchored(source, folder) if isinstance(source, str) else source


def _anchored(source: str, folder: Path) -> str:
    candidate = folder / source
    named_as_file = source.endswith(DATA_SUFFIXES) or source.startswith(("./", "../"))
    return str(candidate.resolve()) if named_as_file or candidate.exists() else source


def _apply_overrides(values: dict[str, Any], overrides: Iterable[str], origins: dict[str, str]) -> list[str]:
    problems = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"override {text!r}: expected key.sub=value, for example training.max_steps=50")
            continue
        try:
            value = yaml.load(raw, Loader=_Loader)  # noqa: S506 (a SafeLoader)
        except yaml.YAMLError as error:
            problems.append(f"override {text!r}: the value is not readable as YAML: {error}")
            continue
        problems += _set_path(values, key, value)
        for stale in [known for known in origins if known == key or known.startswith(f"{key}.")]:
            del origins[stale]
        origins[key] = "override"
    return problems


def _set_path(values: dict[str, Any], key: str, value: Any) -> list[str]:
    *parents, last = key.split(".")
    node: Any = values
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return [f"override {key}: {parent} is no section and has no key {last}"]
    node[last] = value
    return []


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_dotted(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _section_at(path: tuple[int | str, ...]) -> type[Section] | None:
    """The section class that holds the last key of `path`."""
    section: Any = Recipe
    for part in path[:-1]:
        if isinstance(part, int) and isinstance(section, list):
            section = section[0]
            continue
        field = section.model_fields.get(part) if isinstance(part, str) and not isinstance(section, list) else None
        section = _section_of(field.annotation) if field is not None else None
        if section is None:
            return None
    return None if isinstance(section, list) else section


def _section_of(annotation: Any) -> Any:
    """The section class of a field; in a list where the field is a list of sections; None where it is neither."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for member in (annotation, *get_args(annotation)):
        items = get_args(member)
        if get_origin(member) is list and isinstance(items[0], type) and issubclass(items[0], Section):
            return [items[0]]
    return None


def _problems(errors: list[ErrorDetails], values: dict[str, Any]) -> list[str]:
    """A line per wrong field; a field that fits no member of a union is told once."""
    by_field: dict[str, str] = {}
    for details in errors:
        if details["type"] == "contradiction":
            by_field[str(details["msg"])] = str(details["msg"])
        else:
            by_field.setdefault(".".join(map(str, _field_location(details["loc"]))), _describe(details))
    unknown = [details["loc"] for details in errors if details["type"] == "extra_forbidden"]
    return list(by_field.values()) + [text for text in _hidden_contradictions(values, unknown) if text not in by_field]


def _hidden_contradictions(values: dict[str, Any], unknown: list[tuple[int | str, ...]]) -> list[str]:
    """Contradictions that pydantic does not look for in a section with an unknown key."""
    if not unknown:
        return []
    values = copy.deepcopy(values)
    for location in unknown:
        node = values
        for part in location[:-1]:
            node = node[part]  # type: ignore[index]
        del node[location[-1]]  # type: ignore[arg-type]
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        return [str(details["msg"]) for details in error.errors() if details["type"] == "contradiction"]
    return []


def _describe(details: ErrorDetails) -> str:
    """One line for one wrong field: dotted path, what was found, what is allowed, how to mend it."""
    location = details["loc"]
    kind = details["type"]
    section = _section_at(location)
    field_location = _field_location(location)
    path = ".".join(str(part) for part in field_location) or "recipe"
    if kind == "extra_forbidden":
        return _describe_unknown(".".join(map(str, location)), str(location[-1]), section)
    if kind == "missing":
        return f"{path}: missing; {_allowed(field_location) or 'a value is required'}"
    found = f"found {details['input']!r} ({_type_name(details['input'])})"
    allowed = _allowed(field_location)
    message = re.sub(r"a valid dictionary or instance of \w+", "a mapping", details["msg"])
    message = message[0].lower() + message[1:]
    return f"{path}: {found}; {message}" + (f"; allowed: {allowed}" if allowed else "")


def _type_name(value: Any) -> str:
    return {"NoneType": "null", "dict": "mapping", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _field_location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location without pydantic's names of union members."""
    for end in range(1, len(location) + 1):
        if isinstance(location[end - 1], int):
            continue
        section = _section_at(location[:end])
        if section is None:
            return location[: end - 1]
        if location[end - 1] not in section.model_fields:
            return location[:end]
    return location


def _describe_unknown(path: str, key: str, section: type[Section] | None) -> str:
    known = list(section.model_fields) if section is not None else []
    hint = _did_you_mean(key, known)
    if not hint:
        homes = [f"{name}.{key}" for name, field in Recipe.model_fields.items() if _has_field(field.annotation, key)]
        hint = f"; did you mean {homes[0]!r}?" if homes else ""
    return f"{path}: unknown key{hint}; allowed here: {', '.join(known)}"


def _has_field(annotation: Any, key: str) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section) and key in annotation.model_fields


def _allowed(location: tuple[int | str, ...]) -> str:
    """What a field takes, in words: its choices or its description."""
    section = _section_at(location)
    field = section.model_fields.get(str(location[-1])) if section is not None and location else None
    if field is None:
        return ""
    choices = _choices(field.annotation)
    if choices:
        return ", ".join("null" if choice is None else str(choice) for choice in choices)
    return (field.description or "").rstrip(".")


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    members = get_args(annotation)
    if members and all(get_origin(m) is Literal or m is type(None) for m in members):
        return [choice for m in members for choice in (get_args(m) if m is not type(None) else [None])]
    return []


def steps_of_run(training: TrainingSection, num_samples: int, samples_per_step: int) -> int:
    """Optimizer steps of a run: `max_steps`, or enough for `num_epochs` passes over `num_samples`."""
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_epochs is not None
    return max(1, math.ceil(round(training.num_epochs * num_samples) / samples_per_step))
