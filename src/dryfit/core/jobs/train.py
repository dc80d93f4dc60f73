"""Jobs that prepare, train and use models, or call a function of the user's own."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from dryfit.core.jobs.names import Job
from dryfit.core.settings.execution import DeviceKind, DeviceSpec, ExecutionPlan
from dryfit.core.settings.tables import DataSettings, ModelSettings, ObjectiveSettings, TrialSettings
from dryfit.core.settings.task_facts import MetricName, TaskName
from dryfit.core.settings.trial import FoldScore, Scalar, TrialConfig
from dryfit.core.wire import Wire


class ResolveRequest(Wire):
    """Check the data, tokenise it for some (model, length) pairs, say what the machine has."""

    job: Literal[Job.RESOLVE] = Job.RESOLVE
    task: TaskName
    metrics: tuple[MetricName, ...] = Field(default=(), description="what the study optimises; asked of the task")
    searched: dict[str, tuple[Scalar, ...]] = Field(
        default_factory=dict[str, tuple[Scalar, ...]],
        description="searched keys that only the task knows to be its own, each with its choices or its ends",
    )
    data: DataSettings
    settings: TrialSettings = Field(
        description="the study file's own; of a pair, its model and length take their place"
    )
    pairs: tuple[tuple[ModelSettings, int], ...] = Field(description="models and lengths to prepare")
    cache_dir: str
    device: str
    precisions: tuple[str, ...] = ()
    processes: int = Field(default=1, ge=1, description="of each trial; on CUDA each needs a device of its own")


class SplitFacts(Wire):
    """Size of one split, and how many rows have each label or any evidence, as far as the task reads these."""

    rows: int
    label_counts: dict[int, int]
    with_evidence: int | None = None


class ResolveResult(Wire):
    """What RESOLVE found. Nothing is missing: a failed check is an error, not a result."""

    data_fingerprint: str
    splits: dict[str, SplitFacts]
    fold_rows: tuple[int, ...] = Field(default=(), description="rows of each of the study's folds; none: it has none")
    revisions: dict[str, str] = Field(description="resolved revision or content hash of each model, by name")
    device: DeviceKind
    device_count: int
    versions: dict[str, str]
    weights_bytes: dict[str, int] = Field(
        default_factory=dict[str, int], description="each encoder's weights as a trial saves them, by the model's name"
    )
    device_spec: DeviceSpec | None = Field(default=None, description="the smallest CUDA device a trial may get")
    device_uuids: tuple[str, ...] = Field(default=(), description="of each CUDA device, as CUDA counts them")
    remarks: tuple[str, ...] = Field(default=(), description="what should be known of the rows, and is no error")


class TrainRequest(Wire):
    """Train one trial; go on from the newest good checkpoint if there is one."""

    job: Literal[Job.TRAIN] = Job.TRAIN
    config: TrialConfig
    fingerprint: str = Field(description="whose checkpoints it takes: the trial's as recorded when it was asked for")
    plan: ExecutionPlan
    attempt: int = Field(ge=1)
    cache_dir: str
    checkpoint_dir: str = Field(description="resumable checkpoints of the trial, shared by its attempts")
    best_dir: str = Field(description="the weights of the best validation so far")
    load_report: str = Field(description="file that says where each tensor of the model came from")
    checkpoint_every_s: float = Field(gt=0)
    verdict_timeout_s: float = Field(gt=0)
    fold_reports: int = Field(default=1, ge=1, description="numbers that each fold has for its reports")
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None on CPU")
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of its device that its allocator may take"
    )
    diagnostic: bool = Field(default=False, description="blocking launches and device assertions: slow, and exact")
    file_sharing: bool = Field(default=False, description="loader workers share tensors by name, not by open files")


class StopReason(StrEnum):
    """Why training ended before its time."""

    VERDICT = "verdict"
    """The pruner said stop."""
    REQUEST = "request"
    """The control process asked: a checkpoint was written."""
    SIGTERM = "sigterm"
    """Somebody else asked: a checkpoint was written."""
    EARLY_STOPPING = "early_stopping"
    """No better validation for long enough: a full result."""


class TrainResult(Wire):
    """How a trial's process ended that trained, or called the user's own function.

    Attributes:
        value: The best validation's metric; with folds the mean of them; None where there is none.
        also: Values of the study's further goals at the best validation, in their order; with folds their means.
        best: Index of the best report; None with folds, each of which has its own.
        steps: Optimizer steps done, of all folds.
        folds: What each fold has come to that is done, in order; empty where the trial trains once.
        stopped_by: None where all epochs were done.
        peak_allocated_bytes: Most memory its tensors took of the device; None on the CPU.
        peak_reserved_bytes: Most that the allocator took of the device for them; None on the CPU.
        peak_rss_bytes: Most host memory of the process, or of all processes of the trial together; None on a device.
    """

    value: float | None
    also: tuple[float, ...] = ()
    best: int | None
    steps: int
    folds: tuple[FoldScore, ...] = ()
    stopped_by: StopReason | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None


class FinalRequest(Wire):
    """Train a trial's configuration once more, evaluate it once on test, and save the model.

    Attributes:
        training: As for the trial itself, with folders of its own.
        last_step: Train on train and validation together and stop after so many steps of the trial's schedule, as there
            is no validation left to choose the best by; None: on train alone, the best validation's weights.
        schedule_steps: How long that schedule is; None: as long as that of the training rows alone.
        chosen_dirs: Models of the configuration for which something was chosen on validation (a threshold): where there
            is none left to choose by, the first that is there says what.
        model_dir: Where to save the model; None: nowhere, its scores are all that is wanted.
        study: The study's name, for the model card.
        searched: What the trial's value was in the study, for the model card.
        folds: How many of the trial's folds that is the mean over; 1: it was trained once.
    """

    job: Literal[Job.FINAL] = Job.FINAL
    training: TrainRequest
    last_step: int | None = Field(default=None, ge=1)
    schedule_steps: int | None = Field(default=None, ge=1)
    chosen_dirs: tuple[str, ...] = ()
    model_dir: str | None
    study: str
    searched: float | None = None
    folds: int = Field(default=1, ge=1)

    @property
    def visible_device(self) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES."""
        return self.training.visible_device


class FinalResult(Wire):
    """A model that was trained to be used.

    Attributes:
        training: How training ended.
        step: Optimizer steps behind its weights.
        validation: Metrics on validation; None where validation was trained on.
        test: Metrics on test; None where the data has none.
        rows: Rows of each split, and of what was trained on as ``trained``.
        model_dir: As asked.
    """

    training: TrainResult
    step: int
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    model_dir: str | None


class PredictRequest(Wire):
    """Predict the rows of a source with a trained model.

    Attributes:
        model_dir: A folder that a trial, or FINAL, saved.
        source: As in ``[data]``.
        out: Where to write one line a row.
        temporary: What is written until it is complete; in the folder of ``out``.
        batch_rows: Rows at once.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: CPU threads.
        trust: Run code that comes with the model.
    """

    job: Literal[Job.PREDICT] = Job.PREDICT
    model_dir: str
    source: str
    out: str
    temporary: str
    batch_rows: int = Field(ge=1)
    device: str
    threads: int = Field(ge=1)
    trust: bool = False


class PredictResult(Wire):
    """What PREDICT did."""

    rows: int
    bad: int = Field(description="rows without a prediction; each has a line that says why")
    device: DeviceKind


class MergeRequest(Wire):
    """Merge a saved model's adapters into its base.

    Attributes:
        model_dir: A folder that a trial, or FINAL, saved.
        out: The new folder.
        threads: CPU threads.
        trust: Run code that comes with the model.
    """

    job: Literal[Job.MERGE] = Job.MERGE
    model_dir: str
    out: str
    threads: int = Field(ge=1)
    trust: bool = False


class MergeResult(Wire):
    """Where the merged model lies, and how large it is."""

    out: str
    size_bytes: int


class TinyLmRequest(Wire):
    """Write a tiny random language model, with a tokenizer trained on the rows of a file, to try things with.

    Attributes:
        folder: Where to; made if absent.
        source: JSONL rows, of which ``criterion`` and ``text`` are read.
        seed: Of the weights.
    """

    job: Literal[Job.TINY_LM] = Job.TINY_LM
    folder: str
    source: str
    seed: int = Field(ge=0)


class TinyLmResult(Wire):
    """What was written: how many weights the model has, and how many tokens its tokenizer."""

    weights: int
    tokens: int


class RowsRequest(Wire):
    """Copy columns of a source's rows, where reading it takes libraries that the control process does not import.

    Attributes:
        source: As in ``[data]``.
        columns: Which; the first row must have them.
        out: A new file: a line for each row, ``{"row", "values"}``, or ``{"row", "error"}`` where it cannot be read.
    """

    job: Literal[Job.ROWS] = Job.ROWS
    source: str
    columns: tuple[str, ...]
    out: str


class RowsResult(Wire):
    """What ROWS did."""

    rows: int


class ImportRequest(Wire):
    """Look whether a function of the user's own can be called; it is not."""

    job: Literal[Job.IMPORT] = Job.IMPORT
    objective: ObjectiveSettings


class ImportResult(Wire):
    """What IMPORT found. A function that cannot be called is an error, not a result.

    Attributes:
        source_hash: Of the file that the function is from.
        versions: Of Python and of the packages that importing the function brought in.
    """

    source_hash: str
    versions: dict[str, str]


class ObjectiveRequest(Wire):
    """Call a function of the user's own for one trial; its answer is a `TrainResult`.

    Attributes:
        reported: Steps of the reports that earlier attempts have made.
        checkpoint_step: The newest step that an earlier attempt said it could go on from.
        threads: CPU threads that numerical libraries are told to use.
    """

    job: Literal[Job.OBJECTIVE] = Job.OBJECTIVE
    objective: ObjectiveSettings
    number: int = Field(ge=0)
    params: dict[str, Scalar]
    seed: int = Field(ge=0)
    attempt: int = Field(ge=1)
    reported: tuple[int, ...]
    checkpoint_step: int | None
    checkpoint_dir: str
    verdict_timeout_s: float = Field(gt=0)
    threads: int = Field(ge=1)
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None: no device")
    diagnostic: bool = Field(default=False, description="as in `TrainRequest`")
