"""The stage after `prepare`: checks the model on the rows as it is trained, with its kernels and precision."""

from __future__ import annotations

from torch import nn

from toolkit import ranks
from toolkit.data.build import TokenisedData
from toolkit.data.report import DataReport
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.positions import rotary_limit
from toolkit.objectives.build import build_objective
from toolkit.objectives.objective import Objective
from toolkit.objectives.rows_alone import RowsAlone
from toolkit.planning.check import Planned
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.image_check import check_images
from toolkit.run.checks.own_loss_check import check_own_loss
from toolkit.run.checks.packing_check import LeakError, check_causal, check_leaks
from toolkit.run.checks.padding_check import changed_by_padding
from toolkit.run.checks.quantised_check import check_quantised
from toolkit.run.checks.sequence_check import check_parts, part_of
from toolkit.run.checks.tensor_check import check_tensor
from toolkit.run.stages.rows import may_pad, without_packing
from toolkit.run.stages.stages import CheckedModel, MetaModel, OpenedRun, PackingCheck, ShardedModel
from toolkit.run.stages.teacher_setup import check_teacher
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.terminal import Pass, Terminal


def check_model(opened: OpenedRun, on_meta: MetaModel, planned: Planned, sharded: ShardedModel) -> CheckedModel:
    """Checks quantised layers, packed rows, parts of rows and the head's loss. Collective.

    Raises:
        BadInputError: on every rank, if the model does not compute what the recipe assumes.
    """
    recipe, accelerator, model = opened.recipe, opened.accelerator, sharded.model
    objective, data, padded = on_meta.objective, on_meta.data, on_meta.padded
    cut_differs = check_tensor(model, sharded.inner, objective, data.train, opened.device, opened.in_16_bits)
    check_quantised(accelerator, recipe.model.dtype, model, objective, data.train)
    packing, leak = check_packing(opened, sharded, objective, data)
    if leak is not None:
        padded, data = leak, without_packing(recipe, on_meta.tokenizer)
        counts = on_meta.data.report.label_counts
        names = recipe.data.source_names
        teacher = None if on_meta.teacher is None else on_meta.teacher.model
        continued = on_meta.loaded.started is not None
        objective = build_objective(
            recipe.objective, on_meta.model, False, counts, teacher, apart=True, sources=names, continued=continued
        )
    check_teacher(accelerator, recipe.training.micro_batch_size, objective, data, opened.in_16_bits)
    differ = _check_parts(opened, sharded, objective, data, planned)
    differ = cut_differs if differ is None else differ
    head_loss = objective.check_head_loss(model, opened.device, opened.in_16_bits)
    own = check_own_loss(model, objective, data.train, recipe.training.micro_batch_size, opened.device)
    if own is not None:
        head_loss = f"{recipe.objective.loss}, {own}; {head_loss}"
    alone = check_padding(opened, sharded, objective, data)
    if alone is not None:
        objective = RowsAlone(objective)
        if objective.inner.needs_whole_steps:
            raise BadInputError(
                f"objective.loss: returns a count of its own, which needs padded rows ({alone}); return len(labels), "
                "or num_rows"
            )
    elif (told := changed_by_longer_rows(sharded.inner, recipe, data.report)) is not None:
        opened.console.warn(told)
    return CheckedModel(objective, data, padded, packing, alone, head_loss, differ)


def changed_by_longer_rows(inner: nn.Module, recipe: Recipe, report: DataReport) -> str | None:
    """Returns a warning if a long row changes the rotary embeddings of the others of its micro-batch, or None."""
    limit, longest = rotary_limit(inner), recipe.data.max_length
    if limit is None or not (report.packing or recipe.training.micro_batch_size > 1):
        return None
    if report.train is not None and not report.streaming:  # of a stream it is the first window
        longest = min(longest, int(report.train.longest["tokens"]))
    if longest <= limit[1]:
        return None
    return (
        f"model.name_or_path: the rotary embeddings of {class_name(base_of(inner))} ({limit[0]}) change for a whole "
        f"micro-batch if one row has more than {limit[1]:,} tokens, and the longest has {longest:,}: a shorter row is "
        f"not computed as it is alone. Set data.max_length={limit[1]}, or data.packing=false and "
        "training.micro_batch_size=1"
    )


def check_padding(opened: OpenedRun, sharded: ShardedModel, objective: Objective, data: TokenisedData) -> str | None:
    """Returns why rows must run one after another without padding, or None if padding changes nothing. Collective.

    Raises:
        BadInputError: if padding changes rows, and the recipe needs padded rows.
    """
    recipe, samples = opened.recipe, data.train
    spec = recipe.objective.spec
    if samples.has_images:
        return None
    pads = objective.apart if spec.compares_completions else not data.report.packing
    if not pads or recipe.sharding.sequence > 1:  # parts of rows are checked by themselves
        return None
    with Pass(Terminal(quiet=ranks.rank() != 0), "checking that padding changes no row"):
        why = changed_by_padding(sharded.model, sharded.inner, objective, samples, opened.device, opened.in_16_bits)
    if why is not None and (spec.compares_completions or spec.has_teacher):
        raise BadInputError(f"objective.kind: {spec.kind} pads rows, and {why}; train another model")
    return why


def check_packing(
    opened: OpenedRun, sharded: ShardedModel, objective: Objective, data: TokenisedData
) -> tuple[PackingCheck | None, str | None]:
    """Checks that no token attends to later ones, and that packed rows do not attend to each other. Collective.

    Returns:
        The measurements if rows share samples, and why they must not if the recipe leaves packing open.

    Raises:
        BadInputError: if they see each other, and the recipe asks for packing.
    """
    recipe, model, inner = opened.recipe, sharded.model, sharded.inner
    if recipe.objective.spec.predicts_next_tokens and recipe.sharding.sequence == 1:
        check_causal(model, inner, objective, opened.device)
    train = data.train
    with_images = image_samples_of(train)
    # Both completions of a pair share a sample, whether or not it is packed, until the objective keeps them apart.
    if with_images is None and not train.is_packed and (objective.apart or not train.shares_samples):
        return None, None
    found, leak, size = None, None, recipe.training.micro_batch_size
    try:
        with Pass(Terminal(quiet=ranks.rank() != 0), "checking that packed rows do not attend to each other"):
            if with_images is not None:
                seen = check_images(model, inner, objective, with_images, opened.device, opened.in_16_bits)
                found = (seen.leaks, seen.alone) if seen is not None and seen.shared else None
            else:
                compiled = recipe.training.compile
                found = check_leaks(model, inner, objective, train, size, opened.device, opened.in_16_bits, compiled)
    except LeakError as error:
        leak = error
    # All or none: ranks whose rounding differs must not train on different samples.
    leak = next((of_rank for of_rank in ranks.gather_objects(leak) if of_rank is not None), None)
    if leak is not None:
        if not may_pad(recipe, data):
            raise leak
        return None, leak.why
    if not train.is_packed:
        return None, None
    report = data.report.train
    assert report is not None
    assert report.fill_rate is not None, "rows are packed"
    return PackingCheck(report.fill_rate, found), None


def _check_parts(
    opened: OpenedRun, sharded: ShardedModel, objective: Objective, data: TokenisedData, planned: Planned
) -> float | None:
    """Returns the largest difference from whole rows, see `check_parts`; None if it compares nothing."""
    part = part_of(opened.accelerator, opened.recipe.sharding)[2]
    chunked = planned.checkpointing is not None and planned.checkpointing.chunk_tokens is not None
    model, inner, device = sharded.model, sharded.inner, opened.device
    return check_parts(model, inner, objective, data.train, part, device, opened.in_16_bits, chunked)
