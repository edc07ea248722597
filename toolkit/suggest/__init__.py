"""Makes a recipe from a model and a file of rows that fits a machine: what `toolkit init` writes.

from toolkit.planning import hardware_of
from toolkit.suggest.suggestion import Machine, suggest
found = suggest("models/llama", "chat.jsonl", Machine(hardware_of("h100_sxm"), 8))
found.recipe, found.reasons
"""
