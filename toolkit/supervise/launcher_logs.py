"""What torch's launcher logs of a rank that failed: forty lines about exit codes, below the rank's own error."""

from __future__ import annotations

import logging


def silence_launcher() -> None:
    """Has torch's launcher log nothing below what is critical. Its module sets levels when it is imported."""
    import torch.distributed.run  # noqa: F401

    for name in ("", ".elastic.agent.server.api", ".elastic.multiprocessing.api"):
        logging.getLogger(f"torch.distributed{name}").setLevel(logging.CRITICAL)
