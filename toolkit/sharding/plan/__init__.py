"""Says which modules are sharded together, and by which strategy: data, from the model alone."""
