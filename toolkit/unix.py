"""Python's modules that only Unix has; each is None on Windows."""

from __future__ import annotations

__all__ = ["fcntl", "resource"]

try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None  # type: ignore[assignment]
