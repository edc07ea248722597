"""Optimizers, their parameter groups, and the learning rate's schedule."""
