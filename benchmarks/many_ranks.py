"""What grows with the ranks of a run, with ranks that one process plays one after the other.

    python benchmarks/many_ranks.py [--ranks 8 64 512 4096]

Of each number of ranks, eight a host: the files and the manifest of a checkpoint, and how long it takes to write and
find it, to read the headers of its files once (which each rank did before), to merge the weights for an export; a look
at the heartbeats of all hosts; the place where ranks meet; and the bytes of a base that each strategy's ranks read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from facts import facts, show, tell
from growth import _small_run
from safetensors.torch import save_file
from torch.distributed import TCPStore

HOST = 8
"""Ranks of a host."""

ROWS, WIDTH = 4, 256
"""Rows of the played tensor on each rank."""


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return round(time.perf_counter() - started, 4)


def played_checkpoint(made: Path, ranks: int, folder: Path) -> Any:
    """Writes the files that `ranks` ranks would, each a slice of one tensor, and a manifest. Returns the manifest."""
    from toolkit.checkpoint.manifest import COMPLETE, MANIFEST, file_entry, read_checkpoint
    from toolkit.checkpoint.state import MODEL
    from toolkit.paths import write_synced

    folder.mkdir(parents=True)
    like = read_checkpoint(made)
    name = f"{MODEL}embedding"
    for rank in range(ranks):
        where = {name: {"saved_offsets": [rank * ROWS, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0", "format": "pt"}
        path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({name: torch.full((ROWS, WIDTH), float(rank))}, path, metadata)
        shutil.copy(made / "rank_00000.json", folder / f"rank_{rank:05d}.json")
    shutil.copy(made / "metrics.jsonl", folder)
    files = {path.name: file_entry(path) for path in sorted(folder.iterdir())}
    manifest = replace(like, world_size=ranks, files=files, tensors={name: ["float32", [ranks * ROWS, WIDTH]]})
    text = manifest.to_json()
    write_synced(folder / MANIFEST, text)
    write_synced(folder / COMPLETE, hashlib.sha256(text.encode()).hexdigest())
    return manifest


def checkpoint(ranks: int, made: Path, folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    from toolkit.checkpoint.consolidate import read_whole
    from toolkit.checkpoint.manifest import MANIFEST, check_files, look_at

    place = folder / f"run/checkpoints/{made.name}"
    seconds = {"write": timed(lambda: played_checkpoint(made, ranks, place))}
    seconds["find"] = timed(lambda: look_at(place))
    manifest = look_at(place).manifest
    assert manifest is not None, look_at(place).problem
    mine = sorted(manifest.files)[0::ranks]
    seconds["check of one rank"] = timed(lambda: check_files(place, manifest, mine))
    seconds["headers"] = timed(lambda: HuggingFaceStorageReader(str(place)).read_metadata())
    seconds["merge"] = timed(lambda: list(read_whole(place, manifest, 2**30, average=False)))
    return {
        "files": len(list(place.iterdir())),
        "manifest KiB": round((place / MANIFEST).stat().st_size / 1024, 1),
        **{f"{what} s": value for what, value in seconds.items()},
    }


def watch(ranks: int, folder: Path) -> dict[str, Any]:
    """A look of one rank at the others, at once and a minute long; what all ranks read together."""
    from toolkit.supervise import watched
    from toolkit.supervise.rank_status import RankStatus, to_text
    from toolkit.training.extensions.heartbeat import RECORD_BYTES, Heartbeat, mark_watched
    from toolkit.training.phase import Phase

    local, shared = folder / "local", folder / "run/.beats"
    local.mkdir()
    shared.mkdir(parents=True)
    memory = bytearray(RECORD_BYTES)
    Heartbeat(memory).enter_phase(Phase.FORWARD, 1)
    mark_watched(memory, time.monotonic_ns(), os.getpid())
    (local / "rank_00000").write_bytes(memory)
    for first in range(HOST, ranks, HOST):
        places = [RankStatus(rank, "n", 1, "S", "forward", 1, 1, 0.0, 0.0) for rank in range(first, first + HOST)]
        (shared / f"host_{first:05d}.json").write_text(to_text(places, 1, time.time()))
    seen = watched.Watch(memory, 0, local, shared, 600.0, 5.0, threading.get_ident())
    read: list[Path] = []
    read_host = watched.read_host
    watched.read_host = lambda path: read.append(path) or read_host(path)
    now = time.monotonic()
    seconds = timed(lambda: seen.look(now))
    for look in range(1, 60):
        seen.look(now + 5.0 * look)
    watched.read_host = read_host
    return {"look s": seconds, "heartbeat files read a second, all ranks": round(len(read) * ranks / 300)}


def meeting(ranks: int) -> dict[str, Any]:
    """Each rank says where it is, and one asks for the others; a full mesh of gloo does so on every rank."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=120))
    address = b"an address of this length: " + bytes(60)
    told = timed(lambda: [store.set(f"rank {rank}", address) for rank in range(ranks)])
    asked = timed(lambda: [store.get(f"rank {rank}") for rank in range(ranks)])
    return {"all tell s": told, "one asks s": asked, "all ask s (product)": round(asked * ranks, 1)}


def base(ranks: int, folder: Path) -> dict[str, Any]:
    """Bytes of a base that the ranks of a host read: slices under zero3, everything under ddp."""
    from toolkit.model.weights.weights import SafetensorsWeights, all_rows

    path = folder / "base.safetensors"
    weight = torch.zeros(4096, 64)
    save_file({"weight": weight}, path)
    read: list[int] = []
    weights = SafetensorsWeights({"weight": (path, "weight")}, lambda name, rows: read.append(rows.nbytes))
    share = -(-len(weight) // ranks)
    for rank in range(ranks):
        weights.read("weight", weight, (slice(min(rank * share, 4096), min((rank + 1) * share, 4096)),))
    sliced = sum(read)
    read.clear()
    for _ in range(HOST):
        weights.read("weight", weight, all_rows(weight))
    return {"zero3, all ranks / base": sliced / weight.nbytes, "ddp, one host / base": sum(read) / weight.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as start:
        (Path(start) / "small").mkdir()
        made = _small_run(Path(start) / "small")
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                parts = [checkpoint(ranks, made, Path(folder)), watch(ranks, Path(folder)), meeting(ranks)]
                found[ranks] = {
                    name: value for part in [*parts, base(ranks, Path(folder))] for name, value in part.items()
                }
    tell({**facts(), "found": found}, options.output)
    rows = [[name, *(of[name] for of in found.values())] for name in next(iter(found.values()))]
    show("ranks", ["", *map(str, found)], rows)


if __name__ == "__main__":
    main()
