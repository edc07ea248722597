"""Two launchers, machine_rank 0 and 1, are the same run as one launcher with as many ranks.

Where the system lets us, each launcher runs in a network namespace of its own, as two hosts joined by
a cable; where not, both run on this host.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.launches import clean_environment, launch
from support.ranks import LIMIT_SECONDS
from support.tiny import recipe_values, save_llama
from support.two_hosts import ADDRESSES, two_hosts

from toolkit.ranks import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def launcher(folder: Path, config: dict[str, object], recipe: Path, name: str) -> list[str]:
    path = folder / f"{name}-{config.get('machine_rank', 0)}.config.yaml"
    path.write_text(yaml.safe_dump(config))
    script = [str(ROOT / "recipes/finetune.py"), "--recipe", str(recipe), f"training.output_dir={folder / name}"]
    return [str(BIN / "accelerate"), "launch", "--config_file", str(path), *script]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def recipe(tmp_path: Path, text_file: Path) -> Path:
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    values = recipe_values(
        save_llama(tmp_path / "model", texts, tied=True),
        text_file,
        tmp_path / "out",
        tmp_path / "cache",
        max_steps=6,
        micro_batch_size=2,
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_two_machines_are_one_run(tmp_path: Path, recipe: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs/two_nodes.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "main_process_port": free_port()}
    clean = clean_environment(OMP_NUM_THREADS="1")
    with two_hosts() as hosts:
        address = ADDRESSES[0] if hosts else "127.0.0.1"
        commands = [
            launcher(tmp_path, config | {"machine_rank": number, "main_process_ip": address}, recipe, "two")
            for number in (0, 1)
        ]
        machines = [
            subprocess.Popen(
                [*(host.prefix if host else []), *command],
                env=clean | ({"GLOO_SOCKET_IFNAME": host.interface} if host else {}),
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host, command in zip(hosts or [None, None], commands, strict=True)
        ]
        try:
            outputs = [machine.communicate(timeout=LIMIT_SECONDS)[0] for machine in machines]
        finally:
            for machine in machines:
                machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(outputs)[-4000:]
    one = config | {"num_machines": 1, "main_process_port": 0}
    for key in ("machine_rank", "main_process_ip"):
        one.pop(key)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one))
    launch(
        tmp_path / "one.yaml",
        ROOT / "recipes/finetune.py",
        *("--recipe", str(recipe), f"training.output_dir={tmp_path / 'one'}"),
        folder=ROOT,
    )
    assert len(losses(tmp_path / "one")) == 6
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert "ranks: 2 on" in outputs[0]
    print("two hosts in network namespaces" if hosts else "two launchers on one host")
