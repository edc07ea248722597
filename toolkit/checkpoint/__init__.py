"""Checkpoints of a run: whole or not there, verified, and read on any number of ranks.

manifest.py says what counts; writer.py saves; reader.py finds and loads; session.py ties both to a run;
consolidate.py makes a Hugging Face folder of one. Listing checkpoints imports no torch.
"""

from toolkit.checkpoint.manifest import Checkpoint, Manifest, latest, list_checkpoints, read_checkpoint

__all__ = ["Checkpoint", "Manifest", "latest", "list_checkpoints", "read_checkpoint"]
