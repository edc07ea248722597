"""The rows of a run: in the form that its model takes, and in the batches of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.data import build
from toolkit.data.build import TokenisedData
from toolkit.data.kinds.registry import kind_for
from toolkit.data.samples.loader import Loader, TrainLoader, evaluation_batches
from toolkit.data.samples.samples import Batch, Samples
from toolkit.data.samples.sequence_parts import WHOLE, Part
from toolkit.data.stream import StreamLoader
from toolkit.errors import BadInputError, counted, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.positions import require_positions, takes_positions
from toolkit.model.load import load_without_weights
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import steps_of_run
from toolkit.run.stages.stages import BuiltRun, OpenedRun
from toolkit.sharding.fsdp2.fsdp import class_name


def build_windows(
    recipe: Recipe,
    data: TokenisedData,
    num_steps: int,
    accumulation: int,
    rank: int,
    world_size: int,
    part: Part = WHOLE,
) -> Loader:
    """Returns the loader that yields a rank's `accumulation` micro-batches of each optimizer step.

    Args:
        rank: this rank, or its group if ranks share rows.
        world_size: number of ranks, or of groups.
        part: this rank's part of the rows of its group.
    """
    training = recipe.training
    all_steps = num_steps * training.micro_batch_size * accumulation * world_size
    split: dict[str, Any] = {
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "rank": rank,
        "world_size": world_size,
        "part": part,
    }
    if data.stream is not None:
        return StreamLoader(data.stream, num_positions=all_steps, **split)
    positions = num_positions(recipe, len(data.train), all_steps)
    return TrainLoader(data.train, num_positions=positions, seed=training.seed, shuffle=recipe.data.shuffle, **split)


def num_positions(recipe: Recipe, num_samples: int, all_steps: int) -> int:
    """Returns the samples of the run: whole steps, or exactly the epochs of the recipe.

    A step whose samples the model makes is whole in any case, and goes on with the prompts of the next epoch.
    """
    if recipe.training.num_epochs is None or recipe.objective.spec.samples_itself:
        return all_steps
    return max(1, round(recipe.training.num_epochs * num_samples))


def length_of_run(opened: OpenedRun, data: TokenisedData) -> tuple[int, int]:
    """Returns steps and samples of the run; where it resumes, the first steps may have been of another size."""
    recipe, size, manifest = opened.recipe, opened.samples_per_step, opened.resumed
    num_steps = steps_of_run(recipe.training, len(data.train), size)
    positions = num_positions(recipe, len(data.train), num_steps * size)
    if manifest is None:
        return num_steps, positions
    # max_steps counts steps of any size; epochs count samples.
    if recipe.training.num_epochs is None:
        return num_steps, manifest.samples + max(0, num_steps - manifest.step) * size
    return manifest.step + max(0, -(-(positions - manifest.samples) // size)), positions


def require_room(model: PreTrainedModel, tokens: PreTrainedTokenizerBase, recipe: Recipe, data: TokenisedData) -> None:
    """Checks that samples fit the model's positions and its vocabulary.

    Raises:
        BadInputError: if they do not.
    """
    longest = max(samples.longest for samples in (data.train, data.validation) if samples is not None)
    require_positions(model, recipe.data, kind_for(recipe.objective.kind).documents, longest)
    try:
        rows = int(model.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return  # no embedding table: CANINE hashes any character into buckets, Perceiver's inputs are latents
    # The largest number counts, too, because a vocabulary may have gaps.
    needed = max(len(tokens), 1 + max(tokens.get_vocab().values(), default=0))
    if needed > rows:
        field = "model.tokenizer" if recipe.model.tokenizer is not None else "model.name_or_path"
        raise BadInputError(
            f"{field}: the tokenizer has {needed} tokens, but the model's embeddings have {counted(rows, 'row')}; "
            "use the tokenizer that belongs to the model, or correct vocab_size in its config.json"
        )


def may_pad(recipe: Recipe, data: TokenisedData) -> bool:
    """Returns whether the recipe lets rows be padded instead of packed if the model needs that.

    Completions that are compared share rows even if `data.packing` is false.
    """
    if recipe.objective.spec.compares_completions:
        return recipe.data.packing is not True and recipe.sharding.sequence == 1
    return data.report.packing and recipe.data.packing is None and recipe.objective.spec.may_pad


def fitting(
    recipe: Recipe, tokens: PreTrainedTokenizerBase, data: TokenisedData, model: PreTrainedModel
) -> tuple[TokenisedData, str | None]:
    """Returns the data in the form that the model takes, and why its rows are padded for it, if they are.

    Raises:
        BadInputError: if the recipe asks for completions to share rows, and the model cannot do that.
    """
    if takes_positions(model):
        return data, None
    why = f"{class_name(base_of(model))} takes no position_ids"
    if may_pad(recipe, data):
        return without_packing(recipe, tokens), why
    if recipe.objective.spec.compares_completions:
        field = "data.packing" if recipe.data.packing else "sharding.sequence"
        raise BadInputError(f"{field}: {why}, so completions that share a row would see each other; remove {field}")
    return data, None


def without_packing(recipe: Recipe, tokens: PreTrainedTokenizerBase) -> TokenisedData:
    """Returns the data with a sample for each row; nothing is tokenised again."""
    section = recipe.data.model_copy(update={"packing": False})
    return build.build(section, tokens, recipe.training.seed, recipe.objective)


def as_trained(recipe: Recipe, tokens: PreTrainedTokenizerBase, data: TokenisedData) -> tuple[TokenisedData, list[str]]:
    """Returns the data as a run would train on it, with notes; reads only the model's configuration."""
    if not may_pad(recipe, data):
        return data, []
    try:
        model = load_without_weights(recipe.model, tokens)
    except BadInputError as error:
        return data, [f"shown packed, as the model that decides it could not be built: {first_line(error)}"]
    data, padded = fitting(recipe, tokens, data, model)
    return data, [f"packing: none, each row is padded: {padded}"] if padded is not None else []


def evaluation_of(run: BuiltRun) -> Callable[[], Iterator[Batch]] | None:
    """Returns a function that yields this rank's held-out batches, or None without held-out data."""
    return None if run.data.validation is None else batches_of(run, run.data.validation)


def batches_of(run: BuiltRun, held_out: Samples) -> Callable[[], Iterator[Batch]]:
    """Returns a function that yields this rank's batches of rows that are evaluated."""
    recipe = run.opened.recipe
    group, num_groups, part = run.opened.share
    size, limit = recipe.training.micro_batch_size, recipe.data.max_validation_samples
    return partial(evaluation_batches, held_out, size, group, num_groups, limit, part)
