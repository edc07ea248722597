"""Loads the model that is trained: weights, adapters, attention."""
