"""Two hosts as Linux namespaces: own network, name, process ids, `/tmp` and shared memory; one folder is common.

`run_on_hosts` runs a function on ranks of both, as `run_on_ranks` does on one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ranks
from support.two_hosts import ADDRESSES, Host, two_hosts

ROOT = Path(__file__).parents[2]
NAMES = ("first-host", "second-host")

BOOT = """
set -e
hostname "$1"
for name in $SHARED_PATHS; do
    mkdir -p "/run/kept$name"
    mount --bind "$name" "/run/kept$name"
done
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
for name in $SHARED_PATHS; do
    mkdir -p "$name"
    mount --bind "/run/kept$name" "$name"
done
mount --bind "$HOSTS_FILE" /etc/hosts
shift
exec "$@"
"""
"""What a host does before its command, which is its process 1: all that runs there ends with it."""


@dataclass(frozen=True)
class WholeHost:
    """A host.

    Attributes:
        network: its network alone, in which a command has all else of the machine.
        prefix: what a command is preceded by to run there.
        environment: which that needs.
    """

    name: str
    address: str
    network: Host
    prefix: list[str]
    environment: dict[str, str]


@contextmanager
def whole_hosts(shared: Path) -> Iterator[list[WholeHost]]:
    """Both of them; an empty list where the system makes none.

    Args:
        shared: the folder that both have.
    """
    file = shared / "etc-hosts"
    lines = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    kept = [shared, *(path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp"))]
    environment = {"SHARED_PATHS": " ".join(map(str, kept)), "HOSTS_FILE": str(file)}
    with two_hosts() as networks:
        hosts = [
            WholeHost(name, address, network, _prefix(network, name), environment)
            for network, name, address in zip(networks, NAMES, ADDRESSES, strict=False)
        ]
        yield hosts if hosts and run_there(hosts[0], "true") else []


def _prefix(network: Host, name: str) -> list[str]:
    apart = ["unshare", "--uts", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
    # A folder of the host's own under /run, so that no mount of it is seen outside.
    script = f"mount -t tmpfs none /run{BOOT}"
    return [*network.prefix, *apart, "sh", "-c", script, "sh", name]


def run_there(host: WholeHost, *command: str) -> bool:
    done = subprocess.run([*host.prefix, *command], env=os.environ | host.environment, capture_output=True)
    return done.returncode == 0


@dataclass(frozen=True)
class Job:
    """The ranks of one host.

    Attributes:
        local_world_size: what their launcher says; several launchers of one host count their own ranks.
        meets: in a process group that is there before the function begins. Otherwise it makes one itself.
        world: names the run; ranks of one run have the same.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: range
    num_ranks: int
    local_world_size: int = 2
    meets: bool = True
    world: str = "world"
    seconds: float = ranks.LIMIT_SECONDS


Outcome = tuple[bool, Any]
"""Whether a rank has ended well, and its result or its traceback."""


def run_on_hosts(hosts: Sequence[WholeHost], shared: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on two ranks of each host; the results in rank order, as `ranks.run_on_ranks` has them."""
    jobs = [Job(function, args, range(2 * number, 2 * number + 2), 2 * len(hosts)) for number in range(len(hosts))]
    outcomes = [outcome for found in outcomes_of(hosts, shared, jobs) for outcome in found or [(False, "no outcome")]]
    failed = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not failed, "\n".join(failed)
    return [result for _, result in outcomes]


def outcomes_of(hosts: Sequence[WholeHost], shared: Path, jobs: Sequence[Job]) -> list[list[Outcome] | None]:
    """Of each host's ranks; None of a host that was turned off. What they print is in `host-N.log`."""
    processes, files = [], []
    start = len(list(shared.glob("job-0-*.pickle")))
    for number, (host, job) in enumerate(zip(hosts, jobs, strict=True)):
        _switch(shared, number).unlink(missing_ok=True)
        files.append(shared / f"job-{number}-{start}.pickle")
        files[-1].write_bytes(pickle.dumps(job))
        command = [*host.prefix, sys.executable, "-m", "support.whole_hosts", str(files[-1])]
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *sys.path])
        environment = os.environ | host.environment | {"PYTHONPATH": paths, "MASTER_ADDR": hosts[0].address}
        with (shared / f"host-{number}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    while any(process.poll() is None for process in processes):
        for number, process in enumerate(processes):
            if _switch(shared, number).exists():
                process.kill()  # and with it the host's process 1
        time.sleep(0.05)
    answers = [file.with_suffix(".outcome") for file in files]
    return [pickle.loads(answer.read_bytes()) if answer.exists() else None for answer in answers]


def turn_off(shared: Path, number: int) -> None:
    """From inside of a host: it loses its power, with all that runs there."""
    _switch(shared, number).touch()
    time.sleep(60)


def _switch(shared: Path, number: int) -> Path:
    return shared / f"off-{number}"


@ranks.alone
def _on_host(job: Job) -> Any:
    os.environ["LOCAL_RANK"] = str(job.ranks.index(int(os.environ["RANK"])) % job.local_world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(job.local_world_size)
    os.environ["MASTER_PORT"] = "29555"  # the hosts' networks are the test's own
    if job.meets:
        ranks.meet()
    return job.function(*job.args)


def _main(file: Path) -> None:
    job: Job = pickle.loads(file.read_bytes())
    # Process groups meet over a file that both hosts see.
    meeting = file.parent / f"meeting-{job.world}-{file.stem.rpartition('-')[2]}"
    meeting.mkdir(exist_ok=True)
    pipes, processes = ranks._start(_on_host, job.num_ranks, str(meeting), (job,), job.ranks)
    outcomes = ranks._collect(pipes, processes, job.function.__qualname__, job.seconds)
    ranks._end(processes)
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(outcomes))
    unfinished.rename(file.with_suffix(".outcome"))


if __name__ == "__main__":
    from support.whole_hosts import _main as main  # by its own name, which pickles have

    main(Path(sys.argv[1]))
