"""Forwards without dropout, whose masks would make any two of them differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, and back into its own mode at the end, after an error too.

    The mode belongs to the whole process: no other thread may run the model meanwhile.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
