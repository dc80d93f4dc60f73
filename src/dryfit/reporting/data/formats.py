"""The formats that a study, or a model, can be exported to."""

from enum import StrEnum


class ExportFormat(StrEnum):
    """A format of ``dryfit export``."""

    OPTUNA = "optuna"
    """Of a study: an Optuna storage, a journal, or SQLite if the file's name says so."""
    CSV = "csv"
    """Of a study: one row for each trial."""
    TRANSFORMERS = "transformers"
    """Of a model: a folder that plain transformers loads, with the same scores."""
    ENCODER = "transformers-encoder"
    """Of a model: its encoder alone, as ``AutoModel`` loads it."""

    @property
    def of_model(self) -> bool:
        """Whether a model is exported, and not a study."""
        return self in (ExportFormat.TRANSFORMERS, ExportFormat.ENCODER)
