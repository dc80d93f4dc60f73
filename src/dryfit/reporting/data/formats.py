"""The formats that a study can be exported to."""

from enum import StrEnum


class ExportFormat(StrEnum):
    """A format of ``dryfit export``."""

    OPTUNA = "optuna"
    """An Optuna storage: a journal, or SQLite if the file's name says so."""
    CSV = "csv"
    """One row for each trial."""

    @property
    def file_name(self) -> str:
        """Return the default name of the file."""
        return {ExportFormat.OPTUNA: "optuna.journal", ExportFormat.CSV: "trials.csv"}[self]
