"""Finds and reads the rows of a source."""
