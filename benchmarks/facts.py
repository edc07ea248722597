"""What every benchmark tells beside its figures: date, machine and versions; lines of JSON and a table."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from toolkit.ranks import usable_cores

PACKAGES = ("torch", "accelerate", "transformers")


def facts(*others: str) -> dict[str, Any]:
    """Date, machine, and the versions of what is installed of `PACKAGES` and `others`."""
    versions = {}
    for package in (*PACKAGES, *others):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "versions": versions}


def machine() -> str:
    """The processor and its cores that this process may use, and the GPU, if any."""
    words = [platform.machine(), f"{usable_cores()} cores"]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        words[0] = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    import torch

    if torch.cuda.is_available():
        words.append(torch.cuda.get_device_name())
    return ", ".join(words)


def tell(record: Mapping[str, Any], output: Path | None) -> None:
    """Prints a record as a line of JSON; adds it to the file, if there is one."""
    line = json.dumps(record)
    print(line, flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table; the first column is words, the others are figures. Floats get four digits that count."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_words(value) for value in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


def _words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
