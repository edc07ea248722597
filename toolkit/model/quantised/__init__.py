"""Frozen weights in 4 or 8 bits."""
