"""A rank that was forked computes in several threads at once, whatever its parent did before."""

from __future__ import annotations

import os
import threading

import torch
from support import ranks

from toolkit.ranks import free_port

THREADS = 12
FORKS = 20


def compute_in_threads() -> list[str]:
    """What torch said to threads that begin to compute at the same moment."""
    told: list[str] = []
    together = threading.Barrier(THREADS)

    def compute() -> None:
        together.wait()
        try:
            torch.ones(100_000).sum()
        except RuntimeError as error:
            told.append(str(error).splitlines()[0])

    threads = [threading.Thread(target=compute) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@ranks.alone
def forked_ranks() -> list[int]:
    """Exit codes of ranks whose parent has set its number of threads and computed, as a cell of a notebook may."""
    from accelerate import Accelerator

    from toolkit import sharding_kwargs

    torch.set_num_threads(2)
    torch.ones(100_000).sum()
    codes = []
    for _ in range(FORKS):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            Accelerator(cpu=True, **sharding_kwargs("zero3"))
            os._exit(1 if compute_in_threads() else 0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


def test_threads_of_a_forked_rank_find_a_thread_pool() -> None:
    """Without `renew_thread_pool` nearly every fork fails: "Invalid thread pool!"."""
    assert ranks.run_on_ranks(forked_ranks, 1)[0] == [0] * FORKS
