"""Rows of a data set: read, checked and split. A task of your own imports ``Row`` and ``Readable`` from here."""

from dryfit.tasks.rows.checked_rows import Readable, Row

__all__ = ["Readable", "Row"]
