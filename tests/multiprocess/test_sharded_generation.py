"""`toolkit generate` on two ranks that share a model writes, token for token, what one process writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.launches import clean_environment
from support.ranks import run_on_ranks
from support.unsure import save_unsure
from transformers import AutoModelForCausalLM

from toolkit.generation.text.command import evaluated, run
from toolkit.generation.text.load import Loaded, load_model
from toolkit.generation.text.options import Options
from toolkit.generation.text.rows import read_rows
from toolkit.generation.text.sharded import device_bytes, sharded_model
from toolkit.sharding.plan.units import plan_units

SOURCES = ("model", "adapter")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.3, "seed": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter on it that changes what it writes, prompts, and rows with choices."""
    folder = tmp_path_factory.mktemp("shared")
    save_unsure(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder / "adapter")
    rows = [
        {"prompt": "Who", "choices": [" goes there?", " is it?", " am I?"], "answer": number} for number in (0, 1, 2)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options(folder: Path, source: str, how: str, output: Path) -> Options:
    prompts = folder / "questions.jsonl"
    return Options(
        str(folder / source),
        file=prompts,
        output=output,
        max_new_tokens=12,
        batch_size=3,
        device="cpu",
        **SAMPLING[how],
    )


def choose(folder: Path, source: str, loaded: Loaded) -> dict[str, Any]:
    asked = Options(str(folder / source), evaluation=folder / "choices.jsonl", raw=True)
    return evaluated(loaded, asked, read_rows(folder / "choices.jsonl", "--eval", True, False)).to_dict()


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Writes all completions. Returns what is chosen, and the share of the model's numbers that a rank holds."""
    found: dict[str, Any] = {}
    for source in SOURCES:
        for how in SAMPLING:
            run(options(folder, source, how, folder / f"two-{source}-{how}.jsonl"))
        with sharded_model(str(folder / source), "auto", "cpu") as loaded:
            found[source] = choose(folder, source, loaded)
            blocks = [one for name, one in loaded.model.named_parameters() if ".layers." in name]
            held = sum(parameter.to_local().numel() for parameter in blocks)
            found[f"{source} held"] = held / sum(parameter.numel() for parameter in blocks)
    return found


def test_two_ranks_write_what_one_process_writes(folder: Path) -> None:
    first, second = run_on_ranks(on_two_ranks, 2, folder)
    written = set()
    for source in SOURCES:
        assert first[source] == second[source] == choose(folder, source, load_model(str(folder / source), device="cpu"))
        assert 0.4 < first[f"{source} held"] < 0.6
        for how in SAMPLING:
            run(options(folder, source, how, folder / "one.jsonl"))
            alone = (folder / "one.jsonl").read_text()
            assert (folder / f"two-{source}-{how}.jsonl").read_text() == alone
            written.add(alone)
    assert len(written) == len(SOURCES) * len(SAMPLING)


def test_a_conversation_on_two_ranks(folder: Path) -> None:
    """By the command. Only rank 0 reads and writes."""
    command = [sys.executable, "-m", "toolkit", "generate", str(folder / "model"), "--chat", "--temperature", "0"]
    lines = "Who goes there?\n/reset\nAnd now?\n/quit\n"
    answers = []
    for where in (["--device", "cpu"], ["--cpu", "2"]):
        asked = [*command, "--max-new-tokens", "8", *where]
        done = subprocess.run(asked, input=lines, capture_output=True, text=True, env=clean_environment())
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    assert answers[0].strip()


def test_what_each_rank_needs_is_planned(folder: Path) -> None:
    """Its share of all, the root, and two gathered blocks; the numbers from the shapes."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    units = plan_units(model)
    root = sum(unit.num_bytes for unit in units.units if unit.kind == "root")
    largest = max(block, *(unit.num_bytes for unit in units.units if unit.kind not in ("block", "root")))
    assert device_bytes(units, 4) == whole // 4 + root + 2 * largest
