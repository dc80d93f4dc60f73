"""Requests and results of the jobs that prepare data, train and use models, or call a user's own function."""

from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field

from dryfit.core.jobs.analysis import Analysis
from dryfit.core.jobs.job import Job, JobRequest, ProcessNeeds
from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.settings.execution import DeviceKind, DeviceSpec, ExecutionPlan
from dryfit.core.settings.objective_table import CalledCode
from dryfit.core.settings.tables import DataSettings, ModelSettings, TrialSettings
from dryfit.core.settings.task_facts import MetricName, TaskName
from dryfit.core.settings.trial import FoldScore, Scalar, TrialConfig
from dryfit.core.wire import Wire

_NEVER_S: Final = 1e9


class SplitFacts(Wire):
    """Size of one split, with rows per label and rows with evidence, if the task reads these."""

    rows: int
    label_counts: dict[int, int]
    with_evidence: int | None = None


class ResolveResult(Wire):
    """The result of RESOLVE. A failed check is an error, not a result."""

    data_fingerprint: str
    splits: dict[str, SplitFacts]
    fold_rows: tuple[int, ...] = Field(default=(), description="rows of each fold; empty: the study has no folds")
    revisions: dict[str, str] = Field(description="resolved revision or content hash of each model, by name")
    device: DeviceKind
    device_count: int
    versions: dict[str, str]
    own_file: str = Field(default="", description="file of the user's own function or task, if the study has one")
    weights_bytes: dict[str, int] = Field(
        default_factory=dict[str, int], description="size of each encoder's saved weights, by model name"
    )
    device_spec: DeviceSpec | None = Field(default=None, description="the smallest CUDA device a trial may get")
    device_specs: tuple[DeviceSpec, ...] = Field(default=(), description="of each CUDA device, in CUDA's order")
    device_uuids: tuple[str, ...] = Field(default=(), description="of each CUDA device, in CUDA's order")
    remarks: tuple[str, ...] = Field(default=(), description="remarks about the rows that are no errors")
    labels: tuple[str, ...] = Field(
        default=(), description="names of the classes, given or of the training rows; empty: they are integers"
    )

    def class_name(self, label: int) -> str:
        """Return the name of a class; its number where classes have no names."""
        return self.labels[label] if label < len(self.labels) else str(label)


class ResolveRequest(JobRequest[ResolveResult]):
    """Check the data, tokenise it for some (model, length) pairs, and describe the machine."""

    job: Literal[Job.RESOLVE] = Job.RESOLVE
    task: TaskName
    metrics: tuple[MetricName, ...] = Field(default=(), description="the study's metrics; the task must have them")
    searched: dict[str, tuple[Scalar, ...]] = Field(
        default_factory=dict[str, tuple[Scalar, ...]],
        description="searched keys of the user's own task, each with its choices or its two ends",
    )
    data: DataSettings
    settings: TrialSettings = Field(description="the study file's settings; a pair replaces its model and length")
    pairs: tuple[tuple[ModelSettings, int], ...] = Field(description="models and lengths to prepare")
    cache_dir: str
    device: str
    elsewhere: bool = Field(default=False, description="trials run on CUDA devices of other machines, not this one's")
    precisions: tuple[str, ...] = ()
    processes: int = Field(default=1, ge=1, description="processes per trial; on CUDA each needs a device")


class StopReason(StrEnum):
    """Why training ended early."""

    VERDICT = "verdict"
    """The pruner stopped it."""
    REQUEST = "request"
    """The control process asked it to stop: a checkpoint was written."""
    SIGTERM = "sigterm"
    """A SIGTERM came: a checkpoint was written."""
    EARLY_STOPPING = "early_stopping"
    """Too many validations without a better one: a full result."""


class TrainResult(Wire):
    """The result of TRAIN, OBJECTIVE or TRAINER.

    Attributes:
        value: The best validation's metric; with folds their mean; None if there is none.
        also: Values of the further goals at the best validation, in order; with folds their means.
        best: Index of the best report; None with folds.
        steps: Optimizer steps done, over all folds.
        folds: Scores of the folds done, in order; empty if the trial trains once.
        stopped_by: None if all epochs were done.
        peak_allocated_bytes: Peak device memory of its tensors; None on the CPU.
        peak_reserved_bytes: Peak device memory that the allocator reserved; None on the CPU.
        peak_rss_bytes: Peak host memory of all processes of the trial; None on a device.
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


class TrainRequest(JobRequest[TrainResult]):
    """Train one trial, from its newest valid checkpoint if there is one."""

    job: Literal[Job.TRAIN] = Job.TRAIN
    needs: ClassVar = ProcessNeeds(hides_devices=True)
    config: TrialConfig
    fingerprint: str = Field(description="the trial's recorded fingerprint, which its checkpoints must have")
    plan: ExecutionPlan
    attempt: int = Field(ge=1)
    cache_dir: str
    checkpoint_dir: str = Field(description="resumable checkpoints that this attempt writes")
    kept_checkpoint_dir: str = Field(description="those that ended attempts left; the attempt only reads them")
    best_dir: str = Field(description="folder of the weights of this attempt's best validation")
    kept_best_dir: str = Field(
        description="those that ended attempts left; this attempt's come there when it has ended"
    )
    scored_dir: str = Field(description="folder of the rows of this attempt's best validation, with their answers")
    load_report: str = Field(description="file for the origin of each tensor of the model")
    checkpoint_every_s: float = Field(gt=0)
    verdict_timeout_s: float = Field(gt=0)
    fold_reports: int = Field(default=1, ge=1, description="report indices reserved for each fold")
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None on CPU")
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of the device's memory that its allocator may take"
    )
    diagnostic: bool = Field(default=False, description="blocking launches and device assertions: slow, but exact")
    file_sharing: bool = Field(default=False, description="loader workers share tensors through named files")
    revisions: dict[str, str] = Field(
        default={}, description="what identifies each model since the session began; others are taken as they are"
    )
    own_file: str = Field(default="", description="file of the user's own task")
    own_hash: str = Field(default="", description="its hash since the session began")

    @classmethod
    def apart(
        cls, config: TrialConfig, plan: ExecutionPlan, *, cache_dir: Path, folder: Path, visible_device: str | None
    ) -> Self:
        """Return the request of a trial that is looked at and not trained: nothing of it is kept or reported.

        Args:
            config: What it would learn.
            plan: How it would run.
            cache_dir: The cache of tokenised rows.
            folder: Where its files would lie.
            visible_device: Value of CUDA_VISIBLE_DEVICES; None on CPU.
        """
        names = ("checkpoint_dir", "kept_checkpoint_dir", "best_dir", "kept_best_dir", "scored_dir", "load_report")
        places: dict[str, Any] = {name: str(folder / name) for name in names}
        return cls(
            config=config,
            fingerprint=config.fingerprint,
            plan=plan,
            attempt=1,
            cache_dir=str(cache_dir),
            checkpoint_every_s=_NEVER_S,
            verdict_timeout_s=_NEVER_S,
            visible_device=visible_device,
            **places,
        )


class FinalResult(Wire):
    """The result of FINAL.

    Attributes:
        training: How training ended.
        step: Optimizer steps that its weights were trained for.
        validation: Metrics on validation; None if it was trained on.
        test: Metrics on test; None if the data has no test split, or it was not to be read.
        rows: Rows of each split, and those trained on as ``trained``.
        model_dir: As requested.
        analysis: What the model does well and badly on test, or on validation where the data has no test rows; None
            where only scores were asked for, no rows were left, or the task does not tell rows.
    """

    training: TrainResult
    step: int
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    model_dir: str | None
    analysis: Analysis | None = None


class FinalRequest(JobRequest[FinalResult | TrainResult]):
    """Train a trial's configuration again, evaluate it on test at most once, and save the model.

    Attributes:
        training: As for the trial, with its own folders.
        last_step: Train on train and validation together and stop after this step, as there is no validation left to
            choose the best weights by; None: train on train alone and take the best validation's weights.
        schedule_steps: Length of the schedule; None: that of the training rows alone.
        chosen_dirs: Earlier models of the configuration, for which something was chosen on validation (a threshold);
            the first that exists is used if no validation is left.
        model_dir: Where the model lies in the end; None: only its scores are wanted.
        attempt_model_dir: The attempt's own folder, where it is saved first.
        study: The study's name, for the model card.
        searched: The trial's value in the study, for the model card.
        folds: Number of folds that value is the mean of; 1: it was trained once.
        baseline: The strongest baseline's value of the metric, and what it answers, for the model card.
        facts_file: File of the criteria and groups of the study's rows; it may be missing.
        test: Whether to evaluate on test; else it is not even read.
    """

    job: Literal[Job.FINAL] = Job.FINAL
    training: TrainRequest
    last_step: int | None = Field(default=None, ge=1)
    schedule_steps: int | None = Field(default=None, ge=1)
    chosen_dirs: tuple[str, ...] = ()
    model_dir: str | None
    attempt_model_dir: str
    study: str
    searched: float | None = None
    folds: int = Field(default=1, ge=1)
    baseline: tuple[float, str] | None = None
    facts_file: str = ""
    test: bool = True

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return self.training.process_needs()


class PredictResult(Wire):
    """The result of PREDICT."""

    rows: int
    bad: int = Field(description="rows without a prediction; each has a line with the reason")
    device: DeviceKind


class PredictRequest(JobRequest[PredictResult]):
    """Predict the rows of a source with a trained model.

    Attributes:
        model_dir: A folder saved by a trial or by FINAL.
        source: As in ``[data]``.
        out: The file to write, one line per row.
        temporary: Its name until it is complete; in the folder of ``out``.
        batch_rows: Rows per batch.
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


class TinyLmResult(Wire):
    """Number of weights of the model, and of tokens of its tokenizer."""

    weights: int
    tokens: int


class TinyLmRequest(JobRequest[TinyLmResult]):
    """Write a tiny random language model for experiments, with a tokenizer trained on the rows of a file.

    Attributes:
        folder: The folder to write; made if absent.
        source: JSONL rows with ``criterion`` and ``text``.
        seed: Seed of the weights.
    """

    job: Literal[Job.TINY_LM] = Job.TINY_LM
    folder: str
    source: str
    seed: int = Field(ge=0)


class RowsResult(Wire):
    """The result of ROWS."""

    rows: int


class RowsRequest(JobRequest[RowsResult]):
    """Copy columns of a source's rows, if reading it needs libraries that the control process does not import.

    Attributes:
        source: As in ``[data]``.
        columns: The columns; the first row must have them. None named: all, where a value that JSON cannot hold is the
            object ``{"unwritten": its type}``.
        out: A new file with a line for each row: ``{"row", "values"}``, or ``{"row", "error"}`` if it cannot be read.
    """

    job: Literal[Job.ROWS] = Job.ROWS
    source: str
    columns: tuple[str, ...]
    out: str


class ImportResult(Wire):
    """The result of IMPORT. A function that cannot be imported is an error, not a result.

    Attributes:
        source_file: The file that defines the function; empty if unknown.
        source_hash: Its hash.
        versions: Versions of Python and of the packages that importing the function loaded.
    """

    source_file: str = ""
    source_hash: str
    versions: dict[str, str]


class ImportRequest(JobRequest[ImportResult]):
    """Check that a user's own function can be imported; it is not called."""

    job: Literal[Job.IMPORT] = Job.IMPORT
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    objective: CalledCode
    table: str = Field(default="objective", description="the table of the study file that names it")


class ObjectiveRequest(JobRequest[TrainResult]):
    """Call a user's own function for one trial; the result is a ``TrainResult``.

    Attributes:
        reported: Steps of the reports that earlier attempts made.
        fingerprint: The trial's recorded fingerprint, which is kept in its folder for checkpoints.
        checkpoint_step: The newest step that it can resume from, by an earlier attempt.
        checkpoint_dir: The attempt's own folder for what it needs to go on.
        kept_checkpoint_dir: What ended attempts left; the attempt begins with a copy of it.
        threads: CPU threads for numerical libraries.
        own_file: The file that defines the function.
        own_hash: Its hash since the session began.
    """

    job: Literal[Job.OBJECTIVE] = Job.OBJECTIVE
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    objective: CalledCode
    number: int = Field(ge=0)
    fingerprint: str
    params: dict[str, Scalar]
    seed: int = Field(ge=0)
    attempt: int = Field(ge=1)
    reported: tuple[int, ...]
    checkpoint_step: int | None
    checkpoint_dir: str
    kept_checkpoint_dir: str
    verdict_timeout_s: float = Field(gt=0)
    threads: int = Field(ge=1)
    own_file: str = ""
    own_hash: str = ""
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None: no device")
    diagnostic: bool = Field(default=False, description="as in `TrainRequest`")


class TrainerRequest(JobRequest[TrainResult]):
    """Train what a user's own function makes for one trial; the result is a ``TrainResult``.

    Attributes:
        calling: The call of the function, as for OBJECTIVE; its goals are metrics of the Trainer's evaluations.
        best_dir: Folder of the weights of this attempt's best evaluation; None: nobody keeps them.
        checkpoint_every_s: Seconds between checkpoints that the Trainer does not ask for itself, at evaluations.
        choice: What its plan changes of its arguments; None: nothing.
        memory_fraction: The most of its device that its allocator may take, of trials that share one; None: all.
    """

    job: Literal[Job.TRAINER] = Job.TRAINER
    calling: ObjectiveRequest
    best_dir: str | None
    checkpoint_every_s: float = Field(gt=0)
    choice: ExecutionChoice | None = None
    memory_fraction: float | None = Field(default=None, gt=0, le=1)

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return self.calling.process_needs()


class ScriptRequest(JobRequest[TrainResult]):
    """Run a user's own script for one trial; the result is a ``TrainResult``.

    Attributes:
        calling: As for a function: its ``function`` is the script's command, its goals are metrics.
        results: A file below the trial's folder that the script writes reports to; None: there is none.
        best_dir: Folder of what stays of this attempt: a Trainer's best weights, or all that another script has
            written; None: nobody keeps it.
        checkpoint_every_s: Seconds between checkpoints that a Trainer does not ask for itself, at evaluations.
        choice: What its plan changes of a Trainer's arguments; None: nothing.
        memory_fraction: The most of its device that its allocator may take, of trials that share one; None: all.
    """

    job: Literal[Job.SCRIPT] = Job.SCRIPT
    calling: ObjectiveRequest
    results: str | None
    best_dir: str | None
    checkpoint_every_s: float = Field(gt=0)
    choice: ExecutionChoice | None = None
    memory_fraction: float | None = Field(default=None, gt=0, le=1)

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return self.calling.process_needs()
