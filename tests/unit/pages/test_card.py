"""The card of an export and its curve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
from PIL import Image
from support.texts import make_texts
from support.tiny import save_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from toolkit.pages.card import recipe_for_readers, render_card, write_card
from toolkit.pages.parts.run_metrics import Metrics
from toolkit.pages.run_page import RunSummary
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.trackers import config_of
from toolkit.run.shown.outcome import _how_to_use

HOSTILE = "a\u202eb\x1b[2Jc\x9b1m\u2066"
"""Codes that turn the direction of text, and those of a terminal."""

METRICS: list[dict[str, Any]] = [
    {"split": "eval", "step": 0, "loss": 5.0},
    {"split": "train", "step": 1, "loss": 4.5},
    {"split": "train", "step": 2, "loss": None},
    {"split": "train", "step": 3, "loss": 3.5},
    {"split": "eval", "step": 3, "loss": 3.25},
]


def of_run(metrics: Metrics, report: dict[str, Any] | None = None, name: str = "model", **more: Any) -> RunSummary:
    """A run with a fact and a version of this name."""
    return RunSummary("", "", metrics, report or {}, [], {name: name}, {name: name}, **more)


def test_the_card_is_written_with_its_curve(tmp_path: Path) -> None:
    write_card(tmp_path, Recipe.load("quickstart"), of_run(METRICS))
    assert "![Loss over the optimizer steps](curve.png)" in (tmp_path / "README.md").read_text()
    picture = np.asarray(Image.open(tmp_path / "curve.png"))
    assert picture.shape == (384, 840, 3)
    held_out = (np.abs(picture.astype(int) - (0xE0, 0x60, 0x2A)).sum(2) < 40).nonzero()
    # From 5 at the left and top edge, the largest, to 3.25, the least.
    assert [int(place.min()) for place in held_out] == pytest.approx([16, 70], abs=3)
    assert int(held_out[0][held_out[1] > 800].max()) == pytest.approx(384 - 46, abs=3)


def test_neither_paths_nor_keys_are_published(tmp_path: Path) -> None:
    """Every key that names files or folders has one of this machine, in the recipe, the card and the trackers."""
    secret, wrong = "a-key-of-a-tracker", {}
    for name, overrides in (
        ("grpo", ["objective.rewards=[{name: a, compare: IT/a.py:f}, {name: b, model: IT/b}]"]),
        ("quickstart", ["objective.loss=IT/l.py:f", "data.validation=IT/v", "data.train=[{path: IT/a}, IT/b.csv]"]),
        ("distill", ["objective.teacher=IT/t", "data.train=s3://bucketIT/a.jsonl"]),
    ):
        more = ["data.map=IT/m.py:f", "data.cache_dir=IT/c", "answers.file=IT/e.jsonl", "answers.compare=IT/s.py:f"]
        more += ["training.extensions=[IT/x.py:X]", "training.output_dir=IT/o", "checkpoint.resume=IT/r"]
        more += ["checkpoint.to=file://IT/store", "model.name_or_path=IT/base", "model.tokenizer=IT/t"]
        more += ["logging.trackers=[wandb]", f"logging.tracker_settings.wandb.api_key={secret}"]
        recipe = Recipe.load(name, [one.replace("IT", str(tmp_path)) for one in [*overrides, *more]])
        planned: Any = SimpleNamespace(room=1, peak_bytes=None)
        texts = [
            recipe_for_readers(recipe),
            render_card(recipe, of_run([], doubts=[f"passed over {tmp_path}/run/step_3: bad"])),
            str(config_of(recipe, planned, {})),
        ]
        wrong |= {(name, text): text for text in texts if str(tmp_path) in text or secret in text}
        assert "x.py:X" in texts[0], "names stay"
    assert not wrong


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_card_says_how_to_load_and_serve_it(
    is_adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_llama(tmp_path / "base", make_texts(5), tied=False)
    folder = base
    if is_adapter:
        folder = tmp_path / "adapter"
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    recipe = Recipe.load("quickstart", {"model.name_or_path": str(base)})
    write_card(folder, recipe, of_run(METRICS), *_how_to_use(folder, recipe, AutoConfig.from_pretrained(base)))
    text = (folder / "README.md").read_text()
    assert str(tmp_path) not in text
    assert ("```bash\nvllm serve .\n```" in text) == (not is_adapter), "the base is a folder that others do not have"
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(folder)
    if is_adapter:
        (folder / "base").symlink_to(base)  # the program names it
    loaded: dict[str, Any] = {}
    exec(code, loaded)
    assert "generated_text" in capsys.readouterr().out
    assert loaded["model"].get_input_embeddings().weight.shape[0] == len(loaded["tokenizer"])
    assert isinstance(loaded["model"], peft.PeftModel) == is_adapter
    if is_adapter:
        told = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": "org/base"}))
    named = Recipe.load("quickstart", {"model.name_or_path": "org/base", "export.push_to_hub": "me/mine"})
    loading, serving = _how_to_use(folder, named, AutoConfig.from_pretrained(base))
    assert 'from_pretrained("me/mine")' in loading
    assert ('from_pretrained("org/base")' in loading) == is_adapter
    expected = "vllm serve org/base --tokenizer me/mine --enable-lora --lora-modules tuned=me/mine"
    assert serving == (expected if is_adapter else "vllm serve me/mine")


def test_the_card_says_what_a_base_needs_that_its_own_files_do_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The classes of a classifier, whose adapter has no names for them, and the commit and the code of a base."""
    base, folder = save_llama(tmp_path / "base", make_texts(5), tied=False), tmp_path / "adapter"
    labels = {"id2label": {0: "no", 1: "it's ```", 2: "yes"}, "pad_token_id": 1}
    model = AutoModelForSequenceClassification.from_pretrained(base, **labels)
    model.config.architectures = [type(model).__name__]
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    own = {"model.config": None, "model.train_tokenizer_vocab_size": None, "model.name_or_path": "org/base"}
    classes = {"objective.kind": "sequence_classification", "data.chat_template": None, "logging.held_out_samples": 0}
    recipe = Recipe.load("quickstart", own | classes)
    code = _how_to_use(folder, recipe, model.config)[0].replace('"org/base"', "BASE")
    assert "```" not in code
    monkeypatch.chdir(folder)
    loaded: dict[str, Any] = {"BASE": str(base)}
    exec(code, loaded)
    assert re.search(r"'label': ['\"](no|it's ```|yes)['\"], 'score': 0\.", capsys.readouterr().out)
    found = loaded["model"].config
    assert {name: getattr(found, name) for name in labels} == labels
    pinned = Recipe.load("quickstart", {**own, "model.revision": "v2", "model.trust_remote_code": True})
    code, _ = _how_to_use(folder, pinned, AutoConfig.from_pretrained(base))
    assert "AutoModelForCausalLM.from_pretrained(\"org/base\", revision='v2', trust_remote_code=True)" in code


def test_no_code_of_a_terminal_or_of_the_direction_of_text_gets_into_a_card(tmp_path: Path) -> None:
    """A model or a data set from anywhere may have it in names, rows and facts; many read cards in a terminal."""
    named = {"model": {"name_or_path": HOSTILE}, "data": {"train": f"{HOSTILE}.jsonl", "max_length": 8}}
    values = {**named, "optimizer": {"learning_rate": 1e-3}, "training": {"max_steps": 1, "output_dir": HOSTILE}}
    recipe = Recipe.from_mapping({**values, "description": HOSTILE})
    source = {"source": HOSTILE, "kept": 1}
    counts = {"kept": 1, "tokens": 3, "dropped": {HOSTILE: {"count": 1}}, "sources": [source], "noted": {}}
    write_card(tmp_path, recipe, of_run(METRICS, {"train": counts}, HOSTILE, doubts=[HOSTILE], limits=[HOSTILE]))
    text = (tmp_path / "README.md").read_text()
    assert text.count("b\u241b") > 6, "what is written in their place"
    codes = [code for code in text if (code < " " and code != "\n") or "\x7f" <= code <= "\x9f"]
    assert codes + [code for code in text if code in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"] == []
