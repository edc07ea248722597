"""Reads finished and living runs, and sets them side by side on a page."""
