"""The work to do: the schema of a recipe, and its loading. Imports neither torch nor transformers."""
