"""How blocks are run: by block, in chunks, checkpointed, compiled."""
