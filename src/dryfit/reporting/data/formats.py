"""What a study can be exported to."""

from enum import StrEnum


class ExportFormat(StrEnum):
    """For whom the file is."""

    OPTUNA = "optuna"
    """An Optuna storage: a journal, or SQLite where the file's name ends so."""
    CSV = "csv"
    """One row a trial."""

    @property
    def file_name(self) -> str:
        """The file that is written where none is named."""
        return {ExportFormat.OPTUNA: "optuna.journal", ExportFormat.CSV: "trials.csv"}[self]
