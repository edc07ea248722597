"""Commands print their own words, and no warnings of libraries that a user can do nothing about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS

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
def test_a_command_that_imports_them_prints_none_of_their_words(tmp_path: Path) -> None:
    output = f"training.output_dir={tmp_path / 'run'}"
    lines = told("recipes/finetune.py", "quickstart", output, "data.max_validation_samples=8", "--dry-run")
    assert "LlamaForCausalLM" in lines
    assert NOISE.findall(lines) == []
