"""The wheel has what the package reads at run time: templates, tables and recipes."""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_every_file_of_the_package_and_the_recipes() -> None:
    listed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "toolkit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "toolkit/pages/templates/run.html.jinja" in package
    assert package - listed == set()
    forced = WheelBuilder(str(ROOT)).config.get_force_include()
    assert set(forced.values()) >= {"toolkit/_recipes", "toolkit/_accelerate_configs"}
