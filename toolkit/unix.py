"""Python's modules that only Unix has; each is None on Windows."""

from __future__ import annotations

__all__ = ["resource"]

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]
