"""Request and result of the job that makes an ensemble of trained models."""

from typing import Annotated, Literal

from pydantic import Field

from dryfit.core.jobs.analysis import Analysis
from dryfit.core.jobs.job import Job, JobRequest, ProcessNeeds
from dryfit.core.jobs.train import FinalResult, TrainRequest
from dryfit.core.wire import Wire


class EnsembleMember(Wire):
    """A model that FINAL saved.

    Attributes:
        training: The request it was trained with.
        result: The result of its training.
        searched: The value of its trial in the study.
        model_dir: Its folder.
    """

    training: TrainRequest
    result: FinalResult
    searched: float | None
    model_dir: str


class EnsembleResult(Wire):
    """The metrics of an ensemble.

    Attributes:
        validation: Metrics on validation; None where validation was trained on.
        test: Metrics on test; None where the data has none.
        rows: Rows of each split.
        members: The result of each model by itself, in order.
        model_dir: As asked.
        analysis: As of :class:`~dryfit.core.jobs.train.FinalResult`.
    """

    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    members: tuple[FinalResult, ...]
    model_dir: str
    analysis: Analysis | None = None


class EnsembleRequest(JobRequest[EnsembleResult]):
    """Evaluate several models as an ensemble and save them in one folder.

    Attributes:
        members: The models; the first, the best, decides how averaged scores become an answer.
        model_dir: Where the folder lies in the end.
        attempt_model_dir: The attempt's own folder, where it is written first.
        study: The study's name, for the model card.
        with_validation: They were trained on validation too, so nothing can be chosen by it.
        scored_dir: The attempt's own folder for the test rows with their answers; empty: they are not kept.
        facts_file: File of the criteria and groups of the study's rows; it may be missing.
    """

    job: Literal[Job.ENSEMBLE] = Job.ENSEMBLE
    members: Annotated[tuple[EnsembleMember, ...], Field(min_length=2)]
    model_dir: str
    attempt_model_dir: str
    study: str
    with_validation: bool
    scored_dir: str = ""
    facts_file: str = ""

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return self.members[0].training.process_needs()
