"""A run that dies in a step, without a chance to tidy up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from toolkit.training.trainer import Trainer


class CutError(Exception):
    """Power is gone."""


@contextmanager
def cut_in_step(step: int, error: Exception | None = None) -> Iterator[None]:
    """The run that is started inside dies in the last micro-batch of a step; the error goes no further."""
    train_step, error = Trainer.train_step, error or CutError()

    def dying(trainer: Any, window: Any) -> Any:
        if trainer.global_step != step - 1:
            return train_step(trainer, window)
        calls, sums = itertools.count(1), trainer.objective.training_sums

        def last(*given: Any) -> Any:
            if next(calls) == len(window):
                raise error
            return sums(*given)

        with patch.object(trainer.objective, "training_sums", last):
            return train_step(trainer, window)

    with patch.object(Trainer, "train_step", dying), pytest.raises(type(error)):
        yield
