"""Reads the images of rows."""
