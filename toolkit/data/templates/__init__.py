"""Renders conversations by chat templates, and finds what the model writes in them."""
