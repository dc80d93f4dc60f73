"""Rows of a data set: read, checked and split. What a task of one's own needs of them."""

from dryfit.tasks.rows.checked_rows import Readable, Row

__all__ = ["Readable", "Row"]
