"""From files or a hub name to micro-batches.

files -> sources -> readers -> layouts -> encode -> documents -> selection -> packing -> samples -> loader, or stream.
"""
