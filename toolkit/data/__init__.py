"""From files or a hub name to micro-batches.

sources -> layouts -> encode -> documents -> selection -> packing -> samples -> loader, or stream.
"""
