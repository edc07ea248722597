"""Starts ranks, and what runs on them."""
