"""Commands print their own words, and no warnings of libraries that a user can do nothing about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS
from support.texts import make_texts, write_rows
from support.tiny import save_llama
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[3]
TOLD_BY = ("torchao", "torch.utils._pytree", "torch.utils.cpp_extension", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn of missing kernels, enums and GPUs as they are imported."""

NOISE = re.compile(r"^[WIE]\d{4} |Failed to load|CUDA runtime|[A-Za-z]+Warning: |torchao|_pytree", re.MULTILINE)
"""A line of torch's own log, of torchao, or of `warnings`."""


def told(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_warnings_of_these_libraries_are_left_out_and_errors_are_not() -> None:
    code = (
        "import logging; from toolkit.cli.shared.console import prepare_process; prepare_process(); import torch\n"
        f"for name in {TOLD_BY}:\n"
        "    logging.getLogger(name + '.inner').warning('noise'); logging.getLogger(name).error('trouble')\n"
        "logging.getLogger('mine').warning('mine')"
    )
    lines = told("-c", code)
    assert (lines.count("noise"), lines.count("trouble"), lines.count("mine")) == (0, len(TOLD_BY), 1), lines


def test_a_program_of_ones_own_sees_all_but_what_they_say_of_this_machine() -> None:
    """In a loop of one's own and in a notebook, whose other warnings are the user's."""
    code = (
        "import logging, sys, toolkit, torchao, bitsandbytes\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm_4bit_forward from x')\n"
        f"for name in {TOLD_BY}:\n    logging.getLogger(name).warning('mine')"
    )
    lines = told("-c", code)
    assert lines.count("mine") == len(TOLD_BY)
    assert NOISE.findall(re.sub("W.*mine", "", lines)) == []


@pytest.mark.slow
def test_commands_print_none_of_the_words_of_libraries(tmp_path: Path) -> None:
    texts = make_texts(40)
    base = str(save_llama(tmp_path / "base", texts, tied=False))
    rows, adapter, recipe = (str(tmp_path / name) for name in ("rows.jsonl", "adapter", "mine.yaml"))
    write_rows(Path(rows), ({"text": text} for text in texts))
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    command = str(Path(sys.executable).with_name("toolkit"))
    for words in (
        [command, "init", base, rows, "--method", "lora", "--cpu", "2", "--to", recipe],
        [command, "plan", recipe, "--hardware", "cpu"],
        [command, "merge", adapter, "--to", str(tmp_path / "merged")],
        ["recipes/finetune.py", recipe, f"training.output_dir={tmp_path / 'run'}", "--dry-run"],
    ):
        lines = told(*words)
        assert NOISE.findall(lines) == [], words
    assert "LlamaForCausalLM" in lines
