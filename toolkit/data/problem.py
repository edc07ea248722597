"""The error of one row."""

from __future__ import annotations


class RowProblem(ValueError):  # noqa: N818 (a row's fate, not a failure of the program)
    """Why a row cannot be trained on.

    The text is the reason under which the data report counts rows, so it names no particulars of one row.
    """
