"""The sections of a recipe: every field with its type, default and description, and the contradictions in a section.

`toolkit/recipe/recipe.py` puts the sections together; `combinations.py` says which settings of several sections
cannot go together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import Field, field_validator, model_validator

from toolkit.paths import STORES, file_of_rows, is_file_source, is_repository, is_store
from toolkit.published import SIGNATURE
from toolkit.recipe.figures import steering
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.section import (
    COMPARED,
    Beta,
    Compare,
    Fraction,
    FunctionName,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Section,
    TemplateName,
    contradiction,
)

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
    """Raises `contradiction` if neither of two settings of the section is set."""
    if getattr(section, first) is None and getattr(section, second) is None:
        raise contradiction(f"{where}.{first} or {where}.{second} must be set")


class NewToken(Section):
    """A token to add, as tokenizer.json lists them."""

    content: str = Field(min_length=1, description="Add this text as a token.")
    special: bool = Field(False, description="Make it special: servers leave it out of what they return.")

    @classmethod
    def of(cls, token: str | NewToken) -> NewToken:
        return cls(content=token) if isinstance(token, str) else token


class ModelSection(Section):
    """Where the model and its tokenizer come from. Exactly one of `name_or_path` and `config`."""

    name_or_path: str | None = Field(
        None, min_length=1, description="Load a pretrained model from this hub name or folder."
    )
    config: dict[str, Any] | None = Field(
        None, description="Build a model with random weights from this configuration; it needs `model_type`."
    )
    revision: str | None = Field(None, description="Use this branch, tag or commit of the hub model.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Hold and update the weights in this type. Keep float32 to train all of them, also under mixed "
        "precision; with adapters bfloat16 halves the frozen ones.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "auto",
        description="Choose the attention implementation. auto: on a GPU in 16 bits flash attention, if it is "
        "installed; on a CPU sdpa over each packed document by itself; otherwise sdpa.",
    )
    allow_new_weights: list[str] | None = Field(
        None,
        min_length=1,
        description="Allow the files to lack weights with these names (`*` matches anything), which are then drawn at "
        "random, or to hold ones that the model has no place for; null: none, except the head of a classifier.",
    )
    train: list[Literal["language", "projector", "vision"]] | None = Field(
        None,
        min_length=1,
        description="Train these parts of a vision-language model; null: language, and if rows have images and no "
        "adapter is trained, also projector (which maps images to the language model).",
    )
    trust_remote_code: bool = Field(False, description="Run the Python code that comes with the model.")
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="Load the tokenizer from this name or folder instead of the model's; with model.config, the "
        "processor of images, too, if it has one.",
    )
    add_tokens: list[Annotated[str, Field(min_length=1)] | NewToken] | None = Field(
        None,
        min_length=1,
        description="Add these tokens to the tokenizer, and rows for them to the embeddings. A text is an ordinary "
        "token; `{content: <|im_end|>, special: true}` is a special one, which servers leave out of what they return.",
    )
    train_tokenizer_vocab_size: int | None = Field(
        None, ge=300, description="Train a byte-pair tokenizer with this many entries on data.train."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        _require_one(self, "name_or_path", "config", "model")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise contradiction("model.config.model_type: missing or not text; needs a name, for example llama")
        return self


COLUMNS_OF_KEYS = (
    "messages prompt completion instruction input history output chosen rejected text text_pair label source target "
    "tokens tags margin system tools"
)
"""The columns that recipes of version 0.2 may name. Digests hold each of them, also if it is not named."""


class ColumnsSection(Section):
    """Names of the columns to read, if they are not the usual ones. The names that you set decide the layout."""

    messages: str | None = Field(
        None, description="Conversation: a list of role and content, or from and value. Null: `messages`."
    )
    prompt: str | None = Field(None, description="Prompt to answer: text or messages. Null: `prompt`.")
    completion: str | None = Field(None, description="Answer to the prompt: text or messages. Null: `completion`.")
    instruction: str | None = Field(None, description="Task that `output` answers. Null: `instruction`.")
    input: str | None = Field(None, description="Material that the instruction refers to, if any. Null: `input`.")
    history: str | None = Field(None, description="Earlier turns: pairs of question and answer. Null: `history`.")
    output: str | None = Field(None, description="Answer to the instruction. Null: `output`.")
    chosen: str | None = Field(None, description="Preferred completion: text or messages. Null: `chosen`.")
    rejected: str | None = Field(None, description="Rejected completion: text or messages. Null: `rejected`.")
    text: str | None = Field(None, description="Text to train on or to classify. Null: `text`.")
    text_pair: str | None = Field(None, description="Second text of a pair to classify.")
    label: str | None = Field(
        None,
        description="Class of the text, or whether the completion is good (kto). Null: `label`, or `kto_tag`.",
    )
    source: str | None = Field(
        None,
        description="Text to read (seq2seq); `translation.en`: a key of a column. Null: a usual name.",
    )
    target: str | None = Field(
        None,
        description="Text to write (seq2seq); `translation.de`: a key of a column. Null: a usual name.",
    )
    tokens: str | None = Field(None, description="Words to tag: a list of texts. Null: `tokens`.")
    tags: str | None = Field(None, description="Tag of each word: a list. Null: `tags`, or `ner_tags`.")
    margin: str | None = Field(
        None, description="By how much the chosen completion is better: a number (reward). Null: `margin`."
    )
    system: str | None = Field(None, description="System prompt of the conversation. Null: `system`.")
    tools: str | None = Field(
        None, description="Tools that the conversation may call: a list, or JSON text. Null: `tools`."
    )

    @model_validator(mode="after")
    def _each_once(self) -> ColumnsSection:
        named: dict[str, str] = {}
        for what, column in self.model_dump(exclude_none=True).items():
            if (other := named.setdefault(column, what)) != what:
                raise contradiction(f"data.columns, or a source's: {other} and {what} are both {column!r}; correct one")
        return self

    def key(self) -> dict[str, str | None]:
        """Returns the columns that are named, for a digest. A column of a new kind of row changes no other digest."""
        return dict.fromkeys(COLUMNS_OF_KEYS.split()) | self.model_dump(exclude_none=True)


class SourceSection(Section):
    """One source of rows. A bare path is short for a mapping with `path` alone."""

    path: str = Field(
        min_length=1,
        description="Read this file, glob, URL (s3, gs, hf, https), folder saved by `datasets`, or hub data set.",
    )
    weight: PositiveFloat | None = Field(
        None, description="Draw rows from this source in proportion to its weight among the sources."
    )
    name: str | None = Field(
        None,
        pattern=r"^[\w.-]{1,64}$",
        description="Report the loss of its rows under this name, next to that of all rows; sources may share a name.",
    )
    config: str | None = Field(None, description="Use this configuration of a hub data set.")
    split: str | None = Field(None, description="Use this split of a hub data set; null: train.")
    columns: ColumnsSection | None = Field(None, description="Name this source's columns, in place of data.columns.")

    @model_validator(mode="after")
    def _consistent(self) -> SourceSection:
        if is_store(self.path):
            _refuse_credentials("data", self.path)
        if (self.config or self.split) and is_file_source(self.path):
            raise contradiction(f"data: config and split have no effect on the files of {self.path!r}; remove them")
        return self


_Sources = str | SourceSection | list[str | SourceSection] | None
"""What may be written for a list of sources."""


class DataSection(Section):
    """What is read. A source is a file, a glob, a folder or a hub name; a list concatenates sources, or mixes
    them by weight."""

    train: list[SourceSection] = Field(
        min_length=1,
        description="Train on these rows: jsonl, json, csv, parquet, arrow or txt files, or hub data sets.",
    )
    validation: list[SourceSection] | None = Field(
        None, min_length=1, description="Evaluate on these rows, given as in data.train."
    )
    validation_fraction: OpenFraction | None = Field(
        None, description="Hold out this share of data.train's rows, chosen by training.seed."
    )
    map: FunctionName | None = Field(
        None,
        description="Make each row with this function (file.py:function, or module:function on Python's path), which "
        "takes the row as it is stored and returns the row to use, both as a dict. The file's code is run.",
    )
    columns: ColumnsSection = Field(ColumnsSection(), description="Name the columns to read; see data.columns.")
    chat_template: TemplateName | Annotated[str, Field(pattern=r"\.jinja$")] | None = Field(
        None, description="Format conversations with one of these templates, or with that of a file."
    )
    template_arguments: dict[str, Any] | None = Field(
        None,
        min_length=1,
        description="Give the chat template these arguments, such as {enable_thinking: false}. A row's own "
        "chat_template_kwargs override them.",
    )
    template_date: date | None = Field(
        None,
        description="Give the chat template this date, such as 2026-11-25, if it writes the current date; null: the "
        "day on which the run starts, which resumed runs keep.",
    )
    targets: Literal["assistant", "last_turn", "all", "each_turn"] | None = Field(
        None,
        description="Learn these parts of a conversation, or of a prompt and its answer; null: assistant. each_turn: "
        "assistant, with a sample for each answer even where one text would have them all.",
    )
    # The longest contexts that models promise are of 10 million tokens; a batch of a billion would be 8 GB a tensor.
    max_length: int = Field(ge=8, le=2**24, description="Limit samples to this many tokens. Rows are packed or padded.")
    max_target_length: int | None = Field(
        None,
        ge=2,
        le=2**24,
        description="Limit targets to this many tokens, and sources to data.max_length (seq2seq); null: the same.",
    )
    source_prefix: str | None = Field(
        None, min_length=1, description="Put this text before each source, such as T5's `summarize: ` (seq2seq)."
    )
    add_bos: bool | None = Field(
        None,
        description="Begin plain text with the tokenizer's begin-of-text token; null: if the tokenizer adds it.",
    )
    max_dropped_fraction: Fraction = Field(
        0.05, description="Drop rows that cannot be used, up to this share of a split; more are an error."
    )
    long_rows: Literal["error", "drop", "truncate", "split"] | None = Field(
        None,
        description="Handle rows longer than data.max_length. error: drop them, and stop if they are more than "
        "1 %. Null: split for plain text, else error.",
    )
    packing: bool | None = Field(
        None,
        description="Pack several rows into one sample, where they do not attend to each other. false: pad each row. "
        "null: true, except for classification, seq2seq and models that cannot keep rows apart.",
    )
    image_root: str | None = Field(
        None, min_length=1, description="Look for images that rows name in this folder; null: that of the rows."
    )
    min_pixels: PositiveInt | None = Field(
        None,
        description="Enlarge images to at least N pixels (width times height); null: the processor's limit.",
    )
    max_pixels: PositiveInt | None = Field(
        None, description="Shrink images to at most N pixels (width times height); null: the processor's limit."
    )
    streaming: bool = Field(
        False, description="Read rows while training, for data larger than the disk. Every rank reads all of it."
    )
    shuffle: bool = Field(True, description="Shuffle the samples in each epoch, by training.seed.")
    max_validation_samples: PositiveInt | None = Field(None, description="Evaluate on the first N samples only.")
    num_proc: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Tokenise with N processes; auto: where it takes over 5 CPU seconds, as many as there are cores. A "
        "thread tokenises a stream.",
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Keep tokenised data in this folder; null: finetune-toolkit in the user's cache.",
    )

    @field_validator("train", "validation", mode="before", json_schema_input_type=_Sources)
    @classmethod
    def _as_sections(cls, value: Any) -> Any:
        """Turns a path, a mapping or a list of them into a list of mappings, and rows of memory into that of a file."""
        rows = value if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value) else []
        is_of_splits = isinstance(value, Mapping) and any(hasattr(of, "to_parquet") for of in value.values())
        if is_of_splits or hasattr(value, "to_parquet") or (rows and not any("path" in row for row in rows)):
            value = file_of_rows(value)
        if isinstance(value, str | Mapping):
            value = [value]
        if not isinstance(value, list):
            return value
        return [{"path": item} if isinstance(item, str) else item for item in value]

    @field_validator("template_date", mode="before")
    @classmethod
    def _as_date(cls, value: Any) -> Any:
        """Turns the text of a date into the date. Any other text stays, and is refused."""
        is_day = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value)
        with suppress(ValueError):
            return date.fromisoformat(value) if is_day else value
        return value

    @model_validator(mode="after")
    def _columns_are_read(self) -> DataSection:
        if self.columns != ColumnsSection() and all(each.columns for each in [*self.train, *(self.validation or [])]):
            raise contradiction("data.columns has no effect, because every source has columns of its own; remove it")
        return self

    def columns_key(self) -> Any:
        """Returns the columns of the training rows that are named, for a digest."""
        own = [source.columns and source.columns.key() for source in self.train]
        return [self.columns.key(), own] if any(own) else self.columns.key()

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources for training and validation, each once; empty if no source has a name."""
        sources = [*self.train, *(self.validation or [])]
        return tuple(dict.fromkeys(source.name for source in sources if source.name is not None))

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.validation_fraction is not None


LARGEST_ALPHA = 1e6
"""Of adapters: with a much larger one their products overflow."""


class AdapterSection(Section):
    """Which parameters are trained."""

    kind: Literal["none", "lora"] = Field(
        "none",
        description="Choose what to train. none: every parameter of the model. lora: low-rank adapters, through peft.",
    )
    start_from: str | None = Field(
        None,
        min_length=1,
        description="Train the LoRA adapter in this folder further (adapter_config.json, "
        "adapter_model.safetensors), written by a run or by peft. It decides r, alpha, target_modules, "
        "modules_to_save, use_rslora and use_dora. For objectives with a reference, the reference is the base with "
        "this adapter.",
    )
    r: PositiveInt = Field(16, description="Set the rank of the adapters.")
    alpha: float | None = Field(
        None,
        gt=0.0,
        le=LARGEST_ALPHA,
        description="Scale the adapters' product by alpha / r, with rsLoRA by alpha / sqrt(r); null: 2 r.",
    )
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="Apply dropout with this probability to the adapters' inputs."
    )
    target_modules: str | list[str] = Field(
        "all-linear",
        min_length=1,
        description="Adapt these modules: all-linear (every linear layer but the head), a list of names, or a regular "
        "expression for whole paths.",
    )
    modules_to_save: list[str] | None = Field(
        None, min_length=1, description="Train these modules in full and save them."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) (arXiv 2312.03732).")
    use_dora: bool = Field(False, description="Learn magnitudes and directions separately (arXiv 2402.09353).")
    quantize: Literal["none", "nf4", "int8"] = Field(
        "none",
        description="Hold the frozen linear layers in fewer bits (QLoRA, arXiv 2305.14314). nf4: 4 bits. int8: 8 bits. "
        "Needs bitsandbytes.",
    )
    double_quantization: bool = Field(
        False, description="Hold the scales of nf4 in 8 bits, too: 0.52 instead of 0.56 bytes a weight."
    )


class ShardingSection(Section):
    """How the model is sharded. The strategy can be set in the Accelerate config instead."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hybrid"] | None = Field(
        None,
        description="Choose the sharding strategy; null: as the Accelerate config says. If both name one, they must "
        "agree.",
    )
    unit_classes: list[str] | None = Field(
        None,
        min_length=1,
        description="Make each module of these classes a unit, instead of the blocks that are found.",
    )
    activation_checkpointing: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="Recompute every N-th block in backward instead of keeping its activations. 1: every block. auto: "
        "as few blocks as the planned memory needs.",
    )
    accumulate: Literal["by_micro_batch", "by_block"] = Field(
        "by_micro_batch",
        description="Choose how the micro-batches of a step run. by_micro_batch: one after another through the whole "
        "model. by_block: all of them through a block before the next block, so that parameters are gathered twice and "
        "gradients reduced once a step.",
    )
    sequence: PositiveInt = Field(
        1,
        description="Split each row over N neighbouring ranks (sequence parallelism). Each holds 1 / N of its tokens "
        "and, in attention, of its heads. N must divide the ranks and the attention heads.",
    )
    experts: PositiveInt = Field(
        1,
        description="Spread the experts of each layer over groups of N ranks (expert parallelism): tokens travel to "
        "their experts and back. N must divide the ranks (of a replica), and these must divide the experts.",
    )
    tensor: PositiveInt = Field(
        1,
        description="Cut the matrices of each layer over N neighbouring ranks, which have the same rows (tensor "
        "parallelism). N must divide the ranks of a node and the attention heads.",
    )
    reshard_after_forward: int | None = Field(
        None,
        ge=2,
        description="With zero3, shard each unit among N neighbouring ranks from forward to backward, so that backward "
        "gathers inside a node. null: among all ranks.",
    )
    offload_checkpoints: bool = Field(False, description="Keep the inputs of checkpointed blocks in host memory.")
    offload: Literal["none", "optimizer"] | None = Field(
        None,
        description="Keep master weights and optimizer state in host memory (optimizer). Null: as the strategy in the "
        "Accelerate config says (`zero3+offload`).",
    )
    offload_executor: Literal["auto", "cpu_torch", "cpu_fused", "device_stream"] | None = Field(
        None,
        description="Choose what updates the offloaded state. auto or null: cpu_fused where its kernel can be built, "
        "else cpu_torch.",
    )
    device_state_gib: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="Keep this much optimizer state of the first units on each device (GiB). null: none."
    )

    @model_validator(mode="before")
    @classmethod
    def _imply_checkpoints(cls, values: Any) -> Any:
        """Checkpoints every block with `by_block`, which keeps only the inputs of a block."""
        if not isinstance(values, dict) or values.get("accumulate") != "by_block":
            return values
        is_open = values.get("activation_checkpointing") in (None, "auto")
        return {**values, "activation_checkpointing": 1} if is_open else values


class OptimizerSection(Section):
    """AdamW (arXiv 1711.05101) or Muon (arXiv 2502.16982); biases and norms are not decayed."""

    kind: Literal["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8", "muon"] = Field(
        "adamw",
        description="Choose the optimizer. adamw: torch's fused AdamW. adamw_8bit, adamw_4bit, adamw_fp8: torchao's "
        "AdamW with small moments. muon: Muon for the blocks' matrices and experts, AdamW for the rest.",
    )
    learning_rate: float = Field(gt=0.0, description="Set the peak learning rate.")
    weight_decay: float = Field(
        0.01, ge=0.0, description="Shrink matrices by this share times the learning rate, each step."
    )
    beta1: Beta = Field(
        0.9, description="Set the decay rate of the first moment; with muon, for the parameters that AdamW updates."
    )
    beta2: Beta = Field(0.999, description="Set the decay rate of the second moment.")
    eps: float = Field(1e-8, gt=0.0, description="Add this to the denominator of the update.")
    momentum: Beta | None = Field(None, description="Set the momentum of Muon's matrices; null: 0.95.")
    learning_rates: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        {},
        description="Give trained parameters whose names match a pattern their own peak learning rate, for example "
        "{'*vision_tower*': 2e-6}; the first that matches counts, and 0 freezes.",
    )


class ScheduleSection(Section):
    """The learning rate over the optimizer steps, as a factor of its peak."""

    kind: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "cosine", description="Choose the shape after warm-up. warmup_stable_decay: constant, then linear."
    )
    warmup_steps: int | None = Field(None, ge=0, description="Warm up linearly over N optimizer steps.")
    warmup_fraction: Fraction | None = Field(None, description="Warm up linearly over this share of all steps.")
    min_factor: Fraction = Field(0.0, description="Decay towards this factor of the peak, reached after the last step.")
    decay_fraction: Fraction | None = Field(
        None, description="Decay over this last share of all steps (warmup_stable_decay only); null: 0.1."
    )


MOST_PROFILED_STEPS = 20
"""Every operator of a profiled step is held in memory and written down (steps)."""


MAX_SEED = 4_000_000_000
"""NumPy's seeds end at 2^32 - 1, and each rank adds its number to this one for its dropout."""


class TrainingSection(Section):
    """The loop. One optimizer step sees micro_batch_size x ranks x gradient_accumulation_steps samples."""

    output_dir: str = Field(min_length=1, description="Write the run to this folder, which must not hold another run.")
    max_steps: PositiveInt | None = Field(None, description="Train for N optimizer steps.")
    num_epochs: float | None = Field(None, gt=0.0, description="Train for this many passes over the data.")
    micro_batch_size: PositiveInt = Field(1, description="Run N samples through each forward on each rank.")
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Accumulate the gradients of N micro-batches on each rank before a step."
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0.0, description="Clip the global gradient norm at this value; null: do not clip."
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = Field(
        None, description="Compute in this type; null: as the Accelerate config says. Gradients are reduced in float32."
    )
    compile: bool = Field(
        False, description="Compile each block with torch.compile. Steps are shorter; the first takes up to minutes."
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed the weights, the order of samples, and dropout.")
    eval_every_steps: PositiveInt | None = Field(
        None, description="Evaluate every N optimizer steps; null: at the start and the end."
    )
    patience: PositiveInt | None = Field(
        None,
        description="End the run, with exit code 0, after N evaluations in a row without a better figure (best_by); "
        "null: never. The last weights are exported; with checkpoint.keep_best the best ones.",
    )
    best_by: str = Field(
        "loss",
        description="Judge evaluations by this figure of their records, for training.patience and "
        "checkpoint.keep_best: loss, accuracy, f1_macro, answers (the share of right answers, answers.file), "
        "kept_loss. For a figure of your own say which is better: higher NAME, or lower NAME.",
    )
    ema: OpenFraction | None = Field(
        None,
        description="Average the weights over the steps with this decay, for example 0.999, in float32; evaluate and "
        "export the averages. null: do not.",
    )
    extensions: list[FunctionName] = Field(
        default_factory=list,
        description="Call these extensions of the loop (file.py:Class, or module:Class on Python's path). The files' "
        "code is run.",
    )
    profile_steps: list[PositiveInt] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Profile from the first to the last of these two steps; null: do not profile.",
    )
    max_non_finite_steps: PositiveInt = Field(
        3, description="Stop after N steps in a row whose loss or gradient is not finite."
    )
    stall_minutes: PositiveFloat | None = Field(
        10.0,
        description="End the run with exit code 4, and name the rank that is behind, if a rank makes no "
        "progress for this many minutes; null: never. Some phases may take longer: starting 36 times this limit, "
        "restoring and exporting 6 times, saving 3 times. While ranks start, they wait for each other for this long, "
        "and at least a minute.",
    )

    @model_validator(mode="after")
    def _check_length(self) -> TrainingSection:
        _require_one(self, "max_steps", "num_epochs", "training")
        classes = [name.rpartition(":")[2] for name in self.extensions]
        if twice := next((name for name in classes if classes.count(name) > 1), None):
            raise contradiction(f"training.extensions: {twice} is named twice; rename one, or remove it")
        steering(self.best_by)
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


class AnswersSection(Section):
    """Answers that the model writes to held-out prompts at evaluations, scored as `toolkit generate --eval` scores an
    export."""

    file: str | None = Field(
        None,
        min_length=1,
        description="Answer the prompts of this .jsonl file at evaluations; rows as `toolkit generate --eval` takes "
        "them. null: none.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Stop each answer after N tokens.")
    batch_size: PositiveInt = Field(8, description="Answer N prompts at a time on each rank.")
    system: str | None = Field(
        None, min_length=1, description="Put this system prompt before messages that have none of their own."
    )
    raw: bool = Field(False, description="Take prompts as plain text, without the chat template.")
    compare: Compare | None = Field(
        None,
        description=f"Compare an answer with those of its row: {COMPARED} Or score it with this function "
        "(file.py:function, or module:function on Python's path), which gets the answer and its row and returns True, "
        "False or a number from 0 to 1; the file's code is run. null: text.",
    )


class KeptSection(Section):
    """Rows that are not trained on, for what a model must not forget: their loss, and how far it has moved on them."""

    file: str | None = Field(
        None,
        min_length=1,
        description="Measure the loss of this file's rows at evaluations, and the KL divergence of the next tokens "
        "from the model before the first step; rows as data.validation takes them for causal_lm. null: none.",
    )
    max_kl: PositiveFloat | None = Field(
        None,
        description="End the run, with exit code 0, after an evaluation whose divergence is above this (nats a "
        "token); null: never. The last weights are exported; with checkpoint.keep_best the best ones.",
    )


DEFAULT_MINUTES = 30.0
"""A run of hours that was asked for no checkpoint loses no more than this if it is killed."""


class CheckpointSection(Section):
    """When the run's state is saved, what is kept, and what a run resumes from.

    A run that is asked to stop (Ctrl-C, SIGTERM, `time_limit_minutes`) saves its state in any case.
    """

    every_steps: PositiveInt | None = Field(
        None, description="Save a checkpoint every N optimizer steps; null: by time alone."
    )
    every_minutes: PositiveFloat | Literal["never"] | None = Field(
        None,
        description="Save a checkpoint when N minutes have passed since the last one. null with "
        "checkpoint.every_steps: never. null without it: every 30 minutes, and only the last is kept.",
    )
    keep_last: PositiveInt | None = Field(2, description="Keep the last N checkpoints; null: all.")
    keep_best: bool = Field(
        False,
        description="Also keep the checkpoint with the lowest held-out loss, or as training.best_by says, and export "
        "it if it is better than the last one.",
    )
    asynchronous: bool | None = Field(
        None,
        description="Copy the state to the host and continue training while it is written; null: on GPUs, while CPU "
        "ranks, whose memory the copy would double, wait until it is written.",
    )
    resume: str = Field(
        "auto",
        description="Choose where to start. auto: the last complete checkpoint of training.output_dir, if any. "
        "never: the beginning. Otherwise: the folder of a checkpoint or a run, also in a store (s3://...); started "
        "again, the run goes on from its own.",
    )
    to: str | None = Field(
        None,
        description="Also copy the checkpoints of training.output_dir to this folder of a store, of this run alone, "
        "while training continues, and resume from there on another machine: s3://bucket/runs/first, gs:// or file://.",
    )
    time_limit_minutes: PositiveFloat | None = Field(
        None, description="Save a checkpoint and exit with code 3 after this many minutes."
    )

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointSection:
        for key in ("to", "resume"):
            value = getattr(self, key)
            if value is not None and (key == "to" or is_store(value)):
                _require_store(f"checkpoint.{key}", value)
        return self

    @property
    def minutes(self) -> float | None:
        """Minutes between two saves by time, or None if there are no such saves."""
        if self.every_minutes is None:
            return DEFAULT_MINUTES if self.every_steps is None else None
        return None if self.every_minutes == "never" else self.every_minutes

    def copies_from(self, device_type: str) -> bool:
        """Returns whether a save copies the state, so that training continues, on one of torch's types of devices."""
        return device_type != "cpu" if self.asynchronous is None else self.asynchronous

    @property
    def num_kept(self) -> int | None:
        """Number of the last checkpoints that are kept, or None for all."""
        asked = {"every_steps", "every_minutes", "keep_last"} & self.model_fields_set
        return self.keep_last if asked else 1


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""Those that Accelerate knows; a test compares them."""


def _refuse_credentials(field: str, url: str) -> None:
    place = url.partition("://")[2]
    # After the name of a file; in a store names may have `?` and `#`.
    names = [name for part in re.split("[?#]", place)[1:] for name, _ in parse_qsl(part, keep_blank_values=True)]
    if signed := next((name for name in names if SIGNATURE.search(name)), None):
        raise contradiction(
            f"{field}: the URL of a file is signed ({signed}): its signature would stand in the recipe of every run "
            "and checkpoint, and a resumed run needs it after it has expired; download the file, or name it in its "
            "store (s3://bucket/rows.jsonl), whose driver has credentials of its own"
        )
    if "@" in place.partition("/")[0]:
        # What was found is not repeated: recipes and errors are shown to others.
        raise contradiction(
            f"{field}: holds credentials; remove them, and give them to the store's driver, for example by "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def _require_store(field: str, url: str) -> None:
    """Raises `contradiction` if a URL names no folder in a store, or holds credentials."""
    protocol, _, place = url.partition("://")
    _refuse_credentials(field, url)
    if protocol not in STORES or not place.strip("/") or url.endswith("/") or (protocol == "file" and place[0] != "/"):
        raise contradiction(
            f"{field}: found {url!r}; needs a folder in a store, without a slash at the end, for example "
            f"s3://bucket/runs/first; allowed: {', '.join(f'{name}://' for name in STORES)}"
        )


class LoggingSection(Section):
    """What is shown and where it goes."""

    every_steps: PositiveInt = Field(10, description="Print a line every N steps if the output is not a terminal.")
    trackers: list[Tracker] = Field(
        default_factory=list, description="Send every metric to these Accelerate trackers, which must be installed."
    )
    project_name: str = Field("finetune", description="Name the project in the trackers.")
    tracker_settings: dict[Tracker, dict[str, Any]] = Field(
        default_factory=dict,
        description="Start each tracker with these settings, as its own start takes them: `{wandb: {entity: me, name: "
        "first, tags: [sft]}}`.",
    )
    held_out_samples: int = Field(
        0,
        ge=0,
        description="Show in the report what the model writes after N held-out prompts, up to 40 tokens each, before "
        "training, at evaluations and after it. Each evaluation costs up to 40 forwards more.",
    )


LARGEST_SHARD_GIB = 1e6
"""Of an exported file of weights: no file system holds a larger file."""


class ExportSection(Section):
    """The folder that `from_pretrained` loads."""

    enabled: bool = Field(True, description="Write OUTPUT_DIR/export at the end.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Store the exported weights in this type; null: the base's, and float32 for an adapter."
    )
    max_shard_gib: float = Field(
        4.0,
        gt=0.0,
        le=LARGEST_SHARD_GIB,
        description="Split the weights into safetensors files of at most this size (GiB).",
    )
    merge: bool = Field(False, description="Merge the adapters into the weights and export a whole model.")
    verify: bool = Field(True, description="Reload the exported folder and compare its logits on one batch.")
    push_to_hub: str | None = Field(
        None,
        description="Push the export and its model card to this model repository of the hub, NAMESPACE/NAME, at the "
        "end; null: do not.",
    )
    hub_private: bool = Field(
        True, description="Make that repository private. false: make it public, or push to one that is public."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ExportSection:
        if self.push_to_hub is not None and not ("/" in self.push_to_hub and is_repository(self.push_to_hub)):
            raise contradiction(
                f"export.push_to_hub: found {self.push_to_hub!r}; needs NAMESPACE/NAME of letters, digits, '-', '_' "
                "and '.', for example my-team/my-model"
            )
        return self


class Sections(Section):
    """The sections of a recipe."""

    description: str = Field("", description="One line that `toolkit recipes` shows.")
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    adapter: AdapterSection = AdapterSection()
    sharding: ShardingSection = ShardingSection()
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    answers: AnswersSection = AnswersSection()
    kept: KeptSection = KeptSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    export: ExportSection = ExportSection()


def steps_of_run(training: TrainingSection, num_samples: int, samples_per_step: int) -> int:
    """Returns the optimizer steps of a run: `max_steps`, or enough for `num_epochs` passes over `num_samples`."""
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_epochs is not None
    return max(1, math.ceil(round(training.num_epochs * num_samples) / samples_per_step))
