"""A rank's heartbeat: a record of fixed size that its training thread overwrites and other processes read."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

from toolkit.training.extension import Extension
from toolkit.training.phase import Phase

# Sequence number, phase, step, monotonic nanoseconds, and the sequence number again.
_BEAT = struct.Struct("=qqqqq")
# Monotonic nanoseconds at which the rank's watching thread last ran, and its process id.
_WATCHER = struct.Struct("=qq")

RECORD_BYTES = _BEAT.size + _WATCHER.size


@dataclass(frozen=True)
class Beat:
    """A rank's record.

    Attributes:
        sequence: number of beats; ranks that train the same steps count alike.
        step: the optimizer step under way, or 0 before the first.
        at_ns: time.monotonic_ns of the last beat; processes of one host share that clock.
        watched_ns: when the rank's watching thread last ran.
    """

    sequence: int
    phase: Phase
    step: int
    at_ns: int
    watched_ns: int
    pid: int


class Heartbeat(Extension):
    """Writes a rank's record. A beat takes no lock and no system call, so it is cheap enough for many times a step.

    Args:
        memory: at least RECORD_BYTES that others may read, or None if nobody reads.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(RECORD_BYTES) if memory is None else memory
        self._sequence = 0
        self._step = 0

    def enter_phase(self, phase: Phase, step: int = 0) -> None:
        self._sequence, self._step = self._sequence + 1, step
        self._write(phase)

    def wait(self) -> None:
        """Records that this rank waits for a disk or a store. Ranks that wait for it do not count as late then.

        It is not counted as a beat, since ranks that train the same steps may wait differently often.
        """
        self._write(Phase.WAIT)

    def _write(self, phase: Phase) -> None:
        sequence = self._sequence
        _BEAT.pack_into(self._memory, 0, sequence, phase, self._step, time.monotonic_ns(), sequence)


def mark_watched(memory: bytearray | mmap.mmap, now_ns: int, pid: int) -> None:
    """Records that the rank's watching thread runs."""
    _WATCHER.pack_into(memory, _BEAT.size, now_ns, pid)


def read_heartbeat(memory: bytes) -> Beat | None:
    """Returns the record, or None while it is being written or before the first beat."""
    if len(memory) < RECORD_BYTES:
        return None
    sequence, phase, step, at_ns, again = _BEAT.unpack_from(memory)
    if sequence != again or sequence == 0:
        return None
    return Beat(sequence, Phase(phase), step, at_ns, *_WATCHER.unpack_from(memory, _BEAT.size))
