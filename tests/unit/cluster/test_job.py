"""`toolkit job`: what a file for a batch system holds, and what is refused before there is one."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.errors import BadInputError

CLUSTER = ("--nodes", "2", "--gpus", "8")
STORE = "checkpoint.to=s3://bucket/runs/first"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the checks do not take for a node's own disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.cluster.checks.OWN_DISKS", ("/dev/shm", "/scratch"))
    return tmp_path


SKY = (*CLUSTER, "--on", "skypilot", "--hardware", "h100_sxm", STORE)
SHIPPED = Path(__file__).parents[3] / "recipes/quickstart.yaml"


def job(*arguments: str) -> Result:
    recipe = [] if "--recipe" in arguments else ["quickstart"]
    return CliRunner().invoke(app, ["job", *recipe, *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "how many ranks has a node? Give --gpus or --cpu"),
        (["--gpus", "2", "--cpu", "2"], "how many ranks has a node?"),
        ([*CLUSTER, "--on", "pbs"], "--on: unknown 'pbs'; allowed: slurm, kubernetes, skypilot"),
        (["--gpus", "8", "--nodes", "two"], "--nodes: 'two'; allowed: a number from 1 (2), or a range (1-2)"),
        (["--gpus", "8", "--nodes", "3-2"], "--nodes: '3-2'; allowed"),
        ([*CLUSTER, "--time", "8"], "--time: '8'; allowed: a number of minutes, hours or days, such as 90m, 8h or 2d"),
        (["--gpus", "16", "--hardware", "h100_sxm"], "--gpus: 16, but a node of h100_sxm has 8 GPUs; give at most"),
        (
            ["--gpus", "8", "--strategy", "hybrid"],
            "--nodes: on 1 of 8 ranks: strategy hybrid keeps a copy of the model",
        ),
        (["--gpus", "8", "--strategy", "zero9"], "unknown strategy 'zero9'"),
        ([*CLUSTER, "sharding.reshard_after_forward=3"], "on 2 of 8 ranks: sharding.reshard_after_forward: 3 is not a"),
        (["--gpus", "3", "--nodes", "3", "sharding.sequence=2"], "sharding.sequence: 2 does not divide the 9 ranks"),
        (["--gpus", "8", "--nodes", "1-3"], "a step of 3 micro-batches for each rank of a node"),
        ([*CLUSTER, "training.output_dir=/dev/shm/run"], "'/dev/shm/run' is on a disk that each node has for itself"),
        (
            [*CLUSTER, "checkpoint.to=file:///scratch/run"],
            "checkpoint.to: 'file:///scratch/run' is on a disk that each",
        ),
        ([*CLUSTER, "checkpoint.resume=never"], "checkpoint.resume: never, but a job that is preempted starts again"),
        ([*CLUSTER, "checkpoint.every_minutes=never"], "the loss of a node loses the whole run"),
        ([*CLUSTER, "--volume", "runs:/runs"], "--volume has no effect with --on slurm"),
        ([*CLUSTER, "--on", "kubernetes", STORE], "--image is missing"),
        ([*CLUSTER, "--on", "kubernetes", "--image", "a/b"], "is lost with its pod; name a folder of a volume"),
        ([*CLUSTER, "--on", "kubernetes", "--image", "a/b", STORE, "--volume", "/runs"], "allowed: CLAIM:/PATH"),
        ([*CLUSTER, "--on", "kubernetes", "--image", "a/b", STORE, "--time", "8h"], "--time has no effect"),
        ([*CLUSTER, "--on", "skypilot", "--hardware", "h100_sxm"], "is lost with its machine; keep the checkpoints in"),
        ([*CLUSTER, "--on", "skypilot", STORE], "--hardware: SkyPilot looks for machines with that GPU"),
        (["--gpus", "8", "--nodes", "1-2", "--on", "skypilot", STORE], "starts a fixed number of nodes"),
        ([*SKY, "--recipe", str(SHIPPED)], "is not named by a path inside of this folder"),
    ],
)
def test_what_no_node_should_wait_for(arguments: list[str], told: str, here: Path) -> None:
    result = job(*arguments)
    assert isinstance(result.exception, BadInputError), result.output
    assert told in str(result.exception)
    assert list(here.iterdir()) == []


def test_gpus_that_slurm_lists(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = here / "bin/sinfo"
    stub.parent.mkdir()
    listed = {"long": "gpu:h100:8(S:0-1),lustre:1", "short": "gpu:4", "none": "(null)"}
    told = "\n".join(f'[ "$5" = {partition} ] && echo "{gres}"' for partition, gres in listed.items())
    stub.write_text(f"#!/bin/sh\n{told}\ntrue\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    assert job("--gpus", "8", "--partition", "long").exit_code == 0
    assert "--gpus: 8, but a node that `sinfo` lists has 4" in str(job("--gpus", "8", "--partition", "short").exception)
    assert job("--gpus", "8", "--partition", "none", "--force").exit_code == 0


def test_a_file_is_not_replaced_by_accident(here: Path) -> None:
    assert job(*CLUSTER).exit_code == 0
    assert "exists; name another file, or replace it with --force" in str(job(*CLUSTER).exception)
    assert job(*CLUSTER, "--force").exit_code == 0


def test_what_it_is_given_stays_inside_of_its_line(here: Path) -> None:
    refused = job(*CLUSTER, "--partition", "long\n#SBATCH --account=other")
    assert "--partition: 'long\\n#SBATCH --account=other' holds an end of line" in str(refused.exception)
    text = _written(here, *CLUSTER, "model.config={model_type: llama,\n  hidden_size: 8}")
    assert all(line.startswith("#") for line in text.partition("Submit it")[0].splitlines())
    assert "\n#SBATCH --partition='a b'\n" in _written(here, *CLUSTER, "--partition", "a b")
    text = _written(here, *SKY, "--image", "team/a: #1", "model.config={model_type: llama,\n  hidden_size: 8}")
    found = yaml.safe_load(text)
    assert found["resources"]["image_id"] == "docker:team/a: #1"
    assert "'model.config={model_type: llama,\n  hidden_size: 8}'" in found["run"]


@pytest.mark.parametrize(
    ("folder", "name"), [("outputs/8B Chat!", "run-8b-chat"), ("./2", "run-2"), ("./null", "null"), ("./...", "train")]
)
def test_a_name_that_every_system_takes_for_one(folder: str, name: str, here: Path) -> None:
    """JobSet's names are labels of DNS as in RFC 1035, and a YAML file takes some words for values."""
    given = f"training.output_dir={folder}"
    _, jobs = _kubernetes(here, STORE, given)
    assert jobs["metadata"]["name"] == yaml.safe_load(_written(here, *SKY, given))["name"] == name


def test_the_recipe_of_a_job_is_not_replaced_by_it(here: Path) -> None:
    assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", "mine.yaml"]).exit_code == 0
    before = (here / "mine.yaml").read_text()
    refused = CliRunner().invoke(
        app, ["job", "mine.yaml", "--on", "slurm", *CLUSTER, "--output", "mine.yaml", "--force"]
    )
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


@pytest.mark.slow
def test_what_the_plan_says() -> None:
    done = job(*CLUSTER, "--hardware", "h100_sxm")
    assert done.exit_code == 0, done.exception
    assert "plan: zero3 on 2 x 8: fits, " in done.output


def _written(here: Path, *arguments: str) -> str:
    done = job(*arguments, "--output", "job.txt", "--force")
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


def _kubernetes(here: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _written(here, *CLUSTER, "--on", "kubernetes", "--image", "team/toolkit:1", *arguments)
    recipe, jobs = yaml.safe_load_all(text)
    return recipe, jobs


@pytest.mark.parametrize("arguments", [[STORE], ["--volume", "runs:/runs", "training.output_dir=/runs/first"]])
def test_a_job_for_kubernetes(arguments: list[str], here: Path) -> None:
    recipe, jobs = _kubernetes(here, *arguments)
    kept = yaml.safe_load(recipe["data"]["recipe.yaml"])
    assert kept["model"]["config"]["model_type"] == "llama"
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    name = jobs["metadata"]["name"]
    assert container["command"][2].split() == [
        *("exec", "toolkit", "train", "/recipe/recipe.yaml", "--gpus", "8", "--num-machines", "2", "--machine-rank"),
        *('"$JOB_COMPLETION_INDEX"', "--main-process-ip", f"{name}-node-0-0.{name}", "--main-process-port", "29500"),
    ]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_files_that_pods_do_not_have_are_told(here: Path) -> None:
    rows = SHIPPED.parent / "data/requests.jsonl"
    for arguments in ([*CLUSTER, "--on", "kubernetes", "--image", "team/toolkit:1", STORE], SKY):
        assert f"put them at the same places there: {rows}\n" in job(*arguments, "--force").output
    assert "at the same places" not in job(*CLUSTER).output


def test_jobsets_own_schema(here: Path) -> None:
    models = _package("kubeflow_trainer_api.models")
    _, jobs = _kubernetes(here, STORE)
    made = models.JobsetV1alpha2JobSet.from_dict(jobs).to_dict()
    assert made["spec"]["failurePolicy"] == jobs["spec"]["failurePolicy"]
    (kept,), (given,) = made["spec"]["replicatedJobs"], jobs["spec"]["replicatedJobs"]
    assert kept["template"]["spec"]["podFailurePolicy"] == given["template"]["spec"]["podFailurePolicy"]
    jobs["spec"]["failurePolicy"]["maxRestarts"] = "many"
    with pytest.raises(ValueError, match="maxRestarts"):
        models.JobsetV1alpha2JobSet.from_dict(jobs)


def test_kubernetes_own_schemas(here: Path) -> None:
    checker = _package("kubernetes_validate")
    recipe, jobs = _kubernetes(here, "--volume", "runs:/runs", "training.output_dir=/runs/first")
    checker.validate(recipe, checker.latest_version(), strict=True)
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobs["metadata"]}
    job = {**made, "spec": jobs["spec"]["replicatedJobs"][0]["template"]["spec"]}
    checker.validate(job, checker.latest_version(), strict=True)
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = 2
    with pytest.raises(checker.ValidationError):
        checker.validate(job, checker.latest_version(), strict=True)


def test_a_job_for_skypilot(here: Path) -> None:
    text = _written(here, *CLUSTER, "--on", "skypilot", "--hardware", "a100_80", STORE)
    found = yaml.safe_load(text)
    assert found["num_nodes"] == 2
    assert found["resources"]["accelerators"] == "A100-80GB:8"
    assert "pip install -e '.[s3]'" in found["setup"]
    subprocess.run(["bash", "-n"], input=found["run"], text=True, check=True)


def test_skypilots_own_parser(here: Path) -> None:
    sky = _package("sky")
    text = _written(here, *CLUSTER, "--on", "skypilot", "--hardware", "h100_sxm", STORE)
    task = sky.Task.from_yaml("job.txt")
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.use_spot
    assert dict(resources.accelerators) == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [3, 4]
    (here / "job.txt").write_text(text.replace("num_nodes", "num_machines"))
    with pytest.raises(ValueError, match="num_machines"):
        sky.Task.from_yaml("job.txt")
