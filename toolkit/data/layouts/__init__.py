"""Turns a row's columns into an example."""
