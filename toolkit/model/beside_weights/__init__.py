"""Keeps the files of a base that are next to its weights, for the export."""
