"""What features add to a run: a class in a file each, and their order."""
