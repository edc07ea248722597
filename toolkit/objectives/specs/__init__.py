"""What the other rooms ask an objective before there is a model; imports neither torch nor transformers."""
