"""Offloads optimizer state to host memory, bit for bit exact, and overlaps the step with compute.

engine.py holds the schedule; capture.py, executors.py and worker.py are its parts. facade.py connects it to the stock
model, optimizer and `Accelerator`.
"""

from toolkit.sharding.offload.engine import OffloadEngine, engine_of
from toolkit.sharding.offload.facade import connect
from toolkit.sharding.offload.settings import OffloadSettings, parse_offload

__all__ = ["OffloadEngine", "OffloadSettings", "connect", "engine_of", "parse_offload"]
