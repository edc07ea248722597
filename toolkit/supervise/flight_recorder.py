"""Reads a rank's last collectives from torch's flight recorder. The only module that calls its private functions.

gloo records only if `TORCH_FR_BUFFER_SIZE` is set; NCCL of newer torch records without it. The dump is read as JSON.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch

from toolkit.ranks import on_this_device

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch._C._distributed_c10d: the name in torch 2.12 and later, and the earlier one."""

DUMP_SECONDS = 3.0
"""The time limit of reading: a hanging device may block the recorder, but must not delay the end of the run."""


def last_collectives() -> str:
    """Returns text with a line for each process group of this rank, or an empty string if nothing is recorded."""
    found: list[str] = []
    # NCCL's recorder asks CUDA which collectives have ended.
    read = on_this_device(lambda: found.append(_describe(_read_entries())))
    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(DUMP_SECONDS)
    return found[0] if found else ""


def _read_entries() -> list[dict[str, Any]]:
    """Returns the recorded entries, oldest first."""
    functions = getattr(torch._C, "_distributed_c10d", None)
    for name in DUMPS:
        if hasattr(functions, name):
            try:
                entries: list[dict[str, Any]] = json.loads(getattr(functions, name)(True, False)).get("entries", [])
            except (RuntimeError, TypeError, ValueError):  # a backend without it, or another form of it
                continue
            return entries
    return []


def _describe(entries: list[dict[str, Any]]) -> str:
    last = {str(entry.get("process_group")): entry for entry in entries}
    lines = [
        f"  {group}: {entry.get('profiling_name')} of {entry.get('input_sizes')}, number "
        f"{entry.get('collective_seq_id')} of its group, {entry.get('state')}"
        for group, entry in last.items()
    ]
    return "Last collectives, by torch's flight recorder:\n" + "\n".join(lines) + "\n" if lines else ""
