"""From files or a hub name to micro-batches: sources -> text -> cache -> loader."""
