"""A real Slurm of two nodes on this machine, without systemd, in a folder of its own: daemons, jobs and what they did.

It needs Debian's slurm-wlm and munge, and root. Each node has a mount namespace, and in it a disk of its own. What cost
time: slurmctld changes its folder, so paths are absolute; the daemons of steps hang without cgroup.conf; requeued jobs
wait two minutes unless their start time is moved.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from toolkit.ranks import free_port

NODES = ("127.0.0.1", "127.0.0.2")
"""Names that are addresses, as these hosts are in no table."""

CONF = """ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobRequeue=1
KillWait=20
SlurmdTimeout=8
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={nodes[0]},{nodes[1]} MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    if absent := [name for name in ("slurmctld", "slurmd", "munged", "unshare") if shutil.which(name) is None]:
        return f"no {absent[0]}: apt-get install slurm-wlm munge (docs/CONTRIBUTING.md)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root here"


class Slurm:
    """Two nodes and their controller.

    Attributes:
        own: a folder that each node has for itself, under the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = folder / "own"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *arguments: str) -> str:
        return self.run("sbatch", "--parsable", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for(self, number: str, *states: str, seconds: float = 90.0, nodes: int | None = None) -> dict[str, str]:
        """Waits until a job is in one of the states, on so many nodes; a job that waits for its turn gets it."""

        def reached() -> dict[str, str] | None:
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime" and "PENDING" not in states:
                with suppress(AssertionError):
                    self.run("scontrol", "update", f"JobId={number}", "StartTime=now")
            return job if job["JobState"] in states and nodes in (None, int(job["NumNodes"].split("-")[0])) else None

        found = until(reached, seconds, lambda: f"{self.job(number)}")
        assert found is not None
        return found

    def wait_until_idle(self) -> None:
        """Waits until both nodes are free: a job for one or two starts on what there is."""
        until(lambda: self.run("sinfo", "--noheader", "--format", "%T %D", "--partition", "main") == "idle 2", 60)

    def start_node(self, name: str) -> None:
        """Starts a node with an empty disk of its own at `own`."""
        mounted = f'mount -t tmpfs own "$1" && exec slurmd -N {name} -f "$2"'
        command = ["unshare", "--mount", "sh", "-c", mounted, "sh", str(self.own), str(self.folder / "slurm.conf")]
        subprocess.run(command, env=self.environment, check=True, timeout=60)

    def kill_node(self, name: str) -> None:
        """Ends a node as a power cut does: its daemon, the daemons of its steps and all their processes."""
        daemon = psutil.Process(int((self.folder / f"slurmd-{name}.pid").read_text()))
        steps = [process for process in psutil.process_iter(["cmdline", "name"]) if self._is_step_of(process, name)]
        for process in [daemon, *steps, *(child for step in steps for child in step.children(recursive=True))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _is_step_of(self, process: psutil.Process, name: str) -> bool:
        """Whether it is a daemon of a step of this node, which has the node's mounts."""
        if "slurmstepd" not in (process.info["name"] or ""):
            return False
        daemon = int((self.folder / f"slurmd-{name}.pid").read_text())
        with suppress(OSError):
            return os.readlink(f"/proc/{process.pid}/ns/mnt") == os.readlink(f"/proc/{daemon}/ns/mnt")
        return False


def until(look: Callable[[], object], seconds: float, told: Callable[[], str] = str) -> object:
    """Looks until there is something; what `told` says is in the error."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, told()
        time.sleep(0.2)
    return found


@contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Starts Slurm in a folder, and ends all that it started."""
    made = Slurm(folder)
    for name in ("state", "own", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    host = os.uname().nodename.partition(".")[0]
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, ports=ports, nodes=NODES))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\nConstrainCores=no\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    files = {"key": "munge.key", "socket": "munge.socket", "pid": "munge.pid", "log": "munge.log", "seed": "munge.seed"}
    names = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    options = [f"--{names[what]}={folder / file}" for what, file in files.items()]
    try:
        subprocess.run(["munged", "--force", *options], check=True, timeout=60, capture_output=True)
        subprocess.run(["slurmctld", "-f", str(folder / "slurm.conf")], env=made.environment, check=True, timeout=60)
        for node in NODES:
            made.start_node(node)
        made.wait_until_idle()
        yield made
    finally:
        _end(folder)


def _end(folder: Path) -> None:
    """Ends the daemons of steps first, then those of the nodes."""
    steps = [process for process in psutil.process_iter(["name"]) if _logs_to(process, folder)]
    ours = [each.pid for step in steps for each in [*step.children(recursive=True), step]]
    ours += [int(path.read_text()) for path in folder.glob("*.pid") if path.read_text().strip()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in dict.fromkeys(ours):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(1)


def _logs_to(process: psutil.Process, folder: Path) -> bool:
    """Whether it is the daemon of a step, which has neither arguments nor an environment, that writes its log here."""
    with suppress(psutil.Error):
        return "slurmstepd" in process.info["name"] and any(
            file.path.startswith(f"{folder}/") for file in process.open_files()
        )
    return False
