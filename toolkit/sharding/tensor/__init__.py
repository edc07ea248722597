"""Tensor parallelism: a group of ranks cuts the matrices of each layer, and computes the same rows together."""
