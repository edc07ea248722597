"""Saves and loads checkpoints: atomic, verified, and readable on any number of ranks.

manifest.py decides which checkpoints count, writer.py saves, resume.py finds the one to resume from, state.py loads
it, session.py connects them to a run, and consolidate.py converts a checkpoint to a Hugging Face folder. Listing
checkpoints imports no torch.
"""

from toolkit.checkpoint.manifest import Checkpoint, Manifest, latest, list_checkpoints, read_checkpoint

__all__ = ["Checkpoint", "Manifest", "latest", "list_checkpoints", "read_checkpoint"]
