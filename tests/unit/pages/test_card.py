"""The card of an export and its curve."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from support.plain_objectives import OBJECTIVES
from support.sights import save_seeing
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, save_llama
from transformers import AutoConfig

from toolkit.pages.card import recipe_for_readers, render_card, write_card
from toolkit.pages.parts.run_metrics import Metrics
from toolkit.pages.run_page import RunSummary
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.trackers import config_of
from toolkit.run.shown.outcome import _how_to_use

HOSTILE = "a\u202eb\x1b[2Jc\x9b1m\u2066\u2028d\x1ee\x85f"
"""Codes that turn the direction of text, those of a terminal, and what `str.splitlines` takes for the end of a line."""

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
        more += ["logging.trackers=[wandb]", f"logging.tracker_settings.wandb.notes={secret}"]
        more += [f"data.template_arguments.api_key={secret}"]
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


NAMES = {0: "no", 1: "it's ```", 2: "yes"}
USED: dict[str, tuple[dict[str, Any], str]] = {
    "causal_lm": ({}, "generated_text"),
    "seeing": ({}, "generated_text"),
    "blind": ({}, r"^\["),
    "seq2seq": ({}, r"^\["),
    "sequence_classification": ({"id2label": NAMES}, r"'label': ['\"](no|it's ```|yes)['\"], 'score': 0\."),
    "token_classification": ({"id2label": NAMES}, "'entity': "),
    "reward": ({"id2label": {0: "reward"}, "problem_type": "regression"}, r"'label': 'reward', 'score': 0\.0\b"),
}
"""Objective, or kind of model -> what its configuration has, and what its program prints."""


def saved(kind: str, folder: Path, whole: bool = True) -> Any:
    """A small model with its tokenizer or processor in a folder, without its head if it isn't `whole`."""
    _, auto, _, _ = OBJECTIVES.get(kind, ("", "AutoModelForImageTextToText", "", {}))
    save = functools.partial(save_llama, tied=False) if kind in OBJECTIVES else functools.partial(save_seeing, "llava")
    save(folder=folder, texts=make_texts(5))
    config = AutoConfig.from_pretrained(folder, **USED[kind][0], pad_token_id=1)
    if kind == "seq2seq":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        config = AutoConfig.for_model("t5", vocab_size=VOCAB_SIZE, decoder_start_token_id=0, **sizes)
    model = getattr(transformers, auto).from_config(config)
    if kind == "reward":
        torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    if whole or kind == "seq2seq":
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize("kind", USED)
def test_the_program_of_a_card_runs_as_it_stands(
    kind: str, is_adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, printed = USED[kind]
    objective = kind if kind in OBJECTIVES else "causal_lm"
    folder, model = tmp_path / "export", saved(kind, tmp_path / "export", not is_adapter)
    if is_adapter:
        folder.rename(tmp_path / "base")
        target = "q" if kind == "seq2seq" else "q_proj"
        peft.get_peft_model(
            model, peft.LoraConfig(task_type=OBJECTIVES[objective][2], target_modules=[target])
        ).save_pretrained(folder)
        for file in (tmp_path / "base").iterdir():
            if not file.name.startswith(("model", "config")):
                shutil.copy(file, folder)
        (folder / "base").symlink_to(tmp_path / "base")  # the program names it
    if kind == "blind":
        (folder / "chat_template.jinja").unlink()
    values = {"model.config": None, "model.train_tokenizer_vocab_size": None, "objective.kind": objective}
    plain = {"data.chat_template": None, "logging.held_out_samples": 0, "model.name_or_path": str(tmp_path / "base")}
    recipe = Recipe.load("quickstart", values | plain)
    write_card(folder, recipe, of_run(METRICS), *_how_to_use(folder, recipe, model.config))
    text = (folder / "README.md").read_text()
    assert str(tmp_path) not in text
    is_served = kind in ("causal_lm", "seeing", "blind") and not is_adapter  # nobody else has the base
    assert ("```bash\nvllm serve .\n```" in text) == is_served
    monkeypatch.chdir(folder)
    loaded: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], loaded)
    assert re.search(printed, capsys.readouterr().out)
    assert isinstance(loaded["model"], peft.PeftModel) == is_adapter
    assert {name: getattr(loaded["model"].config, name) for name in own} == own


def test_the_card_names_the_base_its_commit_and_how_to_serve_it(tmp_path: Path) -> None:
    config = saved("causal_lm", tmp_path).config
    named = Recipe.load("quickstart", {"model.name_or_path": "org/base", "export.push_to_hub": "me/mine"})
    loading, serving = _how_to_use(tmp_path, named, config)
    assert ('AutoModelForCausalLM.from_pretrained("me/mine")' in loading, serving) == (True, "vllm serve me/mine")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    loading, serving = _how_to_use(tmp_path, named, config)
    assert 'AutoModelForCausalLM.from_pretrained("org/base")' in loading
    assert serving.startswith("vllm serve org/base --tokenizer me/mine --generation-config me/mine --enable-lora ")
    own = {"model.name_or_path": "org/base", "model.revision": "v2", "model.trust_remote_code": True}
    code, _ = _how_to_use(tmp_path, Recipe.load("quickstart", own), config)
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
    assert text.splitlines() == text.rstrip("\n").split("\n")
    codes = [code for code in text if (code < " " and code != "\n") or "\x7f" <= code <= "\x9f"]
    assert codes + [code for code in text if code in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"] == []
