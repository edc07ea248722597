"""The README's commands and every way to start a run, for real, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SHORT = [
    "training.max_steps=2",
    "training.eval_every_steps=null",
    "data.max_validation_samples=8",
    "logging.sample_prompt=null",
]


def environment(tmp_path: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_", "OMP_"))}
    return {**clean, "PATH": f"{BIN}:{clean['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}


def start(command: list[str], tmp_path: Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment(tmp_path), text=True, capture_output=True, timeout=seconds)


def readme_commands() -> list[str]:
    """The lines of the README's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("overrides", "fall"),
    [(["training.max_steps=60"], 0.85), pytest.param([], 0.6, marks=pytest.mark.slow)],
    ids=["60 steps", "whole"],
)
def test_the_readmes_first_command(overrides: list[str], fall: float, tmp_path: Path) -> None:
    first = readme_commands()[0]
    install, run = first.split(" && ")
    assert install == "pip install -e ."
    out = tmp_path / "run"
    done = start([*shlex.split(run), f"training.output_dir={out}", *overrides], tmp_path, seconds=800)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["split"] == "eval"]
    assert losses[-1] < fall * losses[0], losses
    assert f"{losses[0]:.4f} -> {losses[-1]:.4f}" in done.stderr
    assert "sample:" in done.stderr
    assert str(out) in done.stderr
    assert "model.layers.0..3" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    assert 1_700_000 < model.num_parameters() < 2_300_000
    encoded = tokenizer("ROSALIND.\n", return_tensors="pt", return_token_type_ids=False)
    assert model(**encoded).logits.shape[-1] == len(tokenizer)


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    second = readme_commands()[1]
    assert second == 'pip install -e ".[test]" && pytest'
    ci = (ROOT / ".ci/run").read_text()
    assert 'pip install --quiet -e ".[test]"' in ci
    assert ci.rstrip().endswith("pytest")


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        (["accelerate", "launch", "recipes/finetune.py"], 1),
        (["python", "recipes/finetune.py"], 1),
        (["torchrun", "--standalone", "--nproc_per_node", "2", "recipes/finetune.py"], 2),
        (
            [
                "accelerate",
                "launch",
                "--config_file",
                "accelerate_configs/cpu_2.yaml",
                "recipes/finetune.py",
                "--recipe",
                "recipes/quickstart.yaml",
            ],
            2,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_every_way_to_start(command: list[str], ranks: int, tmp_path: Path) -> None:
    done = start([*command, *SHORT, f"training.output_dir={tmp_path / 'run'}"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"ranks: {ranks} on" in done.stderr
    assert (tmp_path / "run/export/config.json").exists()


def test_a_resolved_recipe_gives_the_same_run(tmp_path: Path) -> None:
    command = ["python", "recipes/finetune.py"]
    assert start([*command, *SHORT, f"training.output_dir={tmp_path / 'a'}"], tmp_path).returncode == 0
    again = [*command, "--recipe", str(tmp_path / "a/recipe.yaml"), f"training.output_dir={tmp_path / 'b'}"]
    done = start(again, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    ]
    assert runs[0] == runs[1]


def test_bad_input_under_a_launcher(tmp_path: Path) -> None:
    """The ranks exit with 2; the launcher makes that 1 and adds its own words."""
    command = ["accelerate", "launch", "--config_file", "accelerate_configs/cpu_2.yaml", "recipes/finetune.py"]
    done = start([*command, "data.train=nowhere.jsonl", f"training.output_dir={tmp_path / 'run'}"], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: data.train: there is no file 'nowhere.jsonl'") == 1
    assert "exitcode  : 2" in done.stderr
    assert str(ROOT / "toolkit") not in done.stderr, "a traceback of ours"
    assert not (tmp_path / "run").exists()


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "recipes/finetune.ipynb", as_version=4)
    shortened = [cell for cell in notebook.cells if "training.max_steps=60" in cell.source]
    assert len(shortened) == 1
    source = shortened[0].source.replace("max_steps=60", "max_steps=6").replace("steps=20", "steps=3")
    shortened[0].source = source.replace(
        '"training.output_dir', '"data.max_validation_samples=8", "training.output_dir'
    )
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    records = (tmp_path / "outputs/notebook/metrics.jsonl").read_text().splitlines()
    assert len(records) == 6 + 3
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the loss plot"
    assert "2 on cpu" in (tmp_path / "outputs/notebook/report.html").read_text(), "two ranks trained together"
