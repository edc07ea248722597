"""The one table of settings that cannot go together: which they are, why, and what to do.

Settings of one section are checked by the section (`schema.py`, `recipe/objectives`), all others here. Recipes, the
backend (for loops of a user's own, too), plans and `toolkit init` ask this table and nothing else, so that a plan never
offers what a run refuses. docs/combinations.md is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from toolkit.errors import BadInputError
from toolkit.recipe.features import FEATURES, Settings


class Reason(Enum):
    """Why two settings exclude each other."""

    DEFINITION = "one leaves nothing for the other to do, or contradicts it"
    LIBRARY = "a library that does the work cannot do both"
    NOT_BUILT = "possible, but not built yet"


@dataclass(frozen=True)
class Combination:
    """Features that cannot go together.

    Attributes:
        names: two or three names of features; the error says that the first cannot go with the last.
        why: a clause about the last feature, or about the first.
        mend: how to fix it.
        is_idle: whether the first feature would only have no effect, rather than fail.
    """

    names: tuple[str, ...]
    reason: Reason
    why: str = ""
    mend: str = "remove it"
    is_idle: bool = False


DEFINITION, LIBRARY, NOT_BUILT = Reason.DEFINITION, Reason.LIBRARY, Reason.NOT_BUILT


def _idle(first: str, last: str, why: str = "", mend: str = "remove it") -> Combination:
    """Returns the combination of a feature that has no effect with another."""
    return Combination((first, last), DEFINITION, why, mend, is_idle=True)


_GATHERS_ONCE = "which gathers parameters once a step at most"
_REMOVE_ONE = "remove one of them"
_ZERO3_OR_HYBRID = "remove it, or choose zero3 or hybrid"
_UNCUT = "set sharding.tensor=1"
_GATHERS_NOTHING, _OR_ZERO3 = "whose backward gathers nothing again", "remove it, or choose zero3"
_EACH_EVALUATED = "as each checkpoint is judged by an evaluation"
_EVALUATE_EACH = "set training.eval_every_steps to checkpoint.every_steps or a divisor of it"

COMBINATIONS = (
    # By block
    _idle("by block", "ddp", _GATHERS_ONCE, "remove it, or choose zero3 or hybrid"),
    _idle("by block", "zero1, zero2", _GATHERS_ONCE, "remove it, or choose zero3 or hybrid"),
    _idle(
        "by block",
        "one micro-batch",
        "which already gathers each block once",
        "set training.gradient_accumulation_steps above 1, or remove it",
    ),
    Combination(
        ("by block", "fewer than all checkpoints"),
        DEFINITION,
        "as it keeps nothing of a block but its inputs",
        "remove sharding.activation_checkpointing, or set it to 1",
    ),
    Combination(
        ("by block, if faster", "no checkpoints of all"),
        DEFINITION,
        "as it may choose by_block, which keeps nothing of a block but its inputs",
        "set sharding.activation_checkpointing=auto or 1",
    ),
    Combination(
        ("fp16", "by block"), NOT_BUILT, "whose backward passes would each need a scale", "set mixed_precision bf16"
    ),
    Combination(
        ("reshard_after_forward", "by block"),
        LIBRARY,
        "which keeps units gathered from one micro-batch to the next: FSDP2's switch for it forgets the groups",
        _REMOVE_ONE,
    ),
    Combination(
        ("reshard_after_forward", "by block, if faster"),
        LIBRARY,
        "which may keep units gathered from one micro-batch to the next",
        _REMOVE_ONE,
    ),
    # Gathers inside nodes
    _idle("reshard_after_forward", "ddp", _GATHERS_NOTHING, _OR_ZERO3),
    _idle("reshard_after_forward", "zero1, zero2", _GATHERS_NOTHING, _OR_ZERO3),
    _idle("reshard_after_forward", "hybrid", "whose backward gathers inside its groups as it is", _OR_ZERO3),
    Combination(("reshard_after_forward", "experts"), NOT_BUILT, "whose units have ranks of their own", _REMOVE_ONE),
    # Experts
    Combination(("experts", "ddp"), DEFINITION, "which holds every expert on every rank", "remove it, or choose zero3"),
    # Tensor groups
    Combination(("tensor", "ddp"), DEFINITION, "which holds the whole model on every rank", _ZERO3_OR_HYBRID),
    Combination(
        ("tensor", "zero1, zero2"), NOT_BUILT, "which keep parts of matrices for a whole step", _ZERO3_OR_HYBRID
    ),
    Combination(("tensor", "experts"), NOT_BUILT, "whose ranks have other rows", _REMOVE_ONE),
    Combination(("tensor", "sequence"), NOT_BUILT, "whose ranks share other groups", _REMOVE_ONE),
    Combination(("tensor", "reshard_after_forward"), NOT_BUILT, "whose groups of a node are other ranks", _REMOVE_ONE),
    Combination(("tensor", "chunks"), NOT_BUILT, "", "remove sharding.chunk_tokens"),
    Combination(("tensor", "fp16"), NOT_BUILT, "", "set mixed_precision bf16"),
    Combination(("tensor", "compile"), NOT_BUILT, "", "remove training.compile"),
    Combination(
        ("tensor", "other optimizers"), NOT_BUILT, "which look at whole rows of matrices", "set optimizer.kind=adamw"
    ),
    Combination(
        ("tensor", "quantised base"), NOT_BUILT, "whose blocks of scales are not cut", "set adapter.quantize=none"
    ),
    Combination(("tensor", "images"), NOT_BUILT, "", _UNCUT),
    Combination(("tensor", "seq2seq"), NOT_BUILT, "", _UNCUT),
    # Offload
    Combination(
        ("offload", "ddp"),
        LIBRARY,
        "which leaves the model to torch's DistributedDataParallel",
        "choose zero3+offload, which on one rank shards nothing either",
    ),
    Combination(
        ("offload", "fp16"),
        NOT_BUILT,
        "whose scaler looks for infinities in gradients that offload has taken away",
        "set mixed_precision bf16 or no",
    ),
    Combination(("offload", "other optimizers"), NOT_BUILT, "", "set optimizer.kind=adamw or sharding.offload=none"),
    Combination(
        ("offload", "torch 2.15", "float32 islands"),
        NOT_BUILT,
        "and torch 2.15 adds up in another way",
        "choose a strategy without offload, or mixed_precision no",
    ),
    Combination(
        ("offload", "experts", "float32 islands"),
        NOT_BUILT,
        "in units that only some ranks share",
        "choose a strategy without offload, or mixed_precision no",
    ),
    _idle(
        "offload's details",
        "no offload",
        "",
        "set sharding.offload=optimizer, or the strategy zero3+offload in the Accelerate config",
    ),
    # Activations
    _idle("checkpoints on the host", "no checkpoints", "", "remove it, or set sharding.activation_checkpointing=1"),
    _idle("chunks", "no checkpoints", "", "remove it, or set sharding.activation_checkpointing=1"),
    # Gathers ahead, compiled blocks, precision
    _idle("prefetch", "ddp", "which gathers nothing"),
    Combination(
        ("compile", "quantised base"),
        LIBRARY,
        "whose products torch cannot compile into one graph",
        "remove training.compile",
    ),
    Combination(("fp16", "the CPU"), LIBRARY, "where torch trains in float32 or bfloat16", "use bf16 or no"),
    Combination(
        ("moved biases", "adapters"),
        DEFINITION,
        "whose checkpoints and exports do not hold the base's biases",
        "set it to 0, or set adapter.kind=none",
    ),
    # Loops of a user's own
    Combination(
        ("checkpoints", "own loop", "ddp"),
        LIBRARY,
        "where the backend does not touch the model",
        "call toolkit.sharding.checkpoint_blocks(model, plan_units(model), Checkpointing(every=1)) before prepare, or "
        "choose zero3",
    ),
    Combination(
        ("compile", "own loop", "ddp"),
        LIBRARY,
        "where the backend does not touch the model",
        "call toolkit.sharding.compile_blocks(model, plan_units(model), Compilation()) before prepare, or choose zero3",
    ),
    # Objectives
    Combination(("sequence", "seq2seq"), NOT_BUILT),
    Combination(("by block", "seq2seq"), NOT_BUILT),
    Combination(("chunks", "seq2seq"), NOT_BUILT, "whose blocks have no MLP among their children"),
    Combination(
        ("quantised base", "seq2seq"),
        LIBRARY,
        "as T5's layers look at the type of their weights",
        "set adapter.quantize=none",
    ),
    Combination(
        ("by block", "distillation"), NOT_BUILT, "whose teacher runs by micro-batch", "remove sharding.accumulate"
    ),
    Combination(
        ("by block, if faster", "distillation"),
        NOT_BUILT,
        "whose teacher runs by micro-batch",
        "remove sharding.accumulate",
    ),
    Combination(
        ("by block", "reference"), NOT_BUILT, "whose reference runs by micro-batch", "remove sharding.accumulate"
    ),
    Combination(
        ("by block, if faster", "reference"),
        NOT_BUILT,
        "whose reference runs by micro-batch",
        "remove sharding.accumulate",
    ),
    # Objectives and their rows
    Combination(("packing", "padded rows"), DEFINITION),
    Combination(("streaming", "padded rows"), NOT_BUILT),
    Combination(("split rows", "padded rows"), DEFINITION, "", "allowed: error, drop, truncate"),
    _idle("targets", "padded rows"),
    _idle("chat template", "padded rows"),
    _idle("BOS", "padded rows", "whose texts get the model's own special tokens"),
    Combination(
        ("named sources", "no losses by source"),
        NOT_BUILT,
        "whose losses are not reported by source",
        "remove the names; the rows of all sources are then evaluated together",
    ),
    Combination(("named sources", "own loss"), NOT_BUILT, "which returns one sum for all rows", "remove the names"),
    Combination(("sequence", "own loss"), NOT_BUILT, "whose rows must lie on one rank", "remove it"),
    Combination(("named sources", "streaming"), NOT_BUILT, "", "remove the names, or data.streaming"),
    Combination(("streaming", "compared completions"), NOT_BUILT),
    Combination(("split rows", "compared completions"), DEFINITION, "", "allowed: error, drop"),
    Combination(("truncated rows", "compared completions"), DEFINITION, "", "allowed: error, drop"),
    _idle("targets", "compared completions", "which compares completions"),
    _idle("sources and targets", "objectives but seq2seq", "", "remove it, or set objective.kind=seq2seq"),
    _idle("margins", "objectives but reward"),
    _idle("samples", "no text written", "whose model writes no text"),
    _idle("answers", "no text written", "whose model writes no text"),
    Combination(("epochs", "streaming"), DEFINITION, "whose length is not known", "set training.max_steps"),
    # Evaluations
    _idle("evaluations", "no held-out rows", "", "remove it, or set one of these"),
    _idle("held-out samples", "no held-out rows", "", "remove it, or set one of these"),
    _idle("answers", "no held-out rows", "as answers are written at evaluations", "set one of these"),
    _idle(
        "early stopping",
        "no evaluations",
        "as the run is evaluated at its start and its end alone",
        "set that, for example training.eval_every_steps=100",
    ),
    Combination(("best checkpoint", "no evaluations"), DEFINITION, _EACH_EVALUATED, _EVALUATE_EACH),
    Combination(("best checkpoint", "checkpoints between evaluations"), DEFINITION, _EACH_EVALUATED, _EVALUATE_EACH),
    _idle("best by answers", "no use of the best", "", "set one of these"),
    Combination(
        ("best by answers", "no answers"),
        DEFINITION,
        "which names the prompts and says which answers are right",
        "set that",
    ),
    # Adapters and the export
    _idle("merged export", "no adapters", "", "remove it, or set adapter.kind=lora"),
    Combination(
        ("added tokens", "adapters unmerged"),
        DEFINITION,
        "as an adapter fits the embeddings of its base, which have no tokens there",
        "set export.merge=true, and adapter.modules_to_save to the embeddings and the head, such as [embed_tokens, "
        "lm_head]",
    ),
    Combination(
        ("started adapter", "random weights"),
        DEFINITION,
        "as it needs the base that the adapter was trained on",
        "set model.name_or_path instead of model.config",
    ),
    Combination(
        ("random weights", "export", "adapters unmerged"),
        DEFINITION,
        "as an adapter of random weights fits no model that could be loaded later",
        "set export.merge=true, or model.name_or_path",
    ),
    # A model that samples what it learns from
    Combination(
        ("held-out rows", "own samples"),
        DEFINITION,
        "which has no loss on given rows",
        "set answers.file to held-out prompts with answers instead",
    ),
    Combination(
        ("early stopping", "best by loss", "own samples"),
        DEFINITION,
        "which has no held-out loss",
        "set training.best_by=answers",
    ),
    Combination(
        ("best checkpoint", "best by loss", "own samples"),
        DEFINITION,
        "which has no held-out loss",
        "set training.best_by=answers",
    ),
    Combination(
        ("held-out samples", "own samples"),
        DEFINITION,
        "whose held-out prompts are answered by answers.file",
        "remove it",
        is_idle=True,
    ),
    Combination(
        ("dropout", "own samples"),
        DEFINITION,
        "which would learn from samples of another model than the one that drew them",
        "set adapter.dropout=0",
    ),
    Combination(("streaming", "own samples"), NOT_BUILT, "", "remove it"),
    Combination(("sequence", "own samples"), NOT_BUILT, "", "set sharding.sequence=1"),
    Combination(("experts", "own samples"), NOT_BUILT, "", "set sharding.experts=1"),
    Combination(
        ("compile", "own samples"), NOT_BUILT, "whose rows have another length in each step", "remove training.compile"
    ),
    Combination(("targets", "own samples"), DEFINITION, "whose completions are learned", "remove it", is_idle=True),
    # Images
    Combination(("sequence", "images"), NOT_BUILT, "which stand in one part of a row", "set sharding.sequence=1"),
    Combination(("compile", "images"), NOT_BUILT, "whose sizes differ from one micro-batch to the next"),
    # Plans
)


@dataclass(frozen=True)
class Refusal:
    """The message about a combination: `problem` alone is for readers who cannot change the settings."""

    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.mend}"


def refusals(settings: Settings) -> list[Refusal]:
    """Returns a refusal for each forbidden combination in the settings; empty if there is none."""
    return [_refusal(found, settings) for found in COMBINATIONS if _is_asked(found, settings)]


def refuse(settings: Settings) -> None:
    """Checks that the settings can go together.

    Raises:
        BadInputError: if they cannot; it names every forbidden combination.
    """
    if found := refusals(settings):
        raise BadInputError(" ".join(f"{refusal}." for refusal in found).removesuffix("."))


def _is_asked(combination: Combination, settings: Settings) -> bool:
    return all(FEATURES[name].is_asked(settings) for name in combination.names)


def _refusal(combination: Combination, settings: Settings) -> Refusal:
    first, last = (FEATURES[name].named(settings) for name in (combination.names[0], combination.names[-1]))
    verb = "has no effect" if combination.is_idle else "is not possible"
    why = f", {combination.why}" if combination.why else ""
    joint = "" if last.startswith("without ") else "with "
    return Refusal(f"{first} {verb} {joint}{last}{why}", combination.mend)
