"""The job that makes one model of several that were trained."""

from typing import Annotated, Literal

from pydantic import Field

from dryfit.core.jobs.names import Job
from dryfit.core.jobs.train import FinalResult, TrainRequest
from dryfit.core.wire import Wire


class EnsembleMember(Wire):
    """A model that FINAL saved.

    Attributes:
        training: What it was trained by.
        result: What came of it.
        searched: What its trial's value was in the study.
        model_dir: Where it lies.
    """

    training: TrainRequest
    result: FinalResult
    searched: float | None
    model_dir: str


class EnsembleRequest(Wire):
    """Evaluate several models together, and put them into one folder.

    Attributes:
        members: The best first: it decides how a mean becomes an answer.
        model_dir: The folder to write.
        study: The study's name, for the model card.
        with_validation: They were trained on validation too, so that nothing can be chosen by it.
    """

    job: Literal[Job.ENSEMBLE] = Job.ENSEMBLE
    members: Annotated[tuple[EnsembleMember, ...], Field(min_length=2)]
    model_dir: str
    study: str
    with_validation: bool

    @property
    def visible_device(self) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES."""
        return self.members[0].training.visible_device


class EnsembleResult(Wire):
    """What several models are together.

    Attributes:
        validation: Metrics on validation; None where validation was trained on.
        test: Metrics on test; None where the data has none.
        rows: Rows of each split.
        members: What each model came to by itself, in order.
        model_dir: As asked.
    """

    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    members: tuple[FinalResult, ...]
    model_dir: str
