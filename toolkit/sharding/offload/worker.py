"""Runs the optimizer steps of units in a thread, while the main thread runs the next forward."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

Task = Callable[[], None]


class Worker:
    """Runs tasks one after the other. Once a task has failed, the rest are abandoned.

    Args:
        device: the device on which the tasks run.
        threads: torch's number of threads in the worker's thread.

    Attributes:
        error: the exception of the task that failed, or None.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self.error: BaseException | None = None
        # Not queue.Queue: `_finish` may run in a finalizer, and only SimpleQueue's `put` is reentrant.
        self._queue: queue.SimpleQueue[tuple[Task, Task] | None] = queue.SimpleQueue()
        started, before = threading.Event(), torch.get_num_threads()
        # The thread holds the worker weakly: otherwise it would never be collected, and the thread never end.
        self._thread = threading.Thread(
            target=_run_all,
            args=(self._queue, weakref.ref(self), device, threads, started),
            name="offload-step",
            daemon=True,
        )
        self._thread.start()
        started.wait()
        # torch keeps the number set last, by whichever thread, for the threads that begin later: the data's, a save's.
        torch.set_num_threads(before)
        # Also at the end of the process, which must not go away below a step.
        self._finish = weakref.finalize(self, _end_thread, self._queue, self._thread)

    def submit(self, run: Task, abandon: Task) -> None:
        """Queues a task. If it fails or is not run, calls `abandon`, which must release whoever waits for it."""
        self._queue.put((run, abandon))

    @property
    def alive(self) -> bool:
        """Returns whether the thread is still running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread once all queued tasks are done."""
        self._finish()


def _end_thread(tasks: Any, thread: threading.Thread) -> None:
    tasks.put(None)
    # The last reference can go with a task, on this very thread, which cannot wait for itself.
    if threading.current_thread() is not thread:
        thread.join()


def _run_all(
    tasks: Any, owner: weakref.ref[Worker], device: torch.device, threads: int, started: threading.Event
) -> None:
    try:
        getattr(torch, device.type).set_device(device)  # a new thread starts on device 0
        torch.get_num_threads()  # a thread's first use of torch takes the kept number, and would undo the next line
        torch.set_num_threads(threads)  # launchers set OMP_NUM_THREADS=1
    finally:
        started.set()
    failed = False
    while (task := tasks.get()) is not None:
        run, abandon = task
        try:
            # Once one unit has kept its old weights, no later step may build on them.
            if not failed:
                # A new thread begins with gradients on, whatever the main one has.
                with torch.no_grad():
                    run()
        # Anything at all: the main thread waits for this unit, and raises it there.
        except BaseException as error:
            failed = True
            worker = owner()
            if worker is not None:
                worker.error = error
        # Without this, whoever waits for the unit would wait forever.
        if failed:
            abandon()
        del task, run, abandon  # they hold gradients
