"""`toolkit doctor`: what this machine has, and what would go wrong on it. Its output fits a bug report."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.ranks.launch_options import Machines
from toolkit.cli.shared.arguments import MACHINES, AsJson, MachineRank, MainProcessIp, MainProcessPort, NumMachines
from toolkit.cli.shared.console import print_table
from toolkit.errors import BadInputError, first_line
from toolkit.paths import GIB, user_cache

OK, WARNING, FAILED = "ok", "warning", "FAILED"

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "peft", "tokenizers", "safetensors", "numpy")
OPTIONAL = ("flash-attn", "torchao", "bitsandbytes", "trl", "tensorboard", "wandb")

LEAST_FREE_BYTES = 10 * GIB
"""Less free disk than this is a warning: one checkpoint of a 1B model with its optimizer state takes 12 GB."""

LEAST_SHARED_BYTES = GIB
"""Less shared memory is a warning: containers start with 64 MiB, and NCCL and data workers need more."""

LEAST_OPEN_FILES = 4096

MEETING_SECONDS = 60


@dataclass(frozen=True)
class Finding:
    """A line of the report; `fix` says what to do if the verdict is not ok."""

    what: str
    verdict: str
    found: str
    fix: str = ""


def doctor(
    job: Annotated[
        Path | None,
        typer.Option(
            help="Compare the nodes of a job instead, with this output folder. Run it on all of them, as by srun.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    num_machines: NumMachines = None,
    machine_rank: MachineRank = None,
    main_process_ip: MainProcessIp = None,
    main_process_port: MainProcessPort = 29500,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, GPUs, memory, disk, limits, and whether ranks can connect.

    With --job it compares all nodes: whether they reach each other and share a folder, their clocks and versions.

    Exit code 1 if a check fails.
    """
    if job is not None:
        _compare_nodes(job, num_machines, machine_rank, main_process_ip, main_process_port, as_json)
        return
    findings = []
    for finding in _all_findings():
        findings.append(finding)
        if not as_json:  # each as it is found: together they take ten seconds
            fix = f"; {finding.fix}" if finding.fix else ""
            print(f"{finding.what:17}  {finding.verdict:7}  {finding.found}{fix}", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    if any(finding.verdict == FAILED for finding in findings):
        raise typer.Exit(1)


def _compare_nodes(
    folder: Path, count: int | None, rank: int | None, address: str | None, port: int, as_json: bool
) -> None:
    """Compares the nodes; Slurm says how many they are and which is the first if the options do not. Node 0 prints."""
    from toolkit.cluster.nodes import COLUMNS, NodePlace, compare_nodes, rows

    count = int(os.environ.get("SLURM_NNODES", "1")) if count is None else count
    rank = int(os.environ.get("SLURM_NODEID", "0")) if rank is None else rank
    if address is None and "SLURM_JOB_NODELIST" in os.environ:
        address = _first_of_slurm()
    Machines(count, rank, address, port).require()
    nodes = compare_nodes(NodePlace(count, rank, address or "127.0.0.1", port), folder.expanduser().absolute())
    table, problems = rows(nodes)
    if rank == 0:
        if as_json:
            print(json.dumps({"nodes": [dataclasses.asdict(node) for node in nodes], "problems": problems}, indent=2))
        else:
            print_table(list(COLUMNS), table)
            print("\n".join(problems or ["all nodes are alike and reach each other"]))
    if problems:
        raise typer.Exit(1)


def _first_of_slurm() -> str:
    """Returns the first node of this Slurm job. Raises BadInputError if Slurm does not say, as in a container."""
    try:
        told = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True).stdout  # noqa: S607
        return told.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise BadInputError(
            f"--main-process-ip is missing, and `scontrol show hostnames` does not tell it ({first_line(error)}); give "
            "each node the first one's address"
        ) from error


def _all_findings() -> Iterator[Finding]:
    yield from _version_findings()
    yield from _device_findings()
    yield from _disk_findings()
    yield from _backend_findings()


def _version_findings() -> Iterator[Finding]:
    yield Finding("system", OK, f"{platform.platform()}, Python {platform.python_version()}")
    from toolkit.ranks import usable_cores

    yield Finding("cores", OK, f"{usable_cores()} that this process may use, of {os.cpu_count()}")
    yield Finding("packages", OK, ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    installed = {name: _version(name) for name in OPTIONAL}
    yield Finding("optional", OK, ", ".join(f"{name} {version or '-'}" for name, version in installed.items()))
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    fix = "" if compiler else "training.compile and the fused offload kernel need one; install g++"
    yield Finding("C++ compiler", OK if compiler else WARNING, compiler or "none", fix)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device_findings() -> Iterator[Finding]:
    import torch

    from toolkit.ranks import unused_accelerator

    count = torch.cuda.device_count()
    if count == 0:
        unused = unused_accelerator()
        if torch.version.cuda is not None and Path("/proc/driver/nvidia").is_dir():
            fix = "run nvidia-smi: the driver may be older than this CUDA, or CUDA_VISIBLE_DEVICES may hide the GPUs"
            yield Finding("GPUs", WARNING, f"an NVIDIA driver, and none for CUDA {torch.version.cuda}", fix)
        elif unused is None and torch.version.cuda is not None:
            yield Finding("GPUs", OK, f"none: torch is built for CUDA {torch.version.cuda}, and there is no driver")
        elif unused is None:
            yield Finding("GPUs", OK, "none; runs use the CPU")
        else:
            yield Finding("GPUs", WARNING, f"none that is used, but {unused}", "train on the CPU with --cpu 2")
        return
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        busy = free < total / 2
        yield Finding(f"GPU {index}", WARNING if busy else OK, found, "another process uses it" if busy else "")
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    direct = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    if pairs:
        slow = direct < len(pairs)
        fix = "the others exchange through host memory" if slow else ""
        yield Finding("GPU links", WARNING if slow else OK, f"{direct} of {len(pairs)} pairs are direct", fix)


def _disk_findings() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    yield Finding("host memory", OK, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")
    for name, folder in (("disk here", Path.cwd()), ("disk of cache", user_cache())):
        yield _free_space(name, folder, LEAST_FREE_BYTES, "checkpoints and data may not fit; free some space")
    if Path("/dev/shm").is_dir():  # noqa: S108 (looked at, not written to)
        fix = "start the container with --shm-size=8g"
        yield _free_space("shared memory", Path("/dev/shm"), LEAST_SHARED_BYTES, fix)  # noqa: S108
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < LEAST_OPEN_FILES
    yield Finding(
        "open files", WARNING if few else OK, f"at most {files}", f"ulimit -n {LEAST_OPEN_FILES}" if few else ""
    )


def _free_space(name: str, folder: Path, least: int, fix: str) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fits = free >= least
    return Finding(name, OK if fits else WARNING, f"{free / GIB:.1f} GiB free", "" if fits else fix)


def _backend_findings() -> Iterator[Finding]:
    """Lets two ranks add numbers over each backend that a run on this machine would use."""
    import torch
    from torch.multiprocessing.spawn import spawn

    backends = ["gloo", "nccl"] if torch.cuda.device_count() > 1 else ["gloo"]
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn(_add_over_backend, (backend, f"{folder}/meeting"), nprocs=2)  # type: ignore[no-untyped-call]
            except Exception as error:
                fix = "check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall"
                last = str(error).strip().splitlines()[-1:] or [first_line(error)]
                yield Finding(f"two ranks, {backend}", FAILED, last[0], fix)
            else:
                yield Finding(f"two ranks, {backend}", OK, "they meet and add")


def _add_over_backend(rank: int, backend: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, f"file://{file}", timedelta(seconds=MEETING_SECONDS), world_size=2, rank=rank)
    value = torch.full((1,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    dist.destroy_process_group()
    if value.item() != 3.0:
        raise RuntimeError(f"1 + 2 gave {value.item()}")
