"""Lets the model of a run write text as it is trained: sharded, in its precision, with the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import GenerationConfig

from toolkit import ranks
from toolkit.generation.text.load import Loaded, beginning, positions_of, stop_tokens
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.sharding.fsdp2.unit_states import UnitStates


def loaded_of(
    opened: OpenedRun, run: PreparedRun, if_too_large: str, never_written: frozenset[int] = frozenset()
) -> Loaded:
    """Returns the run's model as one that generates text inside `generating`.

    Args:
        if_too_large, never_written: see `Loaded`.
    """
    base = base_of(run.inner)
    return Loaded(
        opened.recipe.model.name_or_path or "the model",
        base,
        run.tokenizer,
        stop_tokens(base, run.tokenizer),
        positions_of(base),
        opened.recipe.objective.spec.encoder_decoder,
        collective=opened.plugin.strategy.sharded and ranks.world_size() > 1,
        if_too_large=if_too_large,
        never_written=never_written,
    )


@contextmanager
def generating(opened: OpenedRun, run: PreparedRun, beat: Callable[[], None]) -> Iterator[None]:
    """Lets the model generate as an export does, inside the `with` block. Collective.

    Args:
        beat: called before each forward, so that a long text does not count as a stall.
    """
    base = base_of(run.inner)
    with ExitStack() as stack:
        stack.enter_context(without_dropout(run.model))
        if opened.plugin.strategy.sharded:
            stack.enter_context(UnitStates(run.inner).generating())
        else:
            # Accelerate wraps the whole model's forward in autocast, but peft's base is called directly.
            stack.enter_context(opened.accelerator.autocast())
        if opened.recipe.training.compile:
            # Each length would be compiled again.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(base.register_forward_pre_hook(lambda *_: beat()).remove)
        stack.callback(setattr, base, "generation_config", base.generation_config)
        # As `load_model` does: only our settings count.
        base.generation_config = GenerationConfig(**beginning(base))
        yield
