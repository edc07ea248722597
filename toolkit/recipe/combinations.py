"""The one table of settings that cannot go together: which they are, why, and what to do.

Recipes, the backend (for loops of a user's own, too), plans and `toolkit init` ask this table and nothing else, so that
a plan never offers what a run refuses. docs/combinations.md is written from it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial

from toolkit.errors import BadInputError
from toolkit.recipe.features import KEYS as R
from toolkit.recipe.features import NOWHERE, Feature, Key, Surroundings, equal, objective, on, other, rest, without
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import RIVALS, Sections


class Reason(Enum):
    """Why two settings exclude each other."""

    DEFINITION = "one leaves nothing for the other to do, or contradicts it"
    LIBRARY = "a library that does the work cannot do both"
    NOT_BUILT = "possible, but not built yet"


@dataclass(frozen=True)
class Combination:
    """Two features that cannot go together.

    Attributes:
        is_idle: whether the first feature would only have no effect, rather than fail.
        why: a clause about the last feature, or about the first.
        mend: how to fix it.
    """

    reason: Reason
    is_idle: bool
    first: Feature
    last: Feature
    why: str = ""
    mend: str = "remove it"


_idle = partial(Combination, Reason.DEFINITION, True)
_never = partial(Combination, Reason.DEFINITION, False)
_library = partial(Combination, Reason.LIBRARY, False)
_unbuilt = partial(Combination, Reason.NOT_BUILT, False)

_DDP = equal(R.sharding.strategy, "ddp")
_STAGES = equal(R.sharding.strategy, "zero1", "zero2")
_GATHERING_ONCE = equal(R.sharding.strategy, "ddp", "zero1", "zero2")
_BY_BLOCK = equal(R.sharding.accumulate, "by_block")
_OFFLOAD = equal(R.sharding.offload, "optimizer")
_CHECKPOINTS = Feature(
    "sharding.activation_checkpointing", lambda r, _: r.sharding.activation_checkpointing not in (None, "auto")
)
_EXPERTS, _SEQUENCE, _TENSOR = on(R.sharding.experts), on(R.sharding.sequence), on(R.sharding.tensor)
_RESHARD = on(R.sharding.reshard_after_forward)
_COMPILE, _FP16 = on(R.training.compile), equal(R.training.mixed_precision, "fp16")
_OTHER_OPTIMIZERS = other(R.optimizer.kind, "adamw")
_QUANTISED = Feature(
    "a quantised base (adapter.quantize)", lambda r, around: around.is_quantised or r.adapter.quantize != "none"
)
_UNMERGED = Feature("adapters without export.merge", lambda r, _: r.adapter.kind != "none" and not r.export.merge)
_ISLANDS = Feature(
    "parameters in float32",
    lambda _, around: around.keeps_float32 is not None,
    lambda _, around: f"{around.keeps_float32}, which the model keeps in float32",
)
_OWN_LOOP = Feature("a loop of your own", lambda _, around: around.own_loop)
_IMAGES = Feature("rows with images", lambda _, around: around.has_images)
_SEQ2SEQ = objective("seq2seq", lambda spec: spec.encoder_decoder)
_PADDED = objective("objectives on padded rows", lambda spec: spec.padded)
_COMPARED = objective("objectives that compare completions", lambda spec: spec.compares_completions)
_OWN_SAMPLES = objective("grpo", lambda spec: spec.samples_itself)
_NO_TEXT = objective("objectives that write no text", lambda spec: not spec.writes_text)
_OTHER_MODEL = objective("distillation", lambda spec: spec.has_teacher)
_REFERENCE = Feature(
    "objective.beta of grpo without adapters",
    lambda r, _: r.objective.spec.samples_itself and r.adapter.kind == "none" and r.objective.beta is not None,
)
_OWN_LOSS = Feature("objective.loss of your own", lambda r, _: r.objective.own_loss is not None)
_NAMED = Feature("data.train: name", lambda r, _: bool(r.data.source_names))
_WEIGHTED = Feature("data.train: weight", lambda r, _: any(source.weight is not None for source in r.data.train))
_STREAMING = on(R.data.streaming)
_CUT = equal(R.data.long_rows, "truncate", "split")
_TARGETS = on(R.data.targets)
_ANSWERS, _NO_ANSWERS = on(R.answers.file), without(R.answers.file)
_HELD_OUT_SAMPLES = on(R.logging.held_out_samples)
_NO_ROWS = without(R.data.validation, R.data.validation_fraction)
_NOTHING_HELD_OUT = Feature(
    _NO_ROWS.name,
    lambda r, around: _NO_ROWS.is_asked(r, around) and not (r.objective.spec.samples_itself and r.answers.file),
)
_EVALUATIONS, _NO_EVALUATIONS = on(R.training.eval_every_steps), without(R.training.eval_every_steps)
_BEST = on(R.checkpoint.keep_best)
_KEPT = on(R.kept.file)
_BEST_BY_ANSWERS = equal(R.training.best_by, "answers")

_REMOVE_ONE = "remove one of them"
_ZERO3_OR_HYBRID = "remove it, or choose zero3 or hybrid"
_UNCUT = "set sharding.tensor=1"
_GATHERS_NOTHING, _OR_ZERO3 = "whose backward gathers nothing again", "remove it, or choose zero3"
_NO_MODEL = "where the backend does not touch the model"
_EACH_EVALUATED = "as each checkpoint is judged by an evaluation"
_EVALUATE_EACH = "set training.eval_every_steps to checkpoint.every_steps or a divisor of it"


def _idle_trackers(r: Sections) -> list[str]:
    return sorted(r.logging.tracker_settings.keys() - set(r.logging.trackers))


def _strange(r: Sections) -> list[str]:
    """Returns the fields of the objective section that its kind has not."""
    fields = {key for spec in SPECS.values() for key in spec.settings}.difference(r.objective.spec.settings)
    return sorted(key for key in fields if getattr(r.objective, key) is not None)


def _of_others(r: Sections) -> list[str]:
    """Returns the fields that have an effect on other losses of the objective alone."""
    losses = r.objective.spec.losses
    others = {key for keys in losses.values() for key in keys}
    others = others.difference(losses.get(r.objective.chosen_loss, others))
    return sorted(key for key in others if getattr(r.objective, key) is not None)


def _taken_losses(r: Sections, _: Surroundings) -> str:
    taken = ", ".join(r.objective.spec.losses) or "a function of your own, as in mine.py:loss"
    return f"objective.kind {r.objective.kind}, which takes {taken}"


def _takes_no_such_loss(r: Sections, _: Surroundings) -> bool:
    section = r.objective
    is_taken = section.loss in section.spec.losses if section.spec.losses else section.own_loss is not None
    return section.loss is not None and not is_taken


COMBINATIONS = (
    *(
        _never(on(Key(*one[0].split("."))), on(Key(*two[0].split("."))), "", "remove one of them, or set it to null")
        for one, two in RIVALS
    ),
    # Model
    _idle(on(R.model.revision), on(R.model.config), "", _REMOVE_ONE),
    _idle(on(R.model.add_tokens), on(R.model.train_tokenizer_vocab_size)),
    _never(
        on(R.model.config),
        without(R.model.tokenizer, R.model.train_tokenizer_vocab_size),
        "as a configuration brings no tokenizer",
        "set one of these",
    ),
    # Data
    _idle(on(R.data.max_validation_samples), _NO_ROWS),
    _never(
        on(R.data.min_pixels),
        Feature("a smaller data.max_pixels", lambda r, _: (r.data.min_pixels or 0) > (r.data.max_pixels or math.inf)),
        "",
        "exchange them",
    ),
    _never(
        _WEIGHTED,
        Feature("sources without a weight", lambda r, _: any(source.weight is None for source in r.data.train)),
        "",
        "give every source a weight, or none",
    ),
    _idle(_WEIGHTED, Feature("a single source", lambda r, _: len(r.data.train) == 1)),
    _idle(
        Feature("a weight in data.validation", lambda r, _: any(s.weight is not None for s in r.data.validation or [])),
        on(R.data.validation),
        "whose rows are each evaluated once",
    ),
    _never(
        on(R.data.validation_fraction),
        _STREAMING,
        "whose rows are not known in advance",
        "name held-out rows in data.validation",
    ),
    _idle(other(R.data.num_proc, "auto", 1), _STREAMING, "", _REMOVE_ONE),
    # Other settings of one section
    _idle(rest(R.adapter, "kind"), equal(R.adapter.kind, "none"), "", "set adapter.kind=lora"),
    _idle(
        on(R.adapter.double_quantization),
        other(R.adapter.quantize, "nf4"),
        "",
        "set adapter.quantize=nf4, or remove it",
    ),
    _idle(on(R.optimizer.momentum), other(R.optimizer.kind, "muon")),
    _idle(on(R.schedule.decay_fraction), other(R.schedule.kind, "warmup_stable_decay")),
    _idle(on(R.schedule.min_factor), equal(R.schedule.kind, "constant")),
    _never(
        on(R.schedule.warmup_fraction),
        Feature(
            "a schedule.decay_fraction that makes more than 1 with it",
            lambda r, _: (r.schedule.warmup_fraction or 0.0) + (r.schedule.decay_fraction or 0.0) > 1.0,
        ),
        "",
        "lower one",
    ),
    _never(
        on(R.training.profile_steps),
        Feature(
            "a smaller training.max_steps",
            lambda r, _: (r.training.profile_steps or [0])[-1] > (r.training.max_steps or math.inf),
        ),
        "",
        "lower the last step",
    ),
    _idle(rest(R.answers, "file"), _NO_ANSWERS, "", "set that, or remove it"),
    _idle(on(R.kept.max_kl), without(R.kept.file), "", "set that, or remove it"),
    _idle(on(R.answers.system), on(R.answers.raw), "as it needs the chat template", _REMOVE_ONE),
    _idle(_BEST, equal(R.checkpoint.keep_last, None), "which keeps all"),
    _idle(_BEST, without(R.checkpoint.every_steps), "", "set that, too"),
    _idle(
        Feature(
            "logging.tracker_settings",
            lambda r, _: bool(_idle_trackers(r)),
            lambda r, _: f"logging.tracker_settings.{_idle_trackers(r)[0]}",
        ),
        Feature(
            "without the tracker in logging.trackers",
            lambda r, _: True,
            lambda r, _: f"without {_idle_trackers(r)[0]} in logging.trackers",
        ),
        "",
        "add it there, or remove the settings",
    ),
    _idle(rest(R.export, "enabled"), equal(R.export.enabled, False)),
    _idle(equal(R.export.hub_private, False), without(R.export.push_to_hub)),
    # By block
    _idle(_BY_BLOCK, _GATHERING_ONCE, "which gathers parameters once a step at most", _ZERO3_OR_HYBRID),
    _idle(
        _BY_BLOCK,
        equal(R.training.gradient_accumulation_steps, 1),
        "which already gathers each block once",
        "set training.gradient_accumulation_steps above 1, or remove it",
    ),
    _never(
        _BY_BLOCK,
        other(R.sharding.activation_checkpointing, 1),
        "as it keeps nothing of a block but its inputs",
        "remove sharding.activation_checkpointing, or set it to 1",
    ),
    _unbuilt(_FP16, _BY_BLOCK, "whose backward passes would each need a scale", "set mixed_precision bf16"),
    _library(
        _RESHARD,
        _BY_BLOCK,
        "which keeps units gathered from one micro-batch to the next: FSDP2's switch for it forgets the groups",
        _REMOVE_ONE,
    ),
    _unbuilt(_BY_BLOCK, _SEQ2SEQ),
    _unbuilt(_BY_BLOCK, _OTHER_MODEL, "whose teacher runs by micro-batch", "remove sharding.accumulate"),
    _unbuilt(_BY_BLOCK, _REFERENCE, "whose reference runs by micro-batch", "remove sharding.accumulate"),
    # Gathers inside nodes
    _idle(_RESHARD, _GATHERING_ONCE, _GATHERS_NOTHING, _OR_ZERO3),
    _idle(
        _RESHARD,
        equal(R.sharding.strategy, "hybrid"),
        "whose backward gathers inside its groups as it is",
        _OR_ZERO3,
    ),
    _unbuilt(_RESHARD, _EXPERTS, "whose units have ranks of their own", _REMOVE_ONE),
    # Experts
    _never(_EXPERTS, _DDP, "which holds every expert on every rank", _OR_ZERO3),
    _unbuilt(_EXPERTS, _OWN_SAMPLES, "", "set sharding.experts=1"),
    # Tensor groups
    _never(_TENSOR, _DDP, "which holds the whole model on every rank", _ZERO3_OR_HYBRID),
    _unbuilt(_TENSOR, _STAGES, "which keep parts of matrices for a whole step", _ZERO3_OR_HYBRID),
    _unbuilt(_TENSOR, _EXPERTS, "whose ranks have other rows", _REMOVE_ONE),
    _unbuilt(_TENSOR, _SEQUENCE, "whose ranks share other groups", _REMOVE_ONE),
    _unbuilt(_TENSOR, _RESHARD, "whose groups of a node are other ranks", _REMOVE_ONE),
    _unbuilt(_TENSOR, _FP16, "", "set mixed_precision bf16"),
    _unbuilt(_TENSOR, _COMPILE, "", "remove training.compile"),
    _unbuilt(_TENSOR, _OTHER_OPTIMIZERS, "which look at whole rows of matrices", "set optimizer.kind=adamw"),
    _unbuilt(_TENSOR, _QUANTISED, "whose blocks of scales are not cut", "set adapter.quantize=none"),
    _unbuilt(_TENSOR, _IMAGES, "", _UNCUT),
    _unbuilt(_TENSOR, _SEQ2SEQ, "", _UNCUT),
    _unbuilt(_TENSOR, _KEPT, "whose logits are whole", _UNCUT),
    # Offload
    _library(
        _OFFLOAD,
        _DDP,
        "which leaves the model to torch's DistributedDataParallel",
        "choose zero3+offload, which on one rank shards nothing either",
    ),
    _unbuilt(
        _OFFLOAD,
        _FP16,
        "whose scaler looks for infinities in gradients that offload has taken away",
        "set mixed_precision bf16 or no",
    ),
    _unbuilt(_OFFLOAD, _OTHER_OPTIMIZERS, "", "set optimizer.kind=adamw or sharding.offload=none"),
    _unbuilt(
        _OFFLOAD,
        Feature("torch 2.15", lambda _, around: around.sums_in_autograd) & _ISLANDS,
        "and torch 2.15 adds up in another way",
        "choose a strategy without offload, or mixed_precision no",
    ),
    _unbuilt(
        _OFFLOAD,
        _EXPERTS & _ISLANDS,
        "in units that only some ranks share",
        "choose a strategy without offload, or mixed_precision no",
    ),
    _idle(
        on(R.sharding.offload_executor, R.sharding.device_state_gib),
        Feature("without offload", lambda r, _: r.sharding.offload == "none"),
        "",
        "set sharding.offload=optimizer, or the strategy zero3+offload in the Accelerate config",
    ),
    # Activations
    _idle(
        on(R.sharding.offload_checkpoints),
        without(R.sharding.activation_checkpointing),
        "",
        "remove it, or set sharding.activation_checkpointing=1",
    ),
    # Compiled blocks, precision
    _library(_COMPILE, _QUANTISED, "whose products torch cannot compile into one graph", "remove training.compile"),
    _unbuilt(_COMPILE, _OWN_SAMPLES, "whose rows have another length in each step", "remove training.compile"),
    _unbuilt(_COMPILE, _IMAGES, "whose sizes differ from one micro-batch to the next"),
    _library(
        _FP16,
        Feature("ranks on the CPU", lambda _, around: around.device == "cpu"),
        "where torch trains in float32 or bfloat16",
        "use bf16 or no",
    ),
    # Loops of a user's own
    _library(
        _CHECKPOINTS,
        _OWN_LOOP & _DDP,
        _NO_MODEL,
        "call toolkit.sharding.checkpoint_blocks(model, plan_units(model), Checkpointing(every=1)) before prepare, or "
        "choose zero3",
    ),
    _library(
        _COMPILE,
        _OWN_LOOP & _DDP,
        _NO_MODEL,
        "call toolkit.sharding.compile_blocks(model, plan_units(model), Compilation()) before prepare, or choose zero3",
    ),
    # Settings of the objective
    _idle(
        Feature(
            "fields of another objective", lambda r, _: bool(_strange(r)), lambda r, _: f"objective.{_strange(r)[0]}"
        ),
        objective("objectives without them", lambda spec: True),
    ),
    _never(
        Feature("another objective.loss", _takes_no_such_loss, lambda r, _: f"objective.loss {r.objective.loss}"),
        Feature("objectives without it", lambda r, _: "loss" in r.objective.spec.settings, _taken_losses),
        "",
        "remove it, or choose another",
    ),
    _idle(
        Feature(
            "fields of another loss", lambda r, _: bool(_of_others(r)), lambda r, _: f"objective.{_of_others(r)[0]}"
        ),
        Feature("a loss without them", lambda r, _: True, lambda r, _: f"objective.loss {r.objective.chosen_loss}"),
    ),
    _idle(
        on(R.objective.beta),
        Feature(
            "objective.divergence but jsd",
            lambda r, _: r.objective.spec.has_teacher and r.objective.divergence != "jsd",
        ),
        "",
        "remove it, or set objective.divergence=jsd",
    ),
    _never(
        on(R.objective.beta),
        Feature(
            "a value of 1 or above with objective.divergence jsd",
            lambda r, _: r.objective.divergence == "jsd" and (r.objective.beta or 0.0) >= 1,
        ),
        "",
        "lower it; for 1 set objective.divergence=reverse_kl",
    ),
    # Objectives and their rows
    _unbuilt(_SEQUENCE, _SEQ2SEQ),
    _unbuilt(_SEQUENCE, _OWN_SAMPLES, "", "set sharding.sequence=1"),
    _unbuilt(_SEQUENCE, _IMAGES, "which stand in one part of a row", "set sharding.sequence=1"),
    _unbuilt(_SEQUENCE, _OWN_LOSS, "whose rows must lie on one rank"),
    _library(_QUANTISED, _SEQ2SEQ, "as T5's layers look at the type of their weights", "set adapter.quantize=none"),
    _never(equal(R.data.packing, True), _PADDED),
    _unbuilt(_STREAMING, _PADDED),
    _unbuilt(_STREAMING, _COMPARED),
    _unbuilt(_STREAMING, _OWN_SAMPLES),
    _never(equal(R.data.long_rows, "split"), _PADDED, "", "allowed: error, drop, truncate"),
    _never(_CUT, _COMPARED, "", "allowed: error, drop"),
    _idle(_TARGETS, _PADDED),
    _idle(_TARGETS, _COMPARED, "which compares completions"),
    _idle(_TARGETS, _OWN_SAMPLES, "whose completions are learned"),
    _idle(on(R.data.chat_template, R.data.template_arguments), _PADDED),
    _idle(on(R.data.add_bos), _PADDED, "whose texts get the model's own special tokens"),
    _unbuilt(
        _NAMED,
        objective("objectives without losses by source", lambda spec: not spec.tells_sources),
        "whose losses are not reported by source",
        "remove the names; the rows of all sources are then evaluated together",
    ),
    _unbuilt(_NAMED, _OWN_LOSS, "which returns one sum for all rows", "remove the names"),
    _unbuilt(_NAMED, _STREAMING, "", "remove the names, or data.streaming"),
    _idle(
        on(R.data.max_target_length, R.data.source_prefix, R.data.columns.source, R.data.columns.target),
        objective("objectives but seq2seq", lambda spec: not spec.encoder_decoder),
        "",
        "remove it, or set objective.kind=seq2seq",
    ),
    _idle(on(R.data.columns.margin), objective("objectives but reward", lambda spec: not spec.has_margins)),
    _idle(_HELD_OUT_SAMPLES, _NO_TEXT, "whose model writes no text"),
    _idle(_ANSWERS, _NO_TEXT, "whose model writes no text"),
    _never(_KEPT, _NO_TEXT, "whose model predicts no next tokens"),
    _unbuilt(_KEPT, _SEQ2SEQ),
    _never(on(R.training.num_epochs), _STREAMING, "whose length is not known", "set training.max_steps"),
    # Evaluations
    _idle(_EVALUATIONS, _NOTHING_HELD_OUT, "", "remove it, or set one of these"),
    _idle(_HELD_OUT_SAMPLES, _NOTHING_HELD_OUT, "", "remove it, or set one of these"),
    _idle(_ANSWERS, _NOTHING_HELD_OUT, "as answers are written at evaluations", "set one of these"),
    _idle(_KEPT, _NOTHING_HELD_OUT, "as kept rows are measured at evaluations", "set one of these"),
    _idle(
        on(R.training.patience, R.kept.max_kl),
        _NO_EVALUATIONS,
        "as the run is evaluated at its start and its end alone",
        "set that, for example training.eval_every_steps=100",
    ),
    _never(_BEST, _NO_EVALUATIONS, _EACH_EVALUATED, _EVALUATE_EACH),
    _never(
        _BEST,
        Feature(
            "a training.eval_every_steps that does not divide checkpoint.every_steps",
            lambda r, _: (r.checkpoint.every_steps or 0) % (r.training.eval_every_steps or 1) != 0,
        ),
        _EACH_EVALUATED,
        _EVALUATE_EACH,
    ),
    _idle(_BEST_BY_ANSWERS, without(R.training.patience, R.checkpoint.keep_best), "", "set one of these"),
    _never(
        _BEST_BY_ANSWERS,
        _NO_ANSWERS,
        "which names the prompts and says which answers are right",
        "set that",
    ),
    # Adapters and the export
    _idle(on(R.export.merge), equal(R.adapter.kind, "none"), "", "remove it, or set adapter.kind=lora"),
    _never(
        on(R.model.add_tokens),
        _UNMERGED,
        "as an adapter fits the embeddings of its base, which have no tokens there",
        "set export.merge=true, and adapter.modules_to_save to the embeddings and the head, such as [embed_tokens, "
        "lm_head]",
    ),
    _never(
        on(R.adapter.start_from),
        on(R.model.config),
        "as it needs the base that the adapter was trained on",
        "set model.name_or_path instead of model.config",
    ),
    _never(
        on(R.model.config),
        equal(R.export.enabled, True) & _UNMERGED,
        "as an adapter of random weights fits no model that could be loaded later",
        "set export.merge=true, or model.name_or_path",
    ),
    # A model that samples what it learns from
    _never(
        on(R.data.validation, R.data.validation_fraction),
        _OWN_SAMPLES,
        "which has no loss on given rows",
        "set answers.file to held-out prompts with answers instead",
    ),
    _never(
        on(R.training.patience, R.checkpoint.keep_best),
        equal(R.training.best_by, "loss") & _OWN_SAMPLES,
        "which has no held-out loss",
        "set training.best_by=answers",
    ),
    _idle(_HELD_OUT_SAMPLES, _OWN_SAMPLES, "whose held-out prompts are answered by answers.file"),
    _never(
        on(R.adapter.dropout),
        _OWN_SAMPLES,
        "which would learn from samples of another model than the one that drew them",
        "set adapter.dropout=0",
    ),
)


@dataclass(frozen=True)
class Refusal:
    """The message about a combination: `problem` alone is for readers who cannot change the settings."""

    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.mend}"


def refusals(settings: Sections, around: Surroundings = NOWHERE) -> list[Refusal]:
    """Returns a refusal for each forbidden combination in the settings; empty if there is none.

    A combination is left out if a section that it looks at is missing.
    """
    return [_refusal(found, settings, around) for found in COMBINATIONS if _is_asked(found, settings, around)]


def refuse(settings: Sections, around: Surroundings = NOWHERE) -> None:
    """Checks that the settings can go together.

    Raises:
        BadInputError: if they cannot; it names every forbidden combination.
    """
    if found := refusals(settings, around):
        raise BadInputError(" ".join(f"{refusal}." for refusal in found).removesuffix("."))


def _is_asked(found: Combination, settings: Sections, around: Surroundings) -> bool:
    with suppress(AttributeError):
        return found.first.is_asked(settings, around) and found.last.is_asked(settings, around)
    return False


def _refusal(combination: Combination, settings: Sections, around: Surroundings) -> Refusal:
    first, last = combination.first.named(settings, around), combination.last.named(settings, around)
    verb = "has no effect" if combination.is_idle else "is not possible"
    why = f", {combination.why}" if combination.why else ""
    joint = "" if last.startswith("without ") else "with "
    return Refusal(f"{first} {verb} {joint}{last}{why}", combination.mend)
