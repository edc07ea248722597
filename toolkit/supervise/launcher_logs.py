"""Silences torch's launcher, which logs forty lines about exit codes below the error of a failed rank."""

from __future__ import annotations

import logging


def silence_launcher() -> None:
    """Makes torch's launcher log only critical messages. Imports its module first, because that sets the levels."""
    import torch.distributed.run  # noqa: F401

    distributed = "torch.distributed"
    names = (distributed, f"{distributed}.elastic.agent.server.api", f"{distributed}.elastic.multiprocessing.api")
    for name in (*names, "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
