"""Offload of optimizer state to host memory, exact and hidden behind compute.

engine.py holds the schedule; capture.py, executors.py and worker.py are its parts; facade.py is what the
stock model, optimizer and `Accelerator` see of it.
"""

from toolkit.sharding.offload.engine import OffloadEngine
from toolkit.sharding.offload.facade import connect, engine_of
from toolkit.sharding.offload.settings import OffloadSettings, parse_offload

__all__ = ["OffloadEngine", "OffloadSettings", "connect", "engine_of", "parse_offload"]
