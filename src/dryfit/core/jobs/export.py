"""The jobs MERGE and EXPORT: save a trained model in another form."""

from typing import Literal

from pydantic import Field

from dryfit.core.jobs.job import Job, JobRequest
from dryfit.core.wire import Wire


class ExportResult(Wire):
    """The folder that was written.

    Attributes:
        out: The folder.
        loaded_by: The class of transformers that loads it: ``AutoModelForSequenceClassification``.
        size_bytes: Of all its files.
    """

    out: str
    loaded_by: str
    size_bytes: int


class ExportRequest(JobRequest[ExportResult]):
    """Save a trained model for plain transformers.

    Attributes:
        model_dir: A folder saved by a trial or by FINAL.
        out: The new folder.
        encoder_alone: Leave the head out.
        threads: CPU threads.
        trust: Run code that comes with the model.
    """

    job: Literal[Job.EXPORT] = Job.EXPORT
    model_dir: str
    out: str
    encoder_alone: bool = False
    threads: int = Field(ge=1)
    trust: bool = False


class MergeResult(Wire):
    """Folder and size of the merged model."""

    out: str
    size_bytes: int


class MergeRequest(JobRequest[MergeResult]):
    """Merge a saved model's adapters into its base.

    Attributes:
        model_dir: A folder saved by a trial or by FINAL.
        out: The new folder.
        threads: CPU threads.
        trust: Run code that comes with the model.
    """

    job: Literal[Job.MERGE] = Job.MERGE
    model_dir: str
    out: str
    threads: int = Field(ge=1)
    trust: bool = False
