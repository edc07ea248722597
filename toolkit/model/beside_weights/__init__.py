"""Keeps the files of a base that are beside its weights, for the export."""
