"""Turns examples into tokens and targets."""
