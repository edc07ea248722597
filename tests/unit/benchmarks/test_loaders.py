"""benchmarks/loaders.py says of an export what another loader makes of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

OURS = {"logits": [0.5, -2.0], "as_base": {"tokens": True, "conversation": True}}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (OURS, "equal"),
        ({**OURS, "logits": [0.5001, -2.0]}, "equal"),
        ({**OURS, "logits": [0.501, -2.0]}, "differs: logits by 5e-04"),
        ({**OURS, "logits": [float("nan"), -2.0]}, "differs: logits by nan"),
        ({**OURS, "as_base": {"tokens": False, "conversation": False}}, "differs: tokens, conversation"),
        ({"logits": None, "as_base": {"tokens": True}}, "equal"),
        ({"error": "ValueError: no such class"}, "ValueError: no such class"),
    ],
)
def test_an_answer_is_compared(found: dict[str, object], told: str) -> None:
    import loaders

    assert loaders.verdict(OURS, found) == told


def test_what_is_not_equal_is_listed_below_the_table() -> None:
    import loaders

    of = {"phi3: full": "equal", "qwen2: full": "KeyError: 1", "qwen2: added tokens": "KeyError: 1"}
    of |= {"qwen2: LoRA": "equal", "gemma: full": "equal", "phi3: base": "equal", "gemma: base": "ValueError: new"}
    found = loaders.as_text({"old": of})
    assert "| old | 1 of 2 |  | 1 of 1 |  | 0 of 1 |" in found
    assert found.rstrip().splitlines()[-2:] == [
        "- old, qwen2: full, added tokens: KeyError: 1",
        "- old does not read the base of gemma: ValueError: new",
    ]


@pytest.mark.slow
def test_another_rope_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export in the words of transformers 5 was for transformers 4: a model without its positions."""
    import loaders
    import loaders_child

    monkeypatch.setattr(loaders_child, "FAMILIES", {"llama 3": loaders_child.FAMILIES["llama 3"]})
    base, other = tmp_path / "llama 3", tmp_path / "other"
    loaders_child.make(tmp_path)
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    assert {"rope_theta", "rope_scaling"} & config.keys() or config.pop("rope_parameters")
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": None}))
    job = {"base": str(base), "adapter": False, "auto": "AutoModelForCausalLM"}
    whole, lost = (loaders_child.read({**job, "folder": str(folder)}) for folder in (base, other))
    assert loaders.verdict(whole, whole) == "equal"
    assert loaders.verdict(whole, lost).startswith("differs: logits by")
