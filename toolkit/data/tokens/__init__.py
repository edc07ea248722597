"""Loads and trains tokenizers."""
