"""The memory of a run, before it runs."""
