"""The phases of a run, as heartbeats, the watchdog and extensions of the loop name them."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """A phase that a rank is in."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    COLLECTIVE = 4
    OPTIMIZER = 5
    SAVE = 6
    EVALUATE = 7
    EXPORT = 8
    RESTORE = 9
    WAIT = 10
    GENERATE = 11
