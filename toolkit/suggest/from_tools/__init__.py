"""Recipes from the configurations of other tools: a table for each tool, from its keys to a recipe's."""
