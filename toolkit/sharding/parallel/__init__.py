"""Ranks that share rows or experts."""
