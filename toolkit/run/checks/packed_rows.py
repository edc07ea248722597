"""Rows that share a sample: the run trains on them only if they do not see each other."""

from __future__ import annotations

from toolkit import ranks
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.run.checks.image_check import check_images
from toolkit.run.checks.packing_check import LeakError, check_causal, check_leaks
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.rows import may_pad, without_packing
from toolkit.run.stages.stages import BuiltRun
from toolkit.terminal import LongAction


class PackedRows(RunPart):
    """Where rows see each other, and the recipe leaves packing open, each gets a sample of its own."""

    def check(self, run: BuiltRun) -> None:
        sharded, on_meta = run.sharded, run.on_meta
        fact, leak = check_packing(run)
        if leak is not None:
            sharded.padded, sharded.data = leak, without_packing(self.recipe, on_meta.tokenizer)
            sharded.objective = on_meta.build_objective(packed=False, apart=True)
        self.facts["packing"] = fact if sharded.padded is None else f"none, each row is padded: {sharded.padded}"


def check_packing(run: BuiltRun) -> tuple[str, str | None]:
    """Checks that no token attends to later ones, and that packed rows do not attend to each other. Collective.

    Returns:
        What the summary says of packed rows, and why rows must not share samples if the recipe leaves packing open.

    Raises:
        BadInputError: if they see each other, and the recipe asks for packing.
    """
    opened, objective, data = run.opened, run.objective, run.data
    recipe, model, device = opened.recipe, run.inner, opened.device
    if recipe.objective.spec.predicts_next_tokens and recipe.sharding.sequence == 1:
        check_causal(model, objective, device)
    train = data.train
    with_images = image_samples_of(train)
    # Both completions of a pair share a sample, whether or not it is packed, until the objective keeps them apart.
    if with_images is None and not train.is_packed and (objective.apart or not train.shares_samples):
        return "", None
    found, leak, size = None, None, recipe.training.micro_batch_size
    try:
        with LongAction(opened.console, "checking that packed rows do not attend to each other"):
            if with_images is not None:
                seen = check_images(model, objective, with_images, device, opened.in_16_bits)
                found = (seen.leaks, seen.alone) if seen is not None and seen.shared else None
            else:
                compiled = recipe.training.compile
                found = check_leaks(model, objective, train, size, device, opened.in_16_bits, compiled)
    except LeakError as error:
        leak = error
    # All or none: ranks whose rounding differs must not train on different samples.
    leak = next((of_rank for of_rank in ranks.gather_objects(leak) if of_rank is not None), None)
    if leak is not None:
        if not may_pad(recipe, data):
            raise leak
        return "", leak.why
    if not train.is_packed:
        return "", None
    report = data.report.train
    assert report is not None
    assert report.fill_rate is not None, "rows are packed"
    if found is None:
        checked = "no sample holds two rows"
    else:
        checked = "checked: packed rows do not attend to each other (change {:.0e}, alone {:.0e})".format(*found)
    return f"{report.fill_rate:.1%} of the tokens are used; {checked}", None
