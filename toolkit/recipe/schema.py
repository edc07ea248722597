"""The sections of a recipe: every field with its type, default and description, and what contradicts what.

`toolkit/recipe/recipe.py` puts them together and checks what concerns several sections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from toolkit.places import is_file_source

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys and values of another type are errors; frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})


RIVALS = (
    (("model.name_or_path", "model.revision"), ("model.config", "model.train_tokenizer_vocab_size")),
    (("model.tokenizer",), ("model.train_tokenizer_vocab_size",)),
    (("data.validation",), ("data.validation_fraction",)),
    (("training.max_steps",), ("training.num_epochs",)),
    (("schedule.warmup_steps",), ("schedule.warmup_fraction",)),
)
"""Groups of settings that exclude each other. An override of the first setting of one member replaces the other
member, with the settings that belong to it."""


def _require_one(section: Section, first: str, second: str, where: str) -> None:
    """Raises a contradiction unless exactly one of two settings of the section is set."""
    if getattr(section, first) is None and getattr(section, second) is None:
        raise contradiction(f"{where}.{first} or {where}.{second} must be set")
    _forbid_both(section, first, second, where)


def _forbid_both(section: Section, first: str, second: str, where: str) -> None:
    """Raises a contradiction where both of two settings that exclude each other are set."""
    if getattr(section, first) is not None and getattr(section, second) is not None:
        raise contradiction(
            f"{where}.{first} and {where}.{second} are both set and exclude each other; remove one of them, "
            f"or set it to null"
        )


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
        _require_one(self, "name_or_path", "config", "model")
        if self.config is not None and "model_type" not in self.config:
            raise contradiction("model.config needs the key model_type, for example model_type: llama")
        if self.config is not None and self.revision is not None:
            raise contradiction("model.revision has no effect with model.config; remove one of them")
        _forbid_both(self, "tokenizer", "train_tokenizer_vocab_size", "model")
        if self.add_tokens is not None and self.train_tokenizer_vocab_size is not None:
            raise contradiction("model.add_tokens has no effect with model.train_tokenizer_vocab_size; remove it")
        if self.config is not None and self.tokenizer is None and self.train_tokenizer_vocab_size is None:
            raise contradiction(
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
            raise contradiction(f"data: config and split have no effect on the files of {self.path!r}; remove them")
        return self


class ColumnsSection(Section):
    """Names of the columns to read, where they are not the usual ones. Setting some chooses the layout."""

    messages: str | None = Field(None, description="Conversation: role and content, or from and value (`messages`).")
    prompt: str | None = Field(None, description="What is answered: text or messages (`prompt`).")
    completion: str | None = Field(None, description="The answer: text or messages (`completion`).")
    instruction: str | None = Field(None, description="Task, answered by `output` (`instruction`).")
    input: str | None = Field(None, description="What the instruction is about, if anything (`input`).")
    history: str | None = Field(None, description="Earlier turns: pairs of question and answer (`history`).")
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
    # The longest contexts that models promise are of 10 million tokens; a batch of a billion would be 8 GB a tensor.
    max_length: int = Field(ge=8, le=2**24, description="Length of a training sample (tokens).")
    add_bos: bool | None = Field(
        None,
        description="Plain text begins with the tokenizer's begin-of-text token; null: where the tokenizer adds it.",
    )
    max_dropped_fraction: Fraction = Field(
        0.05, description="Share of a split's rows that may be dropped because they cannot be used; more are an error."
    )
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
        _forbid_both(self, "validation", "validation_fraction", "data")
        if self.max_validation_samples is not None and not self.has_validation:
            raise contradiction(
                "data.max_validation_samples has no effect without data.validation or data.validation_fraction"
            )
        self._check_weights()
        self._check_streaming()
        return self

    def _check_weights(self) -> None:
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            raise contradiction("data.train: give every source a weight, or none")
        if weighted == [True]:
            raise contradiction("data.train.0.weight has no effect on a single source; remove it")
        if any(source.weight is not None for source in self.validation or []):
            raise contradiction("data.validation: weights have no effect, each row is evaluated once; remove them")

    def _check_streaming(self) -> None:
        if self.streaming and self.validation_fraction is not None:
            raise contradiction(
                "data.validation_fraction is not possible with data.streaming, whose rows are not known before; "
                "name held-out rows in data.validation"
            )
        if self.streaming and self.num_proc > 1:
            raise contradiction("data.num_proc has no effect with data.streaming; remove one of them")

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
                    raise contradiction(f"objective.{key} has no effect with objective.kind {self.kind}; remove it")
        self._check_preference()
        if self.labels is not None and (len(set(self.labels)) < 2 or len(set(self.labels)) < len(self.labels)):
            raise contradiction("objective.labels: needs two names or more, all different")
        return self

    @property
    def preference_loss(self) -> str:
        """`loss`, or its default."""
        return self.loss or "dpo"

    def _check_preference(self) -> None:
        settings = ("beta", "label_smoothing", "gamma", "odds_weight")
        if self.kind != "preference":
            for key in ("loss", *settings):
                if getattr(self, key) is not None:
                    raise contradiction(f"objective.{key} has no effect with objective.kind {self.kind}; remove it")
            return
        loss = self.preference_loss
        for key in settings:
            if getattr(self, key) is not None and key not in PREFERENCE_SETTINGS[loss]:
                raise contradiction(
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
            raise contradiction(f"adapter.{idle[0]} has no effect with adapter.kind none; set adapter.kind=lora")
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
                raise contradiction(f"sharding.{key} has no effect with sharding.offload: none; remove one of them")
        if self.offload_checkpoints and self.activation_checkpointing is None:
            raise contradiction("sharding.offload_checkpoints has no effect without sharding.activation_checkpointing")
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
            raise contradiction(f"optimizer.momentum has no effect with optimizer.kind {self.kind}; remove it")
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
        _forbid_both(self, "warmup_steps", "warmup_fraction", "schedule")
        if self.kind != "warmup_stable_decay" and self.decay_fraction is not None:
            raise contradiction(f"schedule.decay_fraction has no effect with schedule.kind {self.kind}")
        if self.kind == "constant" and self.min_factor != 0.0:
            raise contradiction("schedule.min_factor has no effect with schedule.kind constant")
        if (self.warmup_fraction or 0.0) + (self.decay_fraction or 0.0) > 1.0:
            raise contradiction("schedule.warmup_fraction and schedule.decay_fraction exceed 1 together")
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
        _require_one(self, "max_steps", "num_epochs", "training")
        self._check_profile()
        return self

    def _check_profile(self) -> None:
        if self.profile_steps is None:
            return
        first, last = self.profile_steps
        if not first <= last < first + MOST_PROFILED_STEPS:
            raise contradiction(
                f"training.profile_steps: found {self.profile_steps}; needs the first and the last step, at most "
                f"{MOST_PROFILED_STEPS} of them, for example [3, 5]"
            )
        if self.max_steps is not None and last > self.max_steps:
            raise contradiction(
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
                raise contradiction(f"checkpoint.{key} has no effect with checkpoint.keep_last: null, which keeps all")
            if getattr(self, key) and self.every_steps is None:
                raise contradiction(f"checkpoint.{key} has no effect without checkpoint.every_steps")
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
            raise contradiction("logging.sample_max_new_tokens has no effect without logging.sample_prompt")
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


def steps_of_run(training: TrainingSection, num_samples: int, samples_per_step: int) -> int:
    """Optimizer steps of a run: `max_steps`, or enough for `num_epochs` passes over `num_samples`."""
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_epochs is not None
    return max(1, math.ceil(round(training.num_epochs * num_samples) / samples_per_step))
