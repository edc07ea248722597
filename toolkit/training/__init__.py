"""The training loop, what it records, and how it ends."""
