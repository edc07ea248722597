"""Loads and shards the frozen model next to the trained one: a teacher, which it also runs, or a reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from toolkit.data.images.images import Images
from toolkit.data.rows.cache import cache_folder
from toolkit.data.samples.samples import Batch
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.model.load import LoadedModel, NoTokens, fingerprint, load, load_without_weights
from toolkit.objectives.causal_lm import CausalLM, rows_of
from toolkit.objectives.losses.divergence import TeacherSide
from toolkit.objectives.losses.fused_linear_cross_entropy import HeadLoss
from toolkit.paths import is_hub_name
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection, ModelSection, SourceSection
from toolkit.sharding.apply import LoadsWeights, apply, hold_whole
from toolkit.sharding.fsdp2.fsdp import class_name, gathered
from toolkit.sharding.plan.strategy import STRATEGIES, Strategy
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units

DTYPES: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
"""Type of a teacher's weights by mixed precision: the compute dtype, because its weights are never updated."""


class Teacher:
    """Next-token probabilities of a frozen model, from its hidden states and its head.

    Args:
        packed: whether documents share samples.

    Attributes:
        gathering: returns the context in which the head's weights are whole.

    Raises:
        BadInputError: see `require_head_loss`.
    """

    def __init__(self, model: nn.Module, packed: bool) -> None:
        self.model = model.eval().requires_grad_(False)
        self.causal = CausalLM(model, packed)
        self.head_loss = require_head_loss(self.causal, "objective.teacher")
        self.gathering: Callable[[], AbstractContextManager[None]] = lambda: gathered(model, self._head.weight)

    @property
    def _head(self) -> Any:
        return self.head_loss.head

    @torch.no_grad()
    def hidden(self, batch: Batch, targets: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        """Returns the inputs of its head for the N tokens with a target, (N, D).

        Args:
            targets: (tokens,); `IGNORED` for no target.
            counted: numbers of the tokens with a target, (N,), if they are known.
        """
        kept: list[torch.Tensor] = []

        def keep(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
            kept.append(hidden)
            return hidden.new_zeros((1, 1, 1))

        with rows_of(batch):
            self.head_loss.run(keep, self.model, self.causal.inputs(batch), targets, counted)
        return kept[0]

    @contextmanager
    def side(self, hidden: torch.Tensor) -> Iterator[TeacherSide]:
        """Yields hidden states (N, D) with the teacher's head, which is gathered meanwhile."""
        with self.gathering():
            yield TeacherSide(hidden, self._head.weight, self.head_loss.bias, self.head_loss.after)


def require_head_loss(causal: CausalLM, field: str) -> HeadLoss:
    """Returns what computes a model's losses from its head's inputs.

    Raises:
        BadInputError: if they cannot be computed so.
    """
    if isinstance(causal.head_loss, str):
        raise BadInputError(
            f"{field}: distillation compares logits of a few tokens at a time, and {causal.head_loss}; name another "
            "model"
        )
    return causal.head_loss


def teacher_section(section: ObjectiveSection, student: ModelSection, mixed_precision: str) -> ModelSection:
    """Returns the teacher as the `model` section of a recipe."""
    return ModelSection(
        name_or_path=section.teacher,
        dtype=DTYPES.get(mixed_precision, student.dtype),
        attention=student.attention,
    )


def frozen_section(recipe: Recipe, mixed_precision: str) -> ModelSection | None:
    """Returns the model that stays frozen next to the trained one as a `model` section, or None if there is none.

    It is a teacher, or the reference of a model that learns from its own samples with every weight: a second copy of
    the model that training starts from. Under a new adapter the model itself is the reference, with the adapter off.
    """
    if recipe.objective.teacher is not None:
        return teacher_section(recipe.objective, recipe.model, mixed_precision)
    if recipe.objective.spec.samples_itself and recipe.objective.beta and recipe.adapter.kind == "none":
        return recipe.model.model_copy(update={"dtype": DTYPES.get(mixed_precision, recipe.model.dtype)})
    return None


def load_teacher(
    recipe: Recipe, tokens: PreTrainedTokenizerBase, mixed_precision: str, has_images: bool
) -> LoadedModel | None:
    """Returns the model of `frozen_section` on the meta device, or None without one.

    Args:
        tokens: the student's tokenizer.
        has_images: whether rows have images.

    Raises:
        BadInputError: if there is no such model, or it reads tokens or images differently from the student.
    """
    section = frozen_section(recipe, mixed_precision)
    if section is None:
        return None
    if recipe.objective.teacher is None:
        return _frozen(section, tokens, recipe.training.seed)
    with errors_of_teacher():
        theirs = tokenizer.load(section, DataSection(train=[SourceSection(path="-")], max_length=8))
        require_same_tokens(tokens, theirs)
        if has_images:
            cache = cache_folder(recipe.data)
            require_same_processor(Images.of(tokens, cache), Images.of(theirs, cache))
        loaded = _frozen(section, tokens, recipe.training.seed)
        return replace(loaded, load_weights=errors_of_teacher()(loaded.load_weights))


def _frozen(section: ModelSection, tokens: PreTrainedTokenizerBase, seed: int) -> LoadedModel:
    loaded = load(section, tokens, seed)
    loaded.fit.fingerprint = fingerprint(section)
    loaded.model.requires_grad_(False)
    return loaded


def teacher_without_weights(recipe: Recipe, mixed_precision: str) -> nn.Module | None:
    """Returns the same as `load_teacher` from the configuration alone, for sizes; its tokens are not compared."""
    section = frozen_section(recipe, mixed_precision)
    if section is None:
        return None
    with errors_of_teacher() if recipe.objective.teacher is not None else nullcontext():
        model: nn.Module = load_without_weights(section, NoTokens())
        return model.requires_grad_(False)


@contextmanager
def errors_of_teacher() -> Iterator[None]:
    """Makes errors about a recipe's model name the teacher's field instead.

    Raises:
        BadInputError: the error that was raised inside, with the field's name replaced.
    """
    try:
        yield
    except BadInputError as error:
        text = str(error).replace("model.name_or_path", "objective.teacher")
        text = re.sub(r",? or(, if this is intended,)? list [^;]*model\.allow_new_weights.*", "", text)  # it has none
        raise BadInputError(text) from error


def require_same_processor(student: Images | None, teacher: Images | None) -> None:
    """Checks that the teacher's processor makes the same of an image as the student's, which makes it for both.

    Raises:
        BadInputError: if it does not; it names the first difference.
    """
    assert student is not None, "rows have images"
    if teacher is None:
        raise BadInputError(
            "objective.teacher: the rows have images, and its folder has no image processor; name a teacher that reads "
            "images as the student does"
        )
    ours, theirs = (
        {"the class": type(images.processor).__name__, **images.processor.image_processor.to_dict()}
        for images in (student, teacher)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise BadInputError(
                f"objective.teacher: it needs the image processor of the student, but {name} of the student's is "
                f"{ours.get(name)!r}, and of the teacher's {theirs.get(name)!r}; name a teacher of the same family"
            )


def require_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Checks that every token has the same number in both tokenizers.

    Raises:
        BadInputError: if one differs; it names the first difference.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = [(ours.get(token), theirs.get(token), token) for token in ours.keys() | theirs.keys()]
    differing = [found for found in differing if found[0] != found[1]]
    difference = None
    if differing:
        mine, its, token = min(differing, key=lambda found: (min(n for n in found[:2] if n is not None), found[2]))
        difference = (
            f"{token!r} is {_token_text(mine)} of the student's tokenizer and {_token_text(its)} of the teacher's"
        )
    for name in ("bos_token", "eos_token", "unk_token"):
        pair = getattr(student, name), getattr(teacher, name)
        if difference is None and pair[0] != pair[1]:
            difference = f"{name} of the student's tokenizer is {pair[0]!r}, and of the teacher's {pair[1]!r}"
    if difference is not None:
        raise BadInputError(
            f"objective.teacher: it needs the tokenizer of the student, but {difference}; name a teacher of the same "
            "family, or, where the student's embeddings have rows for them, set model.tokenizer to the teacher's"
        )


def _token_text(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def teacher_units(model: nn.Module, unit_classes: list[str] | None) -> UnitPlan:
    """Returns the teacher's units; of the unit classes that a recipe names, only those that the teacher has count."""
    present = {class_name(module) for module in model.modules()}
    return plan_units(model, [name for name in unit_classes or () if name in present] or None)


def shard_teacher(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    mixed_precision: str,
    unit_classes: list[str] | None,
    load_weights: LoadsWeights | None = None,
) -> None:
    """Shards the teacher as the student, in place; it is gathered unit by unit, as backward does not need it.

    Under ddp it is whole on every rank, and still on the host.

    Args:
        load_weights: as `apply` takes it.
    """
    if not strategy.sharded:
        hold_whole(model, mixed_precision, load_weights)
        return
    assert mesh is not None
    by_unit = strategy if strategy.replicated else STRATEGIES["zero3"]
    units = teacher_units(model, unit_classes)
    apply(model, units, by_unit, mesh, mixed_precision, lambda: True, load_weights=load_weights)


def teacher_fact(teacher: str | None, model: nn.Module) -> str:
    """Describes a teacher, or a reference, for the run summary; a folder is named without its path."""
    shown = "the model that training starts from"
    if teacher is not None:
        shown = teacher if is_hub_name(teacher) else Path(teacher).name
    parameters = list(model.parameters())
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return f"{shown}, {class_name(model)}, {sum(p.numel() for p in parameters):,} parameters, frozen, in {dtype}"
