"""The model that is trained: loading, weights, adapters, attention."""
