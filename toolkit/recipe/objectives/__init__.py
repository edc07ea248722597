"""What other packages ask about an objective before there is a model; imports neither torch nor transformers."""
