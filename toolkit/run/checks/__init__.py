"""Checks before the first step, on the rows and the model of the run."""
