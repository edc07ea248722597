"""A time limit for what others' files make us do: chat templates are programs, and a configuration may be absurd."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass

import psutil

LOOK_SECONDS = 0.5


class TimeLimitError(BaseException):  # no `except Exception` of a template or of a model's code may stop it
    """It takes too long."""


class time_limit:  # noqa: N801 (a context manager)
    """Raises TimeLimitError in this thread, whichever it is, if the block takes longer; limits do not nest.

    Args:
        more_bytes: raises it, too, where the process grows by so much between two looks at the block.

    It comes between two instructions of Python: a single call of a library in C is not cut short.
    """

    def __init__(self, seconds: float, more_bytes: float = float("inf")) -> None:
        self._seconds, self._more_bytes = seconds, more_bytes

    def __enter__(self) -> None:
        self._watcher, self._thread = _Watcher.of_this_process(), threading.get_ident()
        self._watcher.blocks[self._thread] = _Block(time.monotonic() + self._seconds, self._more_bytes)

    def __exit__(self, *_: object) -> None:
        # What the watcher has raised comes at the latest with the call below, so nothing is ever taken back: where
        # a profiler or a debugger looks on, Python 3.11 would then never go on.
        with self._watcher.lock:
            expired = self._watcher.blocks.pop(self._thread, None) is None
        if expired:
            raise TimeLimitError


@dataclass
class _Block:
    until: float
    more_bytes: float
    most_bytes: float | None = None

    def is_over(self, now: float, resident: int) -> bool:
        if self.most_bytes is None:  # most blocks are left before anybody looks
            self.most_bytes = resident + self.more_bytes
        return now > self.until or resident > self.most_bytes


class _Watcher:
    """A thread that looks after the blocks of a process. No signal: these would reach the main thread alone."""

    _only: _Watcher | None = None

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.lock = threading.Lock()
        self._pid = os.getpid()
        threading.Thread(target=self._look, name="time-limit", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> _Watcher:
        # A process that was forked has the object, and not the thread.
        if cls._only is None or cls._only._pid != os.getpid():
            cls._only = cls()
        return cls._only

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with self.lock:
                now, blocks = time.monotonic(), self.blocks.copy()
                resident = psutil.Process().memory_info().rss if blocks else 0
                for thread in [thread for thread, block in blocks.items() if block.is_over(now, resident)]:
                    del self.blocks[thread]
                    _raise_in(thread, TimeLimitError)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Python raises `kind` in that thread, between two of its instructions."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
