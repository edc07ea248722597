"""From files or a hub name to micro-batches.

sources -> readers -> layouts -> encode -> documents -> selection -> packing -> samples -> loader, or stream.
"""
