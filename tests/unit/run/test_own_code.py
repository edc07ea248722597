"""The user's own code of a run: what of it is shown and recorded, and when a run with other code is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import refusals
from transformers import LlamaConfig, LlamaForSequenceClassification

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.own_code import code_fact, identify_code, read_of
from toolkit.run.stages.part import require_same_reads

SOURCE = (
    "from pathlib import Path\n\nPath(__file__).with_suffix('.imported').touch()\n\n\ndef told(row):\n    return row\n"
)


def require_same_code(code: dict[str, str], before: dict[str, str] | None, warn: Callable[[str], None]) -> None:
    reads = [read_of(field, digest) for field, digest in code.items()]
    resumed = None if before is None else SimpleNamespace(step=8, digests=lambda: before)
    require_same_reads(SimpleNamespace(resumed=resumed, reads=reads), warn)  # type: ignore[arg-type]


def recipe_of(file: Path) -> Recipe:
    file.write_text(SOURCE if not file.exists() else file.read_text())
    return Recipe.load("quickstart", [f"data.map={file}:told"])


def test_a_resumed_run_has_the_code_that_it_began_with(tmp_path: Path) -> None:
    told: list[str] = []
    one = recipe_of(tmp_path / "one.py")
    code = identify_code(one)
    digest = hashlib.sha256(SOURCE.encode()).hexdigest()
    assert code == {"data.map": digest}
    assert code_fact(one, code) == f"data.map one.py:told (SHA-256 {digest[:16]})"
    assert code_fact(Recipe.load("quickstart"), {}) == ""
    require_same_code(code, code, told.append)
    require_same_code(code, None, told.append)
    assert told == []
    require_same_code(code, {}, told.append)
    assert told.pop() == f"data.map: the checkpoint of step 8 does not say what it was; now SHA-256 {digest}"
    with pytest.raises(BadInputError) as caught:
        require_same_code(code, {"data.map": "0" * 64}, told.append)
    assert str(caught.value) == (
        f"data.map: what it names has changed: SHA-256 {'0' * 64} ran up to step 8, and {digest} is there now; bring "
        "the first one back, or start anew with another training.output_dir"
    )
    before = {"training.extensions.A": "0" * 64, "extensions.B": "no source"}
    require_same_code({"training.extensions.A": "1" * 64}, before, told.append)
    assert told == [
        f"training.extensions.A: its source has changed since step 8: SHA-256 {'0' * 64}, and now {'1' * 64}"
    ]


def test_a_reward_model_is_among_what_a_run_reads(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.num_labels = 1
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
        (tmp_path / "judge/tokenizer.json").write_text("{}")
        rewards = f"[{{name: judge, model: {tmp_path}/judge}}]"
        recipe = Recipe.load("grpo", [f"objective.rewards={rewards}"])
        found.append(identify_code(recipe)["objective.rewards.judge"])
    for name in ("tokenizer.json", "vocab.txt", "tokenizer.model", "preprocessor_config.json", "README.md"):
        (tmp_path / "judge" / name).write_text("[]")
        found.append(identify_code(recipe)["objective.rewards.judge"])
    assert found[0] == found[1]
    assert found[-1] == found[-2]
    assert len(set(found)) == 6, "its weights, its tokenizer and its processor"
    with pytest.raises(BadInputError, match=r"objective\.rewards\.judge: what it names has changed"):
        require_same_code({"objective.rewards.judge": found[2]}, {"objective.rewards.judge": found[1]}, print)


def test_functions_that_reward_are_code_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def share(completion, row):\n    return 1.0\n")
    rewards = "objective.rewards=[{name: share, compare: 'mine.py:share'}, {name: e, match: e}]"
    recipe = Recipe.load("grpo", [rewards])
    digest = hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()
    assert identify_code(recipe) == {"objective.rewards.share": digest}


def test_a_file_of_code_that_is_not_there_is_found_without_running_any(tmp_path: Path) -> None:
    refused = refusals.toolkit("data", "quickstart", f"data.map={tmp_path}/none.py:told")
    assert refused.problems(f"data.map: there is no file '{tmp_path}/none.py'; correct the path") == []
