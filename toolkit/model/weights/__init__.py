"""Reads a model's weights, under the names of its files."""
