import pytest
import torch
from torch import nn

from toolkit.model.structure.without_dropout import without_dropout


def _fails_midway(model: nn.Module) -> None:
    x = torch.ones(1, 4)
    with without_dropout(model):
        assert torch.equal(model(x), model(x))
        raise RuntimeError("midway")


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_before_after_an_error_too(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(training)
    with pytest.raises(RuntimeError, match="midway"):
        _fails_midway(model)
    assert [module.training for module in model.modules()] == [training] * 3
