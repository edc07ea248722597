"""Silences torch's launcher, which logs forty lines about exit codes below the error of a failed rank."""

from __future__ import annotations

import logging


def silence_launcher() -> None:
    """Makes torch's launcher log only critical messages. Imports its module first, because that sets the levels."""
    import torch.distributed.run  # noqa: F401

    for name in ("", ".elastic.agent.server.api", ".elastic.multiprocessing.api"):
        logging.getLogger(f"torch.distributed{name}").setLevel(logging.CRITICAL)
