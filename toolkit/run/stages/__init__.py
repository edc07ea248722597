"""The stages of a run, in the order of their types."""
