"""A limit on the size of files, or a full disk, while an export is written: a sentence, and no export."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama

from toolkit import Recipe, finetune
from toolkit.checkpoint.consolidate import export_run
from toolkit.errors import ExportError


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As `ulimit -f` does. Python ignores the signal, so that writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_an_export_that_cannot_be_written_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    """At each file that is too large: the weights, the tokenizer (whose library raises Exception), any other."""
    texts = make_texts(60)
    base = save_llama(tmp_path / "base", texts, tied=True)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in texts))
    for name, adapter in (("full", {}), ("lora", {"kind": "lora", "r": 1, "target_modules": ["q_proj"]})):
        run = tmp_path / name
        values = recipe_values(base, tmp_path / "rows.jsonl", run, tmp_path / "cache", max_steps=1)
        finetune(Recipe.from_mapping({**values, "checkpoint": {"every_steps": 1}, "adapter": adapter}))
        export_run(run, tmp_path / f"{name}-whole")
        sizes = {path.name: path.stat().st_size for path in (tmp_path / f"{name}-whole").iterdir()}
        for size in {500, 3000, sizes["tokenizer.json"] - 1, max(sizes.values()) - 1}:
            with (
                files_of_at_most(size),
                pytest.raises(ExportError, match=r"File too large.*ulimit -f.*export it again"),
            ):
                export_run(run, tmp_path / "again")
            assert not [path for path in tmp_path.iterdir() if "again" in path.name], (name, size)
