"""Requests and results of the jobs that prepare data, train, evaluate and save models."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field

from dryfit.settings.choices import Direction
from dryfit.settings.errors import LoadError
from dryfit.settings.execution import ExecutionChoice, ExecutionPlan
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.tables import CalledCode, DataSettings, ModelSettings, TrialSettings
from dryfit.settings.task_facts import MetricName, TaskName
from dryfit.settings.text import few
from dryfit.settings.trial import FoldScore, Goal, Scalar, TrialConfig, better
from dryfit.settings.wire import Job, JobRequest, ProcessNeeds, R, Wire

# Analysis of a model's answers in numbers: returned by FINAL, stored in model folders, shown in reports.
#
# Numbers that are not finite, or not defined for these rows, are None. Of a row there is its id, never its text.


ANALYSIS_FILE = "analysis.json"
"""Name of the file in a model's folder."""


class ClassScore(Wire):
    """The scores of a class.

    Attributes:
        label: The class.
        support: Rows that have it.
        answered: Rows answered with it.
        right: Rows that are both.
        precision: ``right`` of ``answered``.
        recall: ``right`` of ``support``.
        f1: Their harmonic mean; 0 where no row is right, as in ``f1_macro``.
    """

    label: int
    support: int
    answered: int
    right: int
    precision: float | None
    recall: float | None
    f1: float


class CalibrationBin(Wire):
    """The probabilities that lie between two bounds.

    Attributes:
        low: The smallest that belongs to it.
        high: The next larger bin's; 1 for the bin of the probability 1 as well.
        count: How many.
        p: Their mean.
        share: The share of them that came true.
    """

    low: float
    high: float
    count: int
    p: float
    share: float


class PrecisionRecall(Wire):
    """Precision over recall of a class as its threshold falls; a number of each list is one threshold's.

    Attributes:
        label: The class.
        threshold: The probability above which the model answers with it.
        precision: At the answers as they were given.
        recall: Likewise.
        average_precision: The area under the steps.
        thresholds: Falling; at most 100 of those that decide differently.
        precisions: Of the rows whose probability is that or larger.
        recalls: Likewise.
    """

    label: int
    threshold: float
    precision: float | None
    recall: float | None
    average_precision: float | None
    thresholds: tuple[float, ...]
    precisions: tuple[float, ...]
    recalls: tuple[float, ...]


class WorstRow(Wire):
    """A row that a model has wrong.

    Attributes:
        id: Its own.
        right: What is right: classes, a number, or characters ``12-40``; empty of generated text.
        answered: What the model said, likewise.
        values: Its numbers by name: ``loss`` (of a window or token the mean), ``p`` of the answer, ``p_right``,
            ``token_f1`` ...
    """

    id: str
    right: str
    answered: str
    values: dict[str, float | None]


class ClassAnalysis(Wire):
    """Answers that are classes.

    Attributes:
        classes: How many there are.
        several: A row may have several of them.
        scores: Of each class; of many, of those with the most rows.
        confusion: Rows by right class (first) and answered class, both in the order of ``scores``; empty with several.
        ece: The expected calibration error.
        calibration: Of the likeliest class's probability; with several, of every class's.
        curves: Of class 1 of two; with several, of the classes with the most rows.
        worst: Wrong answers, the largest loss first: the surest errors.
        names: Of all classes, from class 0 on; empty: they are numbers.
    """

    classes: int
    several: bool
    scores: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    ece: float | None
    calibration: tuple[CalibrationBin, ...]
    curves: tuple[PrecisionRecall, ...]
    worst: tuple[WorstRow, ...]
    names: tuple[str, ...] = ()

    def name(self, label: int) -> str:
        """Return the name of a class; its number where classes have no names."""
        return self.names[label] if self.names else str(label)


class SpanAnalysis(Wire):
    """Answers that are spans.

    Attributes:
        found: Rows with a span that are answered with one.
        missed: Rows with a span that are answered with none.
        invented: Rows without a span that are answered with one.
        left: Rows without a span that are answered with none.
        worst: The smallest token F1 first, then the largest loss.
    """

    found: int
    missed: int
    invented: int
    left: int
    worst: tuple[WorstRow, ...]


class TextAnalysis(Wire):
    """Generated texts, or tokens that were only scored.

    Attributes:
        asked: Prompts that an answer was generated for; 0: none was.
        exact: Answers equal to the wanted one.
        worst: Wrong answers, the smallest token F1 and then the largest loss first; where none was generated, the rows
            of the largest loss.
    """

    asked: int
    exact: int
    worst: tuple[WorstRow, ...]


class NumberAnalysis(Wire):
    """Answers that are numbers.

    Attributes:
        mean: Of the right ones.
        deviation: Their standard deviation.
        answered_mean: Of the answers.
        answered_deviation: Likewise; smaller than that of the right ones where a model keeps to the mean.
        worst: The largest error first.
    """

    mean: float | None
    deviation: float | None
    answered_mean: float | None
    answered_deviation: float | None
    worst: tuple[WorstRow, ...]


class PartScores(Wire):
    """The metrics of some rows.

    Attributes:
        name: The criterion, or the group; of all rows ``all``.
        rows: How many.
        scores: Metrics by name.
    """

    name: str
    rows: int
    scores: dict[str, float | None]


class Analysis(Wire):
    """What a model does well and badly on the rows of a split.

    Attributes:
        split: ``test``; ``validation`` where the data has no test rows, by which its weights were chosen.
        rows: Rows that are analysed.
        of: Rows of the split.
        overall: The metrics of all of them.
        classes: Of answers that are classes.
        spans: Of answers that are spans.
        texts: Of generated text.
        numbers: Of a regression.
        criteria: By the question about the text, the most frequent first.
        groups: By group, where they are few.
        notes: What is missing, and why.
    """

    split: str
    rows: int
    of: int
    overall: PartScores
    classes: ClassAnalysis | None = None
    spans: SpanAnalysis | None = None
    texts: TextAnalysis | None = None
    numbers: NumberAnalysis | None = None
    criteria: tuple[PartScores, ...] = ()
    groups: tuple[PartScores, ...] = ()
    notes: tuple[str, ...] = ()


# Folders of saved models: find them in a study's folder, and explain why another folder is no model.


DRYFIT_FILE: Final = "dryfit.json"
"""What a saved model says of itself; a folder without it is none of dryfit's."""
LEDGER_FILE: Final = "ledger.jsonl"
"""What makes a folder a study's."""

MODEL_FOLDER: Final = "a folder that `dryfit train` wrote, or a trial's best weights"
_PLAIN: Final = ("config.json", "adapter_config.json", "modules.json")
_INSIDE: Final = ("model", "best", "final/*/model", "trials/*/best")
"""Where models lie in the folder of a final training, a trial, or a study."""


def is_model(folder: Path) -> bool:
    """Return whether dryfit saved a model, or several as one, in a folder."""
    return (folder / DRYFIT_FILE).is_file()


def is_plain_model(folder: Path) -> bool:
    """Return whether another program saved a model in a folder: transformers, peft or sentence-transformers."""
    return not is_model(folder) and any((folder / name).is_file() for name in _PLAIN)


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study's."""
    return (folder / LEDGER_FILE).is_file()


def models_in(folder: Path) -> list[Path]:
    """Return the models that lie in the folder of a study, a trial or a final training; trained ones first."""
    return [file.parent for pattern in _INSIDE for file in sorted(folder.glob(f"{pattern}/{DRYFIT_FILE}"))]


def _plain_models_in(folder: Path) -> list[Path]:
    return [place for pattern in _INSIDE for place in sorted(folder.glob(pattern)) if is_plain_model(place)]


def model_folder(model: Path | str, doing: str) -> Path:
    """Return the whole path of a model's folder.

    Args:
        model: What the user named.
        doing: For messages.

    Raises:
        LoadError: There is no such folder, or it is none of a model; the models in it are named.
    """
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise LoadError(doing, found, MODEL_FOLDER, "check the path")
    if is_model(folder):
        return folder
    there = models_in(folder)
    if there:
        what = "it is a study's folder" if is_study(folder) else f"it has no {DRYFIT_FILE}"
        raise LoadError(doing, what, MODEL_FOLDER, f"take a model that lies in it: {few(map(str, there))}")
    plain = [folder] if is_plain_model(folder) else _plain_models_in(folder)
    if plain:
        are = "is a model" if len(plain) == 1 else "are models"
        found = f"{few(map(str, plain))} {are} that other code than dryfit's saved"
        hint = "dryfit.load, transformers or peft open it; `dryfit export MODEL_DIR --to transformers -o OUT` copies it"
        raise LoadError(doing, found, MODEL_FOLDER, hint)
    if is_study(folder):
        found = "it is a study's folder, and no model lies in it"
        raise LoadError(doing, found, MODEL_FOLDER, f"train its best trial once more: `dryfit train {folder}`")
    hint = "dryfit.load opens any model; its rows are known of those alone that dryfit saved"
    raise LoadError(doing, f"it has no {DRYFIT_FILE}", MODEL_FOLDER, hint)


# Request and result of the job BASELINES: values of a study's metric without a model.


class BaselineScore(Wire):
    """A baseline and its metrics on the validation split, or their means over the folds.

    Attributes:
        name: A word: ``majority``; also the folder of its rows.
        words: What it answers.
        metrics: Those that can be computed of it.
        is_linear: It is trained: a linear model.
    """

    name: str
    words: str
    metrics: dict[str, float]
    is_linear: bool = False


class BaselinesResult(Wire):
    """The result of BASELINES.

    Attributes:
        baselines: The plainest first, then the best of its kind, then linear models.
        notes: Which are missing, and why.
    """

    baselines: tuple[BaselineScore, ...] = ()
    notes: tuple[str, ...] = ()

    def strongest(self, goal: Goal) -> BaselineScore | None:
        """Return the baseline that is best by a metric, the plainer of equals; None where none has it."""
        strongest: BaselineScore | None = None
        for one in self.baselines:
            than = strongest.metrics[goal.name] if strongest is not None else math.nan
            if better(one.metrics.get(goal.name, math.nan), than, goal.direction):
                strongest = one
        return strongest


class BaselinesRequest(JobRequest[BaselinesResult]):
    """Compute a study's baselines, and keep their rows and the groups of all rows.

    Attributes:
        metric: The study's metric, by which the best of several constant answers is found.
        settings: The study file's own.
        data_fingerprint: Of the rows that the study was resolved with.
        out_dir: Folder of a folder of rows for each baseline, and of the facts of rows; it belongs to the job.
        limit_s: How long each baseline may take.
    """

    job: Literal[Job.BASELINES] = Job.BASELINES
    task: TaskName
    metric: MetricName
    direction: Direction
    data: DataSettings
    settings: TrialSettings
    cache_dir: str
    data_fingerprint: str
    out_dir: str
    limit_s: float = Field(gt=0)


# The jobs MERGE and EXPORT: save a trained model in another form.


class SavedModelRequest(JobRequest[R]):
    """Do something with a trained model.

    Attributes:
        model_dir: A folder saved by a trial or by FINAL.
        out: What is written, which is new.
        threads: CPU threads.
        trust: Run code that comes with the model.
    """

    model_dir: str
    out: str
    threads: int = Field(ge=1)
    trust: bool = False


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


class ExportRequest(SavedModelRequest[ExportResult]):
    """Save a trained model for plain transformers.

    Attributes:
        encoder_alone: Leave the head out.
    """

    job: Literal[Job.EXPORT] = Job.EXPORT
    encoder_alone: bool = False


class MergeResult(Wire):
    """Folder and size of the merged model."""

    out: str
    size_bytes: int


class MergeRequest(SavedModelRequest[MergeResult]):
    """Merge a saved model's adapters into its base."""

    job: Literal[Job.MERGE] = Job.MERGE


# Requests and results of the jobs that prepare data, train and use models, or call a user's own function.


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


class AttemptRequest(JobRequest[TrainResult]):
    """Train for one trial in one process, by a built-in task or by the user's own function."""

    fingerprint: str = Field(description="the trial's recorded fingerprint, which its checkpoints must have")
    attempt: int = Field(ge=1)
    checkpoint_dir: str = Field(description="folder of what this attempt writes to go on from")
    kept_checkpoint_dir: str = Field(description="what ended attempts left there; the attempt only reads it")
    verdict_timeout_s: float = Field(gt=0)
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None: no device")
    diagnostic: bool = Field(default=False, description="blocking launches and device assertions: slow, but exact")
    own_file: str = Field(default="", description="file of the user's own task or function")
    own_hash: str = Field(default="", description="its hash since the session began")


class TrainRequest(AttemptRequest):
    """Train one trial, from its newest valid checkpoint if there is one."""

    job: Literal[Job.TRAIN] = Job.TRAIN
    needs: ClassVar = ProcessNeeds(hides_devices=True)
    config: TrialConfig
    plan: ExecutionPlan
    cache_dir: str
    best_dir: str = Field(description="folder of the weights of this attempt's best validation")
    kept_best_dir: str = Field(
        description="those that ended attempts left; this attempt's come there when it has ended"
    )
    scored_dir: str = Field(description="folder of the rows of this attempt's best validation, with their answers")
    load_report: str = Field(description="file for the origin of each tensor of the model")
    checkpoint_every_s: float = Field(gt=0)
    fold_reports: int = Field(default=1, ge=1, description="report indices reserved for each fold")
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of the device's memory that its allocator may take"
    )
    file_sharing: bool = Field(default=False, description="loader workers share tensors through named files")
    revisions: dict[str, str] = Field(
        default={}, description="what identifies each model since the session began; others are taken as they are"
    )

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


class PredictRequest(SavedModelRequest[PredictResult]):
    """Predict the rows of a source with a trained model.

    Attributes:
        source: As in ``[data]``.
        temporary: Its name until it is complete; in the folder of ``out``.
        batch_rows: Rows per batch.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    job: Literal[Job.PREDICT] = Job.PREDICT
    source: str
    temporary: str
    batch_rows: int = Field(ge=1)
    device: str


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


class ObjectiveRequest(AttemptRequest):
    """Call a user's own function for one trial; the attempt's own folder begins as a copy of what ended attempts left.

    Attributes:
        reported: Steps of the reports that earlier attempts made.
        checkpoint_step: The newest step that it can resume from, by an earlier attempt.
        threads: CPU threads for numerical libraries.
    """

    job: Literal[Job.OBJECTIVE] = Job.OBJECTIVE
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    objective: CalledCode
    number: int = Field(ge=0)
    params: dict[str, Scalar]
    seed: int = Field(ge=0)
    reported: tuple[int, ...]
    checkpoint_step: int | None
    threads: int = Field(ge=1)


class OwnTrainingRequest(JobRequest[TrainResult]):
    """Train by the user's own code for one trial; the result is a ``TrainResult``.

    Attributes:
        calling: The call of the code, as for OBJECTIVE; its goals are metrics.
        best_dir: Folder of what stays of this attempt: a Trainer's best weights, or all that another script has
            written; None: nobody keeps it.
        checkpoint_every_s: Seconds between checkpoints that a Trainer does not ask for itself, at evaluations.
        choice: What its plan changes of a Trainer's arguments; None: nothing.
        memory_fraction: The most of its device that its allocator may take, of trials that share one; None: all.
    """

    calling: ObjectiveRequest
    best_dir: str | None
    checkpoint_every_s: float = Field(gt=0)
    choice: ExecutionChoice | None = None
    memory_fraction: float | None = Field(default=None, gt=0, le=1)

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return self.calling.process_needs()


class TrainerRequest(OwnTrainingRequest):
    """Train what a user's own function makes; its goals are metrics of the Trainer's evaluations."""

    job: Literal[Job.TRAINER] = Job.TRAINER


class ScriptRequest(OwnTrainingRequest):
    """Run a user's own script: the ``function`` of the call is its command.

    Attributes:
        results: A file below the trial's folder that the script writes reports to; None: there is none.
    """

    job: Literal[Job.SCRIPT] = Job.SCRIPT
    results: str | None
