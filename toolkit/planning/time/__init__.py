"""Estimates the time and the traffic of a step before it runs."""
