"""Settings of torch's launcher, which waits 30 s for ranks that save, and logs forty lines below an error."""

from __future__ import annotations

import logging
import os

SECONDS_TO_SAVE = 600
"""How long ranks that are asked to stop may take to save their state. torch's 30 are too few for a large model."""


def settle_launcher() -> None:
    """Makes torch's launcher wait for saves and log only critical messages.

    Imports its module first, because that sets the levels.
    """
    import torch.distributed.run  # noqa: F401

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))

    distributed = "torch.distributed"
    names = (distributed, f"{distributed}.elastic.agent.server.api", f"{distributed}.elastic.multiprocessing.api")
    for name in (*names, "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
