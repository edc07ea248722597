"""Which attention runs, and what it takes: positions, masks, images."""
