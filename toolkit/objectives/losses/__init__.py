"""Losses as functions of tensors."""
