"""Suites of transformers and Accelerate: our backend fails nothing that the stock one passes, but for one table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from suites import HERE, outcomes, source_of
from support.cases import cases

SUITES: dict[str, Any] = cases(__file__)["SUITES"]
DIFFERS: dict[str, str] = cases(__file__)["DIFFERS"]
FAULTS = ("dropped_reduction", "stale_gather", "lost_accumulation")

pytestmark = pytest.mark.conformance


def run(suite: str, backend: str, fault: str = "", *options: str) -> dict[str, str]:
    """The outcome of each case of a suite."""
    package = SUITES[suite].get("package", suite)
    tests = [HERE / each[2:] if each[0] == "~" else source_of(package) / each for each in SUITES[suite]["tests"]]
    return outcomes(package, [*tests, *options], backend, fault, **SUITES[suite]["variables"])


@pytest.mark.parametrize("suite", [name for name in SUITES if "quick" in SUITES[name]])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_suite_fails_on_a_planted_fault(suite: str, fault: str) -> None:
    found = run(suite, SUITES[suite]["strategy"], fault, *SUITES[suite]["quick"])
    assert any("AssertionError" in each for each in found.values()), found


@pytest.mark.parametrize("suite", SUITES)
def test_ours_fails_nothing_that_the_stock_backend_passes(suite: str) -> None:
    stock, ours = run(suite, "stock"), run(suite, SUITES[suite]["strategy"])
    assert stock.keys() == ours.keys()
    assert {case for case in stock if stock[case].startswith("skipped")} == {
        case for case in ours if ours[case].startswith("skipped")
    }
    worse = {case: said for case, said in ours.items() if said and not stock[case]}
    without_reason = {
        case: said
        for case, said in worse.items()
        if not any(re.search(name, case) and says in said for name, says in DIFFERS.items())
    }
    assert not without_reason, "\n\n".join(f"{case}: {said}" for case, said in without_reason.items())
    passed = sum(not said and not stock[case] for case, said in ours.items())
    print(f"{suite}: {passed} of {len(ours)} pass on both backends, {len(worse)} differ by design")
    assert passed >= SUITES[suite]["passed"]
