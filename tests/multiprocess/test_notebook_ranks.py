"""`finetune(recipe, num_processes=2)`: ranks forked from this process give back their result or their error."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from support.ranks import alone, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama


def _let_rank_0_return_last() -> None:
    from toolkit.run import run

    first, finish = os.getpid(), run.finetune

    def late(*args: Any) -> Any:
        result = finish(*args)
        if os.getpid() != first and os.environ["RANK"] == "0":
            time.sleep(2)
        return result

    run.finetune = late


@alone
def runs(folder: Path) -> tuple[Any, str]:
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    sys.modules.pop("bitsandbytes", None)  # the launcher starts no ranks where it is imported, as servers of tests do
    values = recipe_values(folder / "model", folder / "texts.jsonl", folder / "run", folder / "cache", max_steps=2)
    values["export"] = {"enabled": False}
    _let_rank_0_return_last()
    result = finetune(Recipe.from_mapping(values), num_processes=2)
    values["data"]["train"] = str(folder / "none.jsonl")
    values["training"]["output_dir"] = str(folder / "other")
    try:
        finetune(Recipe.from_mapping(values), num_processes=2)
    except BadInputError as error:
        return result, str(error)
    return result, ""


def test_forked_ranks_give_back_their_result_or_their_error(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", make_texts(20), tied=True)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(20)))
    [(result, told)] = run_on_ranks(runs, 1, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert result.metrics == records
    assert [record["step"] for record in records] == [1, 2]
    assert result.output_dir == tmp_path / "run"
    assert told.startswith(f"data.train: there is no file {str(tmp_path / 'none.jsonl')!r}; correct the path")
    assert not (tmp_path / "other").exists()
