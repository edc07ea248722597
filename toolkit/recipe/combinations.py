"""Which settings cannot go together, why, and what to do: the one table of it.

Recipes, the backend (for loops of a user's own, too), plans and `toolkit init` ask this table and nothing else, so that
a plan never offers what a run refuses. docs/combinations.md is written from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from toolkit.errors import BadInputError
from toolkit.recipe.schema import OFFLOAD_DETAILS

if TYPE_CHECKING:
    from toolkit.recipe.recipe import Recipe


class Reason(Enum):
    """Why two settings exclude each other."""

    DEFINITION = "one leaves nothing for the other to do, or contradicts it"
    LIBRARY = "a library that does the work cannot do both"
    NOT_BUILT = "possible, but not built yet"


@dataclass(frozen=True)
class Settings:
    """What the table looks at. A default stands for what is not set, or not known yet.

    Attributes:
        objective: its `kind`, for words.
        encoder_decoder: whether a source is read and a target is written.
        has_teacher: whether a second, frozen model runs beside the one that is trained.
        strategy: a word of `toolkit.sharding.strategy.STRATEGIES`; None: the Accelerate config may say it later.
        accumulate: `by_micro_batch`, `by_block` or `auto`.
        checkpointing: every how many blocks are checkpointed; `auto`, or None for none.
        node: ranks among which units are sharded from forward to backward (hpZ); None: all.
        offload: whether optimizer state is kept in host memory; None: the Accelerate config may say it later.
        offload_details: a field of the sharding section that says how it is offloaded; None: none does.
        is_quantised: whether frozen layers are held in few bits.
        keeps_float32: the first trained parameter that stays in float32 beside 16-bit compute; None: none does.
        sums_in_autograd: whether FSDP2 sums gradients of several types itself, as from torch 2.15 on.
        own_loop: whether the backend shards the model of a loop of the user's own, and knows no recipe.
        longest_row: whether a plan looks for the longest row.
        moves_biases: whether biases of routers are moved to balance experts.
    """

    objective: str = "causal_lm"
    encoder_decoder: bool = False
    has_teacher: bool = False
    strategy: str | None = None
    offload: bool | None = None
    offload_details: str | None = None
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
    node: int | None = None
    prefetch: bool = False
    keeps_float32: str | None = None
    sums_in_autograd: bool = False
    own_loop: bool = False
    longest_row: bool = False
    moves_biases: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Settings:
        """The settings of a recipe, before an Accelerate config adds to them."""
        section, training = recipe.sharding, recipe.training
        details = [key for key in OFFLOAD_DETAILS if getattr(section, key) is not None]
        return cls(
            objective=recipe.objective.kind,
            encoder_decoder=recipe.objective.spec.encoder_decoder,
            has_teacher=recipe.objective.spec.has_teacher,
            strategy=section.strategy,
            offload=None if section.offload is None else section.offload == "optimizer",
            offload_details=details[0] if details else None,
            accumulate=section.accumulate,
            micro_batches=training.gradient_accumulation_steps,
            checkpointing=section.activation_checkpointing,
            offload_checkpoints=section.offload_checkpoints,
            chunk_tokens=section.chunk_tokens is not None,
            precision=training.mixed_precision,
            optimizer=recipe.optimizer.kind,
            adapter=recipe.adapter.kind != "none",
            is_quantised=recipe.adapter.quantize != "none",
            compiled=training.compile,
            experts=section.experts > 1,
            sequence=section.sequence > 1,
            node=section.reshard_after_forward,
            prefetch=section.prefetch is not None,
            moves_biases=bool(recipe.objective.router_bias_rate),
        )


@dataclass(frozen=True)
class Feature:
    """Something that settings ask for.

    Attributes:
        setting: as an error names it; `{...}` are fields of `Settings`.
        is_asked: whether settings ask for it.
    """

    setting: str
    is_asked: Callable[[Settings], bool]


def _strategy(*names: str) -> Feature:
    return Feature("strategy {strategy}", lambda settings: settings.strategy in names)


FEATURES = {
    "ddp": _strategy("ddp"),
    "zero1, zero2": _strategy("zero1", "zero2"),
    "hybrid": _strategy("hybrid"),
    "offload": Feature("offload", lambda settings: settings.offload is True),
    "offload's details": Feature("sharding.{offload_details}", lambda settings: settings.offload_details is not None),
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
    "quantised base": Feature("a quantised base (adapter.quantize)", lambda settings: settings.is_quantised),
    "compile": Feature("training.compile", lambda settings: settings.compiled),
    "experts": Feature("sharding.experts", lambda settings: settings.experts),
    "sequence": Feature("sharding.sequence", lambda settings: settings.sequence),
    "hpZ": Feature("sharding.reshard_after_forward", lambda settings: settings.node is not None),
    "prefetch": Feature("sharding.prefetch", lambda settings: settings.prefetch),
    "float32 islands": Feature(
        "{keeps_float32}, which the model keeps in float32", lambda settings: settings.keeps_float32 is not None
    ),
    "torch 2.15": Feature("torch 2.15", lambda settings: settings.sums_in_autograd),
    "own loop": Feature("a loop of your own", lambda settings: settings.own_loop),
    "longest row": Feature("--longest-row", lambda settings: settings.longest_row),
    "moved biases": Feature("objective.router_bias_rate", lambda settings: settings.moves_biases),
    "seq2seq": Feature("objective.kind {objective}", lambda settings: settings.encoder_decoder),
    "distillation": Feature("objective.kind {objective}", lambda settings: settings.has_teacher),
}
"""Name in the docs -> the feature."""


@dataclass(frozen=True)
class Combination:
    """Features that cannot go together.

    Attributes:
        names: of two or three features; an error says that the first one cannot go with the last one.
        why: a clause about the last one, or the first.
        mend: what to do.
        is_idle: the first one would change nothing, where others fail.
    """

    names: tuple[str, ...]
    reason: Reason
    why: str
    mend: str
    is_idle: bool = False


DEFINITION, LIBRARY, NOT_BUILT = Reason.DEFINITION, Reason.LIBRARY, Reason.NOT_BUILT
_GATHERS_ONCE = "which gathers parameters once a step at most"
_REMOVE_ONE = "remove one of them"

COMBINATIONS = (
    # By block
    Combination(("by block", "ddp"), DEFINITION, _GATHERS_ONCE, "remove it, or choose zero3 or hybrid", is_idle=True),
    Combination(
        ("by block", "zero1, zero2"), DEFINITION, _GATHERS_ONCE, "remove it, or choose zero3 or hybrid", is_idle=True
    ),
    Combination(
        ("by block", "one micro-batch"),
        DEFINITION,
        "whose blocks are gathered once as it is",
        "set training.gradient_accumulation_steps above 1, or remove it",
        is_idle=True,
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
        ("hpZ", "by block"),
        LIBRARY,
        "which keeps units gathered from one micro-batch to the next: FSDP2's switch for it forgets the groups",
        _REMOVE_ONE,
    ),
    Combination(
        ("hpZ", "by block, if faster"),
        LIBRARY,
        "which may keep units gathered from one micro-batch to the next",
        _REMOVE_ONE,
    ),
    # Gathers inside nodes
    Combination(
        ("hpZ", "ddp"), DEFINITION, "whose backward gathers nothing again", "remove it, or choose zero3", is_idle=True
    ),
    Combination(
        ("hpZ", "zero1, zero2"),
        DEFINITION,
        "whose backward gathers nothing again",
        "remove it, or choose zero3",
        is_idle=True,
    ),
    Combination(
        ("hpZ", "hybrid"),
        DEFINITION,
        "whose backward gathers inside its groups as it is",
        "remove it, or choose zero3",
        is_idle=True,
    ),
    Combination(("hpZ", "experts"), NOT_BUILT, "whose units have ranks of their own", _REMOVE_ONE),
    # Experts
    Combination(("experts", "ddp"), DEFINITION, "which holds every expert on every rank", "remove it, or choose zero3"),
    Combination(("experts", "compile"), NOT_BUILT, "", _REMOVE_ONE),
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
    Combination(
        ("offload's details", "no offload"),
        DEFINITION,
        "",
        "set sharding.offload=optimizer, or the strategy zero3+offload in the Accelerate config",
        is_idle=True,
    ),
    # Activations
    Combination(
        ("checkpoints on the host", "no checkpoints"),
        DEFINITION,
        "",
        "remove it, or set sharding.activation_checkpointing=1",
        is_idle=True,
    ),
    Combination(
        ("chunks", "no checkpoints"),
        DEFINITION,
        "",
        "remove it, or set sharding.activation_checkpointing=1",
        is_idle=True,
    ),
    # Gathers ahead, compiled blocks, precision
    Combination(("prefetch", "ddp"), DEFINITION, "which gathers nothing", "remove it", is_idle=True),
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
    Combination(("sequence", "seq2seq"), NOT_BUILT, "", "remove it"),
    Combination(("by block", "seq2seq"), NOT_BUILT, "", "remove it"),
    Combination(("chunks", "seq2seq"), NOT_BUILT, "", "remove it"),
    Combination(("compile", "seq2seq"), NOT_BUILT, "", "remove it"),
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
    Combination(("experts", "distillation"), NOT_BUILT, "", "remove it"),
    Combination(("sequence", "distillation"), NOT_BUILT, "", "remove it"),
    # Plans
    Combination(("longest row", "seq2seq"), DEFINITION, "whose samples are two rows", "plan without it"),
    Combination(
        ("longest row", "distillation"),
        NOT_BUILT,
        "whose rows ranks cannot share",
        "plan with several values of data.max_length",
    ),
    Combination(("longest row", "experts"), NOT_BUILT, "", "set sharding.experts=1"),
)


@dataclass(frozen=True)
class Refusal:
    """What cannot be done, in words: `problem` without the mend, for who did not ask for it."""

    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.mend}"


def refusals(settings: Settings) -> list[Refusal]:
    """Everything in the settings that cannot go together; empty if they can."""
    return [_refusal(found, settings) for found in COMBINATIONS if _is_asked(found, settings)]


def refuse(settings: Settings) -> None:
    """Raises BadInputError if settings cannot go together."""
    if found := refusals(settings):
        raise BadInputError(" ".join(f"{refusal}." for refusal in found).removesuffix("."))


def _is_asked(combination: Combination, settings: Settings) -> bool:
    return all(FEATURES[name].is_asked(settings) for name in combination.names)


def _refusal(combination: Combination, settings: Settings) -> Refusal:
    first, last = (_named(name, settings) for name in (combination.names[0], combination.names[-1]))
    verb = "has no effect" if combination.is_idle else "is not possible"
    why = f", {combination.why}" if combination.why else ""
    joint = "" if last.startswith("without ") else "with "
    return Refusal(f"{first} {verb} {joint}{last}{why}", combination.mend)


def _named(name: str, settings: Settings) -> str:
    return FEATURES[name].setting.format_map({**vars(settings), "checkpointing": settings.checkpointing or "null"})
