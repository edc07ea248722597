"""Generates text, and counts right answers."""
