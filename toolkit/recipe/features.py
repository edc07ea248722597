"""The features that settings ask for; the table of combinations is written in their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.recipe.objectives.causal_lm import CAUSAL_LM
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.schema import OFFLOAD_DETAILS

OFFLOAD_SETTINGS = tuple(f"sharding.{key}" for key in OFFLOAD_DETAILS)
"""Settings that say how optimizer state is offloaded, if it is."""


@dataclass(frozen=True)
class Settings:
    """The settings that the table looks at. A default stands for a value that is not set, or not known yet.

    Attributes:
        objective: the description of the objective.
        strategy: a word of `STRATEGIES` (sharding/plan/strategy.py), or None if the Accelerate config may say it later.
        accumulate: `by_micro_batch`, `by_block` or `auto`.
        checkpointing: N to checkpoint every N-th block, `auto`, or None for no checkpoints.
        reshard_after_forward: number of ranks that share a unit between forward and backward, or None for all ranks.
        offload: whether optimizer state is kept in host memory, or None if the Accelerate config may say it later.
        is_quantised: whether frozen layers are held in few bits.
        keeps_float32: the first trained parameter that stays in float32 beside 16-bit compute, or None.
        sums_in_autograd: whether FSDP2 sums gradients of several types itself, as from torch 2.15 on.
        own_loop: whether the backend runs in the user's own loop, without a recipe.
        moves_biases: whether biases of routers are moved to balance experts.
        has_images: whether rows have images, and the model sees them.
        eval_steps: training steps between two evaluations, or None.
        save_steps: training steps between two checkpoints, or None.
        given: names of the other fields that are set; only those that the table of combinations mentions.
    """

    objective: ObjectiveSpec = CAUSAL_LM
    strategy: str | None = None
    offload: bool | None = None
    accumulate: str = "by_micro_batch"
    micro_batches: int = 2
    checkpointing: int | str | None = None
    offload_checkpoints: bool = False
    chunk_tokens: bool = False
    precision: str | None = None
    device: str | None = None
    optimizer: str = "adamw"
    adapter: bool = False
    is_quantised: bool = False
    compiled: bool = False
    experts: bool = False
    sequence: bool = False
    tensor: bool = False
    reshard_after_forward: int | None = None
    prefetch: bool = False
    keeps_float32: str | None = None
    sums_in_autograd: bool = False
    own_loop: bool = False
    moves_biases: bool = False
    has_images: bool = False
    eval_steps: int | None = None
    save_steps: int | None = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Feature:
    """A feature that settings can ask for.

    Attributes:
        setting: the name in errors; `{...}` are fields of `Settings`.
        is_asked: tells whether settings ask for it.
        fields: fields of a recipe, any of which asks for it; the error names the first that is set.
    """

    setting: str
    is_asked: Callable[[Settings], bool]
    fields: tuple[str, ...] = ()

    def named(self, settings: Settings) -> str:
        """Returns the name of this feature in errors."""
        first = next((field for field in self.fields if field in settings.given), None)
        return first or self.setting.format_map({**vars(settings), "checkpointing": settings.checkpointing or "null"})


def _feature_of_fields(*fields: str) -> Feature:
    return Feature(fields[0], lambda settings: not settings.given.isdisjoint(fields), fields)


def _feature_without(*fields: str) -> Feature:
    return Feature(f"without {' or '.join(fields)}", lambda settings: settings.given.isdisjoint(fields))


def _feature_of_objective(is_so: Callable[[ObjectiveSpec], bool]) -> Feature:
    return Feature("objective.kind {objective.kind}", lambda settings: is_so(settings.objective))


def _feature_of_strategies(*names: str) -> Feature:
    return Feature("strategy {strategy}", lambda settings: settings.strategy in names)


def _lacks_held_out_rows(settings: Settings) -> bool:
    """Tells whether nothing is evaluated. A run that samples itself has held-out prompts instead of rows."""
    held_out = {"data.validation", "data.validation_fraction"}
    return settings.given.isdisjoint(held_out | ({"answers.file"} if settings.objective.samples_itself else set()))


FEATURES = {
    "ddp": _feature_of_strategies("ddp"),
    "zero1, zero2": _feature_of_strategies("zero1", "zero2"),
    "hybrid": _feature_of_strategies("hybrid"),
    "offload": Feature("offload", lambda settings: settings.offload is True),
    "offload's details": _feature_of_fields(*OFFLOAD_SETTINGS),
    "no offload": Feature("without offload", lambda settings: settings.offload is False),
    "by block": Feature("sharding.accumulate=by_block", lambda settings: settings.accumulate == "by_block"),
    "by block, if faster": Feature("sharding.accumulate=auto", lambda settings: settings.accumulate == "auto"),
    "one micro-batch": Feature("training.gradient_accumulation_steps 1", lambda settings: settings.micro_batches == 1),
    "checkpoints": Feature(
        "sharding.activation_checkpointing", lambda settings: settings.checkpointing not in (None, "auto")
    ),
    "no checkpoints": Feature(
        "without sharding.activation_checkpointing", lambda settings: settings.checkpointing is None
    ),
    "fewer than all checkpoints": Feature(
        "sharding.activation_checkpointing {checkpointing}", lambda settings: settings.checkpointing != 1
    ),
    "no checkpoints of all": Feature(
        "sharding.activation_checkpointing {checkpointing}", lambda settings: settings.checkpointing not in (1, "auto")
    ),
    "checkpoints on the host": Feature("sharding.offload_checkpoints", lambda settings: settings.offload_checkpoints),
    "chunks": Feature("sharding.chunk_tokens", lambda settings: settings.chunk_tokens),
    "fp16": Feature("mixed_precision fp16", lambda settings: settings.precision == "fp16"),
    "the CPU": Feature("ranks on the CPU", lambda settings: settings.device == "cpu"),
    "other optimizers": Feature("optimizer.kind {optimizer}", lambda settings: settings.optimizer != "adamw"),
    "adapters": Feature("adapters", lambda settings: settings.adapter),
    "no adapters": Feature("without adapters", lambda settings: not settings.adapter),
    "adapters unmerged": Feature(
        "adapters without export.merge", lambda settings: settings.adapter and "export.merge" not in settings.given
    ),
    "quantised base": Feature("a quantised base (adapter.quantize)", lambda settings: settings.is_quantised),
    "compile": Feature("training.compile", lambda settings: settings.compiled),
    "experts": Feature("sharding.experts", lambda settings: settings.experts),
    "sequence": Feature("sharding.sequence", lambda settings: settings.sequence),
    "tensor": Feature("sharding.tensor", lambda settings: settings.tensor),
    "reshard_after_forward": Feature(
        "sharding.reshard_after_forward", lambda settings: settings.reshard_after_forward is not None
    ),
    "prefetch": Feature("sharding.prefetch", lambda settings: settings.prefetch),
    "float32 islands": Feature(
        "{keeps_float32}, which the model keeps in float32", lambda settings: settings.keeps_float32 is not None
    ),
    "torch 2.15": Feature("torch 2.15", lambda settings: settings.sums_in_autograd),
    "own loop": Feature("a loop of your own", lambda settings: settings.own_loop),
    "moved biases": Feature("objective.router_bias_rate", lambda settings: settings.moves_biases),
    "images": Feature("rows with images", lambda settings: settings.has_images),
    "seq2seq": _feature_of_objective(lambda spec: spec.encoder_decoder),
    "objectives but seq2seq": _feature_of_objective(lambda spec: not spec.encoder_decoder),
    "distillation": _feature_of_objective(lambda spec: spec.has_teacher),
    "reference": Feature(
        "objective.beta",
        lambda settings: (
            settings.objective.samples_itself and not settings.adapter and "objective.beta" in settings.given
        ),
    ),
    "padded rows": _feature_of_objective(lambda spec: spec.padded),
    "compared completions": _feature_of_objective(lambda spec: spec.compares_completions),
    "no text written": _feature_of_objective(lambda spec: not spec.writes_text),
    "objectives but reward": _feature_of_objective(lambda spec: not spec.has_margins),
    "no losses by source": _feature_of_objective(lambda spec: not spec.tells_sources),
    "named sources": _feature_of_fields("data.train: name", "data.validation: name"),
    "own loss": _feature_of_fields("objective.loss of your own"),
    "packing": _feature_of_fields("data.packing"),
    "streaming": _feature_of_fields("data.streaming"),
    "split rows": _feature_of_fields("data.long_rows split"),
    "truncated rows": _feature_of_fields("data.long_rows truncate"),
    "epochs": _feature_of_fields("training.num_epochs"),
    "targets": _feature_of_fields("data.targets"),
    "chat template": _feature_of_fields("data.chat_template", "data.template_arguments"),
    "BOS": _feature_of_fields("data.add_bos"),
    "margins": _feature_of_fields("data.columns.margin"),
    "sources and targets": _feature_of_fields(
        "data.max_target_length", "data.source_prefix", "data.columns.source", "data.columns.target"
    ),
    "evaluations": _feature_of_fields("training.eval_every_steps"),
    "no evaluations": _feature_without("training.eval_every_steps"),
    "held-out rows": _feature_of_fields("data.validation", "data.validation_fraction"),
    "no held-out rows": Feature("without data.validation or data.validation_fraction", _lacks_held_out_rows),
    "own samples": _feature_of_objective(lambda spec: spec.samples_itself),
    "best by loss": _feature_without("training.best_by answers"),
    "dropout": _feature_of_fields("adapter.dropout"),
    "checkpoints between evaluations": Feature(
        "training.eval_every_steps {eval_steps} and checkpoint.every_steps {save_steps}",
        lambda settings: bool(
            settings.eval_steps and settings.save_steps and settings.save_steps % settings.eval_steps
        ),
    ),
    "early stopping": _feature_of_fields("training.patience"),
    "best checkpoint": _feature_of_fields("checkpoint.keep_best"),
    "best by answers": _feature_of_fields("training.best_by answers"),
    "no use of the best": _feature_without("training.patience", "checkpoint.keep_best"),
    "answers": _feature_of_fields("answers.file"),
    "answers beside rows": Feature(
        "answers.file",
        lambda settings: "answers.file" in settings.given and not settings.objective.samples_itself,
    ),
    "no answers": _feature_without("answers.file"),
    "held-out samples": _feature_of_fields("logging.held_out_samples"),
    "export": Feature("the export", lambda settings: "export.enabled: false" not in settings.given),
    "no export": _feature_of_fields("export.enabled: false"),
    "merged export": _feature_of_fields("export.merge"),
    "added tokens": _feature_of_fields("model.add_tokens"),
    "random weights": _feature_of_fields("model.config"),
    "started adapter": _feature_of_fields("adapter.start_from"),
    "samples": _feature_of_fields("logging.held_out_samples"),
}
"""Name in the docs -> the feature."""
