"""toolkit.training.trainer: nothing is collected between the steps at which it is due; all is as before afterwards."""

from __future__ import annotations

import gc

import pytest

from toolkit.training.trainer import EVERY_STEPS, collect_at, collected_by_step


def test_collection_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), collected_by_step():  # noqa: PT012
        assert not gc.isenabled()
        collected: list[int] = []
        monkeypatch.setattr(gc, "collect", collected.append)
        for step in range(1, 2 * EVERY_STEPS + 2):
            collect_at(step)
        assert collected == [1, 1]
        raise KeyError
    assert gc.isenabled()
