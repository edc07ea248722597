"""A whole run, from the recipe to its result."""
