"""Turns files or a data set of the hub into micro-batches.

files -> sources -> readers -> layouts -> encode -> documents -> selection -> packing -> samples -> loader, or stream.
"""
