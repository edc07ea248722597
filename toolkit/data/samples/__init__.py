"""Puts tokenised rows into samples and batches."""
