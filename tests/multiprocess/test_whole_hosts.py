"""Two ranks on each of two hosts that share a folder and nothing else: what they train, hold and refuse.

A host is a set of Linux namespaces: network, name, process ids, `/tmp`, shared memory (support/whole_hosts.py).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS, meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from support.whole_hosts import NAMES, ROOT, Job, WholeHost, outcomes_of, run_on_hosts, turn_off, whole_hosts

from toolkit import Recipe, finetune
from toolkit.errors import BadInputError
from toolkit.ranks import free_port
from toolkit.supervise import launched_ranks, lock
from toolkit.training.trainer import Trainer

STEPS = 6
OFFLOAD = {"offload": "optimizer", "offload_executor": "cpu_torch"}
SHARDINGS: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3"},
    "groups": {"strategy": "zero3", "reshard_after_forward": 2},
    "groups, offload": {"strategy": "zero3", "reshard_after_forward": 2, **OFFLOAD},
    "hybrid": {"strategy": "hybrid"},
    "hybrid, offload": {"strategy": "hybrid", **OFFLOAD},
}
TOLD = ("split", "step", "samples", "tokens", "loss", "grad_norm", "learning_rate")
NAMESPACES = ("net", "uts", "pid", "ipc", "mnt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    texts = make_texts(60)
    save_llama(folder / "model", texts, tied=True)
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


@pytest.fixture(scope="module")
def hosts_if_any(folder: Path) -> Iterator[list[WholeHost]]:
    with whole_hosts(folder) as made:
        yield made


@pytest.fixture
def hosts(hosts_if_any: list[WholeHost]) -> list[WholeHost]:
    if not hosts_if_any:
        pytest.skip("this test needs Linux namespaces: run it as root")
    return hosts_if_any


def values_of(folder: Path, output: Path, **sections: Any) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / "texts.txt", output, folder / "cache", max_steps=STEPS)
    values["training"] |= {"micro_batch_size": 2, **sections.pop("training", {})}
    values["export"] = {"enabled": False}
    return values | sections


def finetuned(values: dict[str, Any]) -> list[dict[str, Any]]:
    meet()
    hybrid = values.get("sharding", {}).get("strategy") == "hybrid"
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if hybrid else "1"
    records = finetune(Recipe.from_mapping(values)).metrics
    return [{key: record.get(key) for key in TOLD} for record in records]


# One run over a shared folder


def learn(folder: Path, where: str) -> dict[str, Any]:
    """What each sharding learns."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29555"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    found: dict[str, Any] = {"host": socket.gethostname(), "beside": os.listdir(folder.parent)}
    found["namespaces"] = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}
    for name, sharding in SHARDINGS.items():
        output = folder / f"{where}-{name}".replace(" ", "")
        saves = {"checkpoint": {"every_steps": 4}} if name == "groups" else {}
        found[name] = finetuned(values_of(folder, output, sharding=sharding, **saves))
    return found


@pytest.mark.grid
def test_ranks_on_two_hosts_learn_what_those_of_one_do(hosts: list[WholeHost], folder: Path) -> None:
    together = run_on_ranks(learn, 4, folder, "together")
    apart = run_on_hosts(hosts, folder, learn, folder, "apart")
    assert [rank["host"] for rank in apart] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    assert [rank["beside"] for rank in apart] == [[folder.name]] * 4, "/tmp is the hosts' own but for the shared folder"
    of_hosts = [rank["namespaces"] for rank in apart]
    assert of_hosts[0] == of_hosts[1]
    assert of_hosts[2] == of_hosts[3]
    assert all(of_hosts[0][kind] != of_hosts[2][kind] for kind in NAMESPACES)
    for number, rank in enumerate(apart):
        for name in SHARDINGS:
            assert len(rank[name]) >= STEPS
            assert rank[name] == together[number][name], name


def test_two_launchers_are_one_run(hosts_if_any: list[WholeHost], folder: Path) -> None:
    """By the first host's name; the launcher is process 1, as in a container. Without hosts, both run on this one."""
    address, port = (NAMES[0], 29600) if hosts_if_any else ("127.0.0.1", free_port())
    recipe = folder / "launched.yaml"
    recipe.write_text(yaml.safe_dump(values_of(folder, folder / "launched", sharding=SHARDINGS["zero3"])))
    config = yaml.safe_load((ROOT / "accelerate_configs/two_nodes.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "main_process_ip": address, "main_process_port": port}
    launchers = []
    for number, host in enumerate(hosts_if_any or (None, None)):
        path = folder / f"launched-{number}.config.yaml"
        path.write_text(yaml.safe_dump(config | {"machine_rank": number}))
        command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(path)]
        command += [str(ROOT / "recipes/finetune.py"), "--recipe", str(recipe)]
        environment = clean_environment(OMP_NUM_THREADS="1") | (host.environment if host else {})
        launchers.append(
            subprocess.Popen(
                [*(host.prefix if host else []), *command],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [launcher.communicate(timeout=LIMIT_SECONDS)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)[-4000:]
    assert "ranks: 2 on" in outputs[0]
    found = [json.loads(line)["loss"] for line in (folder / "launched/metrics.jsonl").read_text().splitlines()]
    one_host = run_on_ranks(finetuned, 2, values_of(folder, folder / "one", sharding=SHARDINGS["zero3"]))[0]
    assert found == [record["loss"] for record in one_host]
    assert len(found) == STEPS


# One run at a time in a folder that both hosts see


def hold(folder: Path) -> Any:
    """The first host trains, and is turned off in its third step once the second was refused."""
    lock.LOST_HOST_SECONDS = 5.0
    values = values_of(folder, folder / "held", checkpoint={"every_steps": 2})
    train_step, steps = Trainer.train_step, itertools.count(1)
    is_first = socket.gethostname() == NAMES[0]

    def step(trainer: Any, window: Any) -> Any:
        if is_first and next(steps) == 3:
            (folder / "training").touch()
            _until(folder / "refused")
            turn_off(folder, 0)
        return train_step(trainer, window)

    Trainer.train_step = step  # type: ignore[method-assign]
    if is_first:
        return finetuned(values)
    _until(folder / "training")
    told = ""
    try:
        finetuned(values)
    except BadInputError as error:
        told = str(error)
    (folder / "refused").touch()
    return told, finetuned_once_free(values)


def finetuned_once_free(values: dict[str, Any]) -> list[dict[str, Any]]:
    for _ in range(30):
        try:
            return finetuned(values)
        except BadInputError:
            time.sleep(1)
    raise AssertionError("the folder was not given free")


def _until(file: Path) -> None:
    for _ in range(1200):
        if file.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{file} did not come")


def test_a_folder_is_held_against_the_other_host_until_its_own_is_off(hosts: list[WholeHost], folder: Path) -> None:
    jobs = [Job(hold, (folder,), range(2), 2, world=f"of-{number}") for number in (0, 1)]
    first, second = outcomes_of(hosts, folder, jobs)
    assert first is None
    assert second is not None
    for ok, result in second:
        assert ok, result
        told, records = result
        assert f"on {NAMES[0]}" in told
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))


# Hosts that are not alike


def unlike(folder: Path) -> tuple[str, float]:
    """Backward in groups of two, on a host whose launchers start one rank each."""
    launched_ranks.SHORTEST_SECONDS, begun = 20.0, time.monotonic()
    training = {"stall_minutes": 0.1}
    values = values_of(folder, folder / "unlike", sharding=SHARDINGS["groups"], training=training)
    try:
        finetune(Recipe.from_mapping(values))
    except BadInputError as error:
        return str(error), time.monotonic() - begun
    return "trained", 0.0


def test_a_host_that_cannot_hold_a_group_refuses_at_once_and_the_other_does_not_wait_for_ever(
    hosts: list[WholeHost], folder: Path
) -> None:
    jobs = [Job(unlike, (folder,), range(2 * n, 2 * n + 2), 4, 2 - n, meets=False) for n in (0, 1)]
    first, second = outcomes_of(hosts, folder, jobs)
    assert second is not None
    for ok, result in second:
        assert ok, result
        assert "2 is not a group inside of the 1 ranks of a node" in result[0]
    assert first is not None
    # Rank 0 gives up by itself. It holds the place where ranks meet: rank 1 gives up too, or finds that place gone.
    assert first[0] == (False, "died without a word")
    assert not first[1][0]
    told = (folder / "host-0.log").read_text()
    assert f"error: rank 0 on {NAMES[0]} has waited 20 s for all 4 ranks to meet at {hosts[0].address}:29555" in told
    assert not (folder / "unlike").exists()
