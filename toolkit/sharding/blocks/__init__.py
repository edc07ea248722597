"""How blocks are run: by block, checkpointed, compiled."""
