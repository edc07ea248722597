"""Turns examples into documents: tokens and which of them are targets."""
