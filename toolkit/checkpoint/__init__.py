"""Checkpoints of a run: whole or not there, verified, and read on any number of ranks.

manifest.py says what counts; writer.py saves; reader.py finds and loads; session.py ties both to a run.
"""

from toolkit.checkpoint.manifest import Checkpoint, Manifest, latest, list_checkpoints, read_checkpoint
from toolkit.checkpoint.session import RunCheckpoints

__all__ = ["Checkpoint", "Manifest", "RunCheckpoints", "latest", "list_checkpoints", "read_checkpoint"]
