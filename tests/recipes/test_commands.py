"""The README's commands and every way to start a run, for real, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS, alone, run_on_ranks
from support.runs import losses_of, records_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SHORT = [
    "training.max_steps=2",
    "training.eval_every_steps=null",
    "data.max_validation_samples=8",
    "logging.held_out_samples=0",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first run keeps its tokens; the others find them there."""
    return tmp_path_factory.mktemp("cache")


def environment(cache: Path) -> dict[str, str]:
    return clean_environment(PATH=f"{BIN}:{os.environ['PATH']}", XDG_CACHE_HOME=str(cache))


def start(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(cache), text=True, capture_output=True, timeout=LIMIT_SECONDS
    )


def readme_commands() -> list[str]:
    """The lines of the README's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("overrides", "fall"),
    [
        pytest.param(["training.max_steps=12", "data.max_validation_samples=16"], 0.95, marks=pytest.mark.first),
        pytest.param([], 0.6, marks=pytest.mark.grid),
    ],
    ids=["12 steps", "whole"],
)
def test_the_readmes_first_command(overrides: list[str], fall: float, tmp_path: Path, cache: Path) -> None:
    first, second = readme_commands()[:2]
    (*_, install, run), (_, score) = first.split(" && "), second.split(" && ")
    assert install == "pip install -e ."
    out = tmp_path / "run"
    done = start([*shlex.split(run), f"training.output_dir={out}", *overrides], cache)
    assert done.returncode == 0, done.stderr[-3000:]
    records = records_of(out)
    losses = losses_of(records, "eval")
    require_as_planned(out)
    assert losses[-1] < fall * losses[0], losses
    assert f"{losses[0]:.4f} -> {losses[-1]:.4f}" in done.stderr
    shown = re.findall(r"^(.+)\n  before: (.*)\n  after: (.*)\n(  in the data: )?", done.stderr, re.MULTILINE)
    assert [prompt for prompt, *_ in shown][1] == "Set an alarm for five in the morning on Thursday."
    assert len(shown) == 3
    assert f"run: {out}" in done.stdout.splitlines(), "what programs read"
    assert "ranks: 2 on" in done.stderr
    assert not re.search("torchao|_pytree", done.stderr), "what is installed beside says nothing"
    assert "model.layers.0..1" in done.stderr
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    assert 900_000 < model.num_parameters() < 1_000_000
    encoded = tokenizer("Set an alarm.", return_tensors="pt", return_token_type_ids=False)
    assert model(**encoded).logits.shape[-1] == len(tokenizer)
    if not overrides:
        assert not any(in_data for *_, in_data in shown), "each as in the data"
        counted = start(
            shlex.split(score.replace("outputs/quickstart", str(out)).replace(" data/", " recipes/data/")), cache
        )
        assert "100 of 100" in counted.stderr + counted.stdout


@pytest.mark.first
def test_the_readmes_test_command_is_what_ci_runs() -> None:
    installing, testing = readme_commands()[-1].split(" && ")
    assert installing == 'pip install -e ".[test,docs]"'
    ci = (ROOT / ".ci/run").read_text()
    assert 'pip install --quiet --no-compile "${constraints[@]}" -e ".[test,docs]"' in ci
    assert "constraints=(--constraint .ci/constraints.txt)" in ci
    assert testing.startswith("pytest ")
    others = '  if [ "${1:-}" != newest ]; then suites_of_others; fi'
    rest = [f"  {testing} -m control", "else", f"  {testing} -m slow", others, "fi"]
    assert ci.rstrip().splitlines()[-5:] == rest, "the rest at the end"
    assert f'\n{testing}\nwait "$checked"\n' in ci
    assert "set -euo pipefail" in ci


TWO_RANKS = ["torchrun", "--standalone", "--nproc_per_node", "2", "recipes/finetune.py"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The output folder of a run of one rank, started by the script itself."""
    out = tmp_path_factory.mktemp("ways") / "python"
    done = start(["python", "recipes/finetune.py", *SHORT, f"training.output_dir={out}"], cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ranks: 1 on" in done.stderr
    return out


def test_torchrun_starts_two_ranks(tmp_path: Path, cache: Path) -> None:
    recipe = ["--recipe", "recipes/quickstart.yaml", "data.max_length=512"]
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    larger = [f"model.config.{name}={size}" for name, size in sizes.items()]
    done = start([*TWO_RANKS, *recipe, *larger, *SHORT, f"training.output_dir={tmp_path / 'run'}"], cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ranks: 2 on" in done.stderr
    assert (tmp_path / "run/export/config.json").exists()
    require_as_planned(tmp_path / "run")


def require_as_planned(run: Path) -> None:
    """The peak of a CPU rank's whole process, Python and its libraries included, is within a tenth of the plan's."""
    records = records_of(run)
    peaks = [(record["planned_peak_bytes"], record["peak_host_bytes"]) for record in records if "mfu" in record]
    assert peaks[0][0] == pytest.approx(max(taken for _, taken in peaks), rel=0.1)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@alone
def finetune_by_command(arguments: list[str], environment: dict[str, str]) -> int:
    from toolkit.cli.ranks.finetune import finetune_command

    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # no launcher has been here
        del os.environ[key]
    os.environ.update(environment)
    os.chdir(ROOT)
    return finetune_command(arguments)


def test_a_resolved_recipe_gives_the_same_run(tmp_path: Path, one_rank: Path, cache: Path) -> None:
    assert (one_rank / "export/config.json").exists()
    arguments = ["--recipe", str(one_rank / "recipe.yaml"), f"training.output_dir={tmp_path / 'again'}"]
    assert run_on_ranks(finetune_by_command, 1, arguments, environment(cache)) == [0]
    assert losses(tmp_path / "again") == losses(one_rank)


def test_bad_input_under_toolkit_train(tmp_path: Path, cache: Path) -> None:
    """One paragraph after the line that is launched, and the ranks' own exit code."""
    out = f"training.output_dir={tmp_path / 'run'}"
    done = start(["toolkit", "train", "quickstart", "data.columns.messages=nothing", out, "--cpu", "2"], cache)
    assert done.returncode == 2, done.stderr
    reading, launched, *rest = [line for line in done.stderr.splitlines() if "torch" not in line]
    assert reading == "reading the recipe ..."
    assert launched.startswith("ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/cpu_2.yaml")
    assert rest == [
        "error: data.train: 'requests.jsonl' has no column 'nothing' (data.columns.messages); it has messages"
    ]


SHORT_NOTEBOOK = """        "training.max_steps": 6,
        "training.eval_every_steps": 3,
        "data.max_validation_samples": 8,
        "logging.held_out_samples": 1,
"""
LOSING_THE_MACHINE = """
import os, signal
from toolkit import Extension

class Lost(Extension):
    def before_step(self, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

result = finetune(recipe, extensions=[Lost()])
"""
"""What the training cell is in a session whose machine is taken away, after the checkpoint of step 4."""

SECOND_RUN = """
other = Recipe.load("quickstart", {"training.output_dir": str(OUTPUT) + "_2", "training.max_steps": 2,
    "training.eval_every_steps": None, "logging.held_out_samples": 0, "data.max_validation_samples": 8})
print(finetune(other).output_dir, finetune(recipe).output_dir)
"""
"""A run after a run in the same kernel, and the cell of the first one once more."""


def notebook_cells(training: str | None = None) -> nbformat.NotebookNode:
    """The notebook, shortened; with another training cell, if one is given, as its last one."""
    notebook = nbformat.read(ROOT / "recipes/finetune.ipynb", as_version=4)
    nbformat.validate(notebook)
    found = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shortened = [cell for cell in found if '"training.num_epochs": 5,' in cell.source]
    assert len(shortened) == 1
    source = shortened[0].source.replace('        "training.num_epochs": 5,\n', SHORT_NOTEBOOK)
    shortened[0].source = source.replace('"checkpoint.every_steps": 50', '"checkpoint.every_steps": 2')
    if training is not None:
        place = next(place for place, cell in enumerate(notebook.cells) if cell.source.startswith("result = finetune("))
        notebook.cells = notebook.cells[: place + 1]
        notebook.cells[place].source = training
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> list[list[dict[str, Any]]]:
    """Runs all cells in a fresh kernel, as a notebook service does, and returns the outputs of those of code."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=LIMIT_SECONDS, coalesce_streams=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_the_notebook_as_a_service_runs_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder; its machine is lost in the middle, a fresh kernel goes on, and another run follows there."""
    for name, value in environment(cache).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeadKernelError):
        execute(notebook_cells(LOSING_THE_MACHINE), tmp_path)
    run = tmp_path / "outputs/notebook"
    assert not (run / "export").exists()
    notebook = notebook_cells()
    notebook.cells.append(nbformat.v4.new_code_cell(SECOND_RUN))
    install, machine, recipe, training, plot, samples, generated, second = execute(notebook, tmp_path)
    assert [output for output in (*install, *recipe) if output.get("name") != "stderr"] == [], "it is installed already"
    assert text_of(machine) == "a CPU, precision float32\n"
    [shown] = [output for output in training if "data" in output and "text/html" in output["data"]]
    assert "<svg" in shown["data"]["text/html"]
    assert "; from step 4 on " in (run / "report.html").read_text(), "it went on from there"
    records = records_of(run)
    assert [record["step"] for record in records if record["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert "<svg" in plot[0]["data"]["text/html"], "the curve"
    assert [line.split()[0] for line in text_of(samples).splitlines() if line] == ["asked", "before", "after", "in"]
    assert text_of(generated)
    assert text_of(second).split()[-2:] == [f"{run}_2", str(run)]


@pytest.mark.first
@pytest.mark.parametrize(
    ("capability", "name", "told"),
    [
        ((7, 5), "Tesla T4", "1 x Tesla T4, precision fp16\n"),
        ((8, 0), "NVIDIA A100", "1 x NVIDIA A100, precision bf16\n"),
        (None, "", "a CPU, precision float32\n"),
    ],
)
def test_the_notebook_says_in_which_precision_a_machine_computes(
    capability: Any, name: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [cell] = [cell for cell in notebook_cells().cells if "get_device_capability" in cell.source]
    cuda = {
        "is_available": lambda: capability is not None,
        "get_device_capability": lambda: capability,
        "get_device_name": lambda: name,
        "device_count": lambda: 1,
    }
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**cuda)))
    space: dict[str, Any] = {}
    exec(cell.source, space)
    assert capsys.readouterr().out == told
    assert Recipe.load("quickstart", {"training.mixed_precision": space["precision"]}).training.mixed_precision
