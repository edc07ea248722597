"""Writes several completions of each prompt, and makes training rows of them."""
