"""A run's folder: who may write there, and what says where a run came from."""
