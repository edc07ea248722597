"""Units of every type of transformers that reads images or sound, on the meta device: no list of blocks in the root."""

from __future__ import annotations

import pytest
from support.cases import cases
from support.every_multimodal import UNTRIED, WITHOUT_SIZES, multimodal_kinds, on_meta
from torch import nn

from toolkit.sharding.plan import units
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units

IN_THE_ROOT: dict[str, list[str]] = cases(__file__)["IN_THE_ROOT"]
"""By type the lists that may be gathered with the root, by the ends of their paths."""


def lists_in_the_root(model: nn.Module, plan: UnitPlan) -> list[str]:
    """Paths of the outermost lists of two or more modules of one class with parameters, of which one is in no unit."""
    in_units = [path for unit in plan.units if unit.kind != "root" for path in unit.modules]
    found: list[str] = []
    for path, module in model.named_modules():
        children = list(module.children())
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(children) > 1
            and len({type(child) for child in children}) == 1
            and all(list(child.children()) for child in children)  # more than a layer each
            and any(True for _ in module.parameters())
            and not all(_is_in(f"{path}.{name}", in_units) for name, _ in module.named_children())
            and not _is_in(path, found)
        ):
            found.append(path)
    return found


def _is_in(path: str, outer: list[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in outer)


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.grid)], ids=["small", "default"])
def test_no_list_of_blocks_is_in_the_root_but_those_that_are_known(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:  # whose elements then count as the large ones that they stand for
        monkeypatch.setattr(units, "LARGE", 0)
    left_out = UNTRIED.keys() | (set() if small else WITHOUT_SIZES)
    unexpected: list[str] = []
    for kind in set(multimodal_kinds()) - left_out:
        model = on_meta(kind, small=small)
        found = lists_in_the_root(model, plan_units(model))
        unexpected += [f"{kind}: {path}" for path in found if not path.endswith(tuple(IN_THE_ROOT.get(kind, ())))]
    assert not unexpected


def test_a_list_in_the_root_is_found() -> None:
    model = on_meta("llava", small=True)
    plan = plan_units(model)
    without_towers = UnitPlan(tuple(unit for unit in plan.units if "vision" not in unit.name))
    assert lists_in_the_root(model, plan) == []
    assert lists_in_the_root(model, without_towers) == ["model.vision_tower.encoder.layers"]
