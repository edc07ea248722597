"""The schema of a recipe, which says what a run does, and its loading. Imports neither torch nor transformers."""
