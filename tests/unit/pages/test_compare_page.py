"""The page of runs beside each other: in each chart a curve for each run, in its colour, and nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.html_page import HOSTILE, Page
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.compare.compare_page import COLORS, render_comparison
from toolkit.compare.compared import ComparedRun
from toolkit.errors import BadInputError


def run(name: str, losses: list[float], **changes: Any) -> ComparedRun:
    train = [
        {"split": "train", "step": step, "loss": loss, "learning_rate": 0.001, "tokens_per_second": 10.0}
        for step, loss in enumerate(losses, 1)
    ]
    evals = [{"split": "eval", "step": step, "loss": 2.0, "answer_accuracy": 0.5} for step in (0, len(losses))]
    return ComparedRun(name, f"/runs/{name}", "finished", **{"metrics": [*train, *evals], **changes})


def charts(text: str) -> dict[str, dict[str, Any]]:
    """What the script draws each chart from, by its title."""
    found = [json.loads(value) for _, name, value in Page(text).attributes if name == "data-curves"]
    return {data["title"]: data for data in found}


def test_each_chart_has_a_curve_for_each_run_in_its_own_colour() -> None:
    runs = [run("first", [3.0, 2.0, 1.0]), run("second", [4.0, 3.5])]
    found = charts(render_comparison(runs, 0.0))
    assert list(found) == ["Training loss", "Held-out loss", "Learning rate", "Answers right", "Tokens per second"]
    for data in found.values():
        assert [(curve["name"], curve["color"]) for curve in data["curves"]] == [
            ("first", "chart-1"),
            ("second", "chart-2"),
        ]
        assert data["x"] == [0, 3], "a step is at the same place in each chart, for all runs"
    loss = found["Training loss"]["curves"]
    assert [curve["values"] for curve in loss] == [[3.0, 2.0, 1.0], [4.0, 3.5]]
    assert [list(accumulate(curve["steps"])) for curve in loss] == [[1, 2, 3], [1, 2]]
    assert list(accumulate(found["Held-out loss"]["curves"][0]["steps"])) == [0, 3]


def test_of_a_smooth_pair_one_has_the_name() -> None:
    runs = [run("first", [3.0] * 40), run("second", [2.0] * 40)]
    text = render_comparison(runs, 0.0)
    curves = charts(text)["Training loss"]["curves"]
    assert [(curve["name"], curve["level"]) for curve in curves[:4]] == [
        ("", None),
        ("first", "middle"),
        ("first", "light"),
        ("first", "strong"),
    ]
    legend = text.partition('id="chart-training-loss"')[2].partition("<svg")[0]
    assert re.findall(r"</i>([^<]+)</li>", legend) == ["first", "second"]


def test_tables_and_problems_stand_on_the_page() -> None:
    runs = [
        run("first", [3.0], recipe={"optimizer.learning_rate": 0.001, "model.name_or_path": HOSTILE}),
        run("second", [2.0], recipe={"optimizer.learning_rate": 0.002}, problems=[f"it is {HOSTILE}"]),
        ComparedRun(HOSTILE, "/runs/third", "unfinished"),
    ]
    text = render_comparison(runs, 0.0)
    page = Page(text)
    assert HOSTILE not in text
    assert page.elements["script"] == 1
    assert page.text_of["problems"].strip() == f"Check these runs.second: it is {HOSTILE}"
    assert "optimizer.learning_rate0.0010.002" in page.text_of["differences"]
    assert "held-out loss, best2.0000 at step 02.0000 at step 0" in page.text_of["results"]


def test_nothing_comes_from_outside_and_every_colour_has_a_light_and_a_dark_one() -> None:
    runs = [run(f"run {number}", [3.0 - number / 10] * 12) for number in range(10)]
    text = render_comparison(runs, 0.0)
    assert "//" not in text
    assert re.findall(r"url\((?!#)", text) == []
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r'script-src ([^"]*)"', text) == [f"'sha256-{digest}'"]
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    for variable in COLORS:
        assert f"stroke: var(--{variable})" in text
        assert f"--{variable}:" in light
        assert f"--{variable}:" in dark
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    ids = [value for _, name, value in Page(text).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_without_a_step_there_are_tables_alone() -> None:
    text = render_comparison([ComparedRun("a", "/a", "unfinished"), ComparedRun("b", "/b", "unfinished")], 0.0)
    assert "No steps were logged" in text
    assert "script" not in text


def test_the_command_writes_a_new_page_and_no_other(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"split": "train", "step": 1, "loss": 1.0}\n')
    runs = [str(tmp_path / name) for name in ("first", "second")]

    def compare(*options: str) -> Any:
        return CliRunner().invoke(app, ["compare", *runs, *options])

    page = tmp_path / "new/page.html"
    assert compare("--to", str(page)).stdout.splitlines()[-1] == f"page: {page}"
    assert "first, second" in page.read_text()
    json.loads(compare("--json", "--to", str(tmp_path / "beside.html")).stdout)
    assert (tmp_path / "beside.html").is_file()
    (tmp_path / "file").write_text("")
    for to, told in (
        (page, "exists"),
        (tmp_path / "page", ".html"),
        (tmp_path / "file/a.html", "cannot be written"),
    ):
        result = compare("--to", str(to))
        assert isinstance(result.exception, BadInputError), to
        assert told in str(result.exception)


@pytest.mark.parametrize("values", [[1.0], [1.0] * 11, [float("nan")] * 11, [1e300, -1e300] * 6, [0.0] * 20])
def test_odd_values_are_drawn_or_left_out(values: list[float]) -> None:
    render_comparison([run("a", values), run("b", [1.0])], 0.0)
