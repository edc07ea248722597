"""Parts of a model, and models without memory for their weights."""
