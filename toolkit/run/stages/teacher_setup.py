"""Sets up the frozen model that a run learns from, next to the one that it trains."""

from __future__ import annotations

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.data.build import TokenisedData
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.model.attention.attention import settle_attention
from toolkit.model.load import LoadedModel
from toolkit.objectives.objective import Objective
from toolkit.objectives.teacher import load_teacher, shard_teacher
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.image_check import check_images
from toolkit.run.checks.packing_check import check_leaks
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.sharding.tensor.axes import joined_mesh


def asked_teacher(
    accelerator: Accelerator, recipe: Recipe, tokens: PreTrainedTokenizerBase, packed: bool, has_images: bool
) -> LoadedModel | None:
    """Returns the teacher on the meta device, with the attention of the run, or None without one.

    Raises:
        BadInputError: if it cannot be loaded, or reads tokens or images differently from the student.
    """
    teacher = load_teacher(recipe, tokens, accelerator.mixed_precision, has_images)
    if teacher is not None:
        in_16_bits, device = accelerator.mixed_precision != "no" or recipe.model.dtype != "float32", accelerator.device
        settle_attention(teacher.model, recipe.model.attention, device, in_16_bits, packed, False)
    return teacher


def place_teacher(
    accelerator: Accelerator, unit_classes: list[str] | None, teacher: LoadedModel | None, plugin: ShardingPlugin
) -> None:
    """Shards the teacher, if there is one, and loads its weights."""
    if teacher is None:
        return
    # It is not cut, so the ranks of a tensor group run it alike, and share its parameters as all ranks do.
    mesh = joined_mesh(accelerator.state.device_mesh) if plugin.strategy.sharded else None
    precision = accelerator.mixed_precision
    shard_teacher(teacher.model, plugin.strategy, mesh, precision, unit_classes, teacher.load_weights)
    teacher.model.to(accelerator.device)


def check_teacher(
    accelerator: Accelerator, micro_batch_size: int, objective: Objective, data: TokenisedData, in_16_bits: bool
) -> None:
    """Checks that images reach the teacher, and that rows that share a sample do not see each other in it. Collective.

    Raises:
        BadInputError: on every rank, if they do not, or do.
    """
    train, size, device = data.train, micro_batch_size, accelerator.device
    with_images = image_samples_of(train)
    if objective.teacher is None or not (train.is_packed or with_images is not None):
        return
    model, causal = objective.teacher.model, objective.teacher.causal

    def check() -> None:
        if with_images is not None:
            check_images(model, model, causal, with_images, device, in_16_bits)
        else:
            check_leaks(model, model, causal, train, size, device, in_16_bits)

    ranks.on_every_rank(check, "look at the teacher's rows")
