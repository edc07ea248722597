"""Lets the model of a run write text as it is trained: sharded, in its precision, with the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from transformers import GenerationConfig

from toolkit import ranks
from toolkit.generation.text.load import Loaded, beginning, positions_of, stop_tokens
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.run.stages.stages import BuiltRun
from toolkit.sharding.fsdp2.unit_states import UnitStates

T = TypeVar("T")
B = TypeVar("B")


def loaded_of(
    run: BuiltRun, if_too_large: str, never_written: frozenset[int] = frozenset(), whole: bool = False
) -> Loaded:
    """Returns the run's model as one that generates text inside `generating`.

    Args:
        if_too_large, never_written: see `Loaded`.
        whole: as it is given to `generating`.
    """
    opened, base = run.opened, base_of(run.inner)
    return Loaded(
        opened.recipe.model.name_or_path or "the model",
        base,
        run.tokenizer,
        stop_tokens(base, run.tokenizer),
        positions_of(base),
        opened.recipe.objective.spec.encoder_decoder,
        collective=opened.plugin.strategy.sharded and ranks.world_size() > 1 and not whole,
        if_too_large=if_too_large,
        never_written=never_written,
    )


@contextmanager
def generating(
    run: BuiltRun, beat: Callable[[], None], whole: bool = False, check_stop: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Lets the model generate as an export does, inside the `with` block. Collective.

    Args:
        beat: called before each forward, so that a long text does not count as a stall.
        whole: whether a sharded model is gathered for the whole block, so that ranks need not run the same forwards.
        check_stop: called before each forward if all ranks run the same; see `LoopState.check_stop`.
    """
    opened, base = run.opened, base_of(run.inner)
    together = ranks.world_size() == 1 or (opened.plugin.strategy.sharded and not whole)

    def before_forward() -> None:
        beat()
        if together:
            check_stop()

    with ExitStack() as stack:
        stack.enter_context(without_dropout(run.model))
        if opened.plugin.strategy.sharded:
            stack.enter_context(UnitStates(run.inner).generating(whole))
        else:
            # Accelerate wraps the whole model's forward in autocast, but peft's base is called directly.
            stack.enter_context(opened.accelerator.autocast())
        if opened.recipe.training.compile:
            # Each length would be compiled again.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(base.register_forward_pre_hook(lambda *_: before_forward()).remove)
        stack.callback(setattr, base, "generation_config", base.generation_config)
        # As `load_model` does: only our settings count.
        base.generation_config = GenerationConfig(**beginning(base))
        yield


def split_over_ranks(
    batches: list[B], work: Callable[[B], list[T]], tensor: int = 1, check_stop: Callable[[], None] = lambda: None
) -> list[list[T]]:
    """Returns the results of `work` for all batches in order, on every rank; each rank does its share. Collective.

    Args:
        tensor: the ranks of a tensor group, which work on the same batches together.
        check_stop: called by all ranks before each round.
    """
    found: dict[int, list[T]] = {}
    groups = max(1, ranks.world_size() // tensor)  # a plain loop on one process forms none
    for first in range(0, len(batches), groups):
        check_stop()
        number = first + ranks.rank() // tensor
        # In each round all ranks run the same units; a rank without a batch left repeats the last one.
        done = work(batches[min(number, len(batches) - 1)])
        if number < len(batches):
            found[number] = done
    of_all: dict[int, list[T]] = {}
    for of_rank in ranks.gather_objects(found):
        of_all |= of_rank
    return [of_all[number] for number in range(len(batches))]
