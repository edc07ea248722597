"""`toolkit job`: what a file for a batch system holds, and what is refused before there is one."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import cases
from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.errors import BadInputError

TABLES = cases(__file__)

CLUSTER = ("--nodes", "2", "--gpus", "8")
STORE = "checkpoint.to=s3://bucket/runs/first"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the checks do not take for a node's own disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.cluster.checks.OWN_DISKS", ("/dev/shm", "/scratch"))
    return tmp_path


EXAMPLES = Path(__file__).parents[3] / "docs/examples"


def job(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["job", "quickstart", *arguments])


@pytest.mark.parametrize(("arguments", "told"), TABLES["REFUSED"])
def test_what_no_node_should_wait_for(arguments: list[str], told: str, here: Path) -> None:
    result = job(*arguments)
    assert isinstance(result.exception, BadInputError), result.output
    assert told in str(result.exception)
    assert list(here.iterdir()) == []


def test_a_file_is_not_replaced_by_accident(here: Path) -> None:
    assert job(*CLUSTER).exit_code == 0
    assert "exists; name another file, or replace it with --force" in str(job(*CLUSTER).exception)
    assert job(*CLUSTER, "--force").exit_code == 0


def test_what_it_is_given_stays_inside_of_its_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = job(*CLUSTER, "--partition", "long\n#SBATCH --account=other")
    assert "--partition: 'long\\n#SBATCH --account=other' holds an end of line" in str(refused.exception)
    monkeypatch.setattr("sys.argv", ["toolkit", "job", "a\nb\u2028c\x85d"])
    text = _written(here, *CLUSTER, "model.config={model_type: llama,\n  hidden_size: 8}")
    assert all(line.startswith("#") for line in text.partition("Submit it")[0].splitlines())
    assert "\n#SBATCH --partition='a b'\n" in _written(here, *CLUSTER, "--partition", "a b")
    (here / "a\nb").mkdir()
    monkeypatch.chdir(here / "a\nb")
    assert "holds an end of line" in str(job(*CLUSTER).exception)


def test_the_recipe_of_a_job_is_not_replaced_by_it(here: Path) -> None:
    assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", "mine.yaml"]).exit_code == 0
    before = (here / "mine.yaml").read_text()
    refused = CliRunner().invoke(app, ["job", "mine.yaml", *CLUSTER, "--to", "mine.yaml", "--force"])
    assert "'mine.yaml' is the recipe that the job trains" in str(refused.exception)
    assert (here / "mine.yaml").read_text() == before


def test_a_job_for_slurm(here: Path) -> None:
    done = job("--gpus", "8", "--nodes", "1-2", "--time", "36h", "--partition", "long", "training.max_steps=7")
    assert done.exit_code == 0, done.exception
    assert done.stdout.endswith("quickstart.slurm.sh: look at it, then submit it:\n  sbatch quickstart.slurm.sh\n")
    text = (here / "quickstart.slurm.sh").read_text()
    subprocess.run(["bash", "-n", "quickstart.slurm.sh"], check=True)
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert asked == {
        "job-name": "quickstart",
        "chdir": str(here),
        "partition": "long",
        "nodes": "1-2",
        "gpus-per-node": "8",
        "cpus-per-task": "64",
        "time": "1-12:00:00",
        "requeue": "",
        "open-mode": "append",
        "output": "quickstart-%j.txt",
    }
    assert "toolkit train quickstart training.max_steps=7 --gpus 8 training.gradient_accumulation_steps=" in text
    assert "ACCUMULATION=$((2 / SLURM_NNODES))" in text, "a step keeps its samples"
    assert "ACCUMULATION" not in _written(here, "--cpu", "2", "--nodes", "2")


def _written(here: Path, *arguments: str) -> str:
    done = job(*arguments, "--to", "job.txt", "--force")
    assert done.exit_code == 0, done.exception
    return (here / "job.txt").read_text()


def _package(name: str) -> Any:
    """A package that checks such files; without it a test is skipped, with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"pip install {PACKAGES[name]}")


PACKAGES = {
    "kubernetes_validate": "kubernetes-validate",
    "kubeflow_trainer_api.models": "kubeflow-trainer-api",
    "sky": "skypilot",
}


def test_kubernetes_own_schemas() -> None:
    """JobSet's, and that of the job in it."""
    models, checker = _package("kubeflow_trainer_api.models"), _package("kubernetes_validate")
    jobs = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    made = models.JobsetV1alpha2JobSet.from_dict(jobs).to_dict()
    assert made["spec"]["failurePolicy"] == jobs["spec"]["failurePolicy"]
    (kept,), (given,) = made["spec"]["replicatedJobs"], jobs["spec"]["replicatedJobs"]
    assert kept["template"]["spec"]["podFailurePolicy"] == given["template"]["spec"]["podFailurePolicy"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobs["metadata"], "spec": given["template"]["spec"]}
    checker.validate(job, checker.latest_version(), strict=True)
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = 2
    with pytest.raises(checker.ValidationError):
        checker.validate(job, checker.latest_version(), strict=True)


def test_skypilots_own_parser(here: Path) -> None:
    sky = _package("sky")
    text = (EXAMPLES / "skypilot.yaml").read_text()
    (here / "job.yaml").write_text(text)
    task = sky.Task.from_yaml("job.yaml")
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.use_spot
    assert dict(resources.accelerators) == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [3, 4]
    (here / "job.yaml").write_text(text.replace("num_nodes", "num_machines"))
    with pytest.raises(ValueError, match="num_machines"):
        sky.Task.from_yaml("job.yaml")


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_the_commands_of_the_examples_are_of_this_version(name: str) -> None:
    """Bash reads them, and `toolkit train` has their options."""
    found = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    if name == "kubernetes":
        pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        found["run"] = pod["containers"][0]["command"][2]
        assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    subprocess.run(["bash", "-n"], input=found["run"], text=True, check=True)
    options = re.findall(r" (--[a-z-]+)", found["run"].partition("exec toolkit train")[2])
    assert len(options) == 5
    told = CliRunner().invoke(app, ["train", "--help"]).stdout
    assert [option for option in options if option not in told] == []
