"""The jobs of child processes: what each is asked, and what it answers."""

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dryfit.core.calibration import Calibration, CaseComparison, MemoryCase, Observation
from dryfit.core.failure import ChildFault
from dryfit.core.health import Health
from dryfit.core.memory import Confidence, ExecutionChoice, MemoryPlan, Rung, VerdictKind
from dryfit.core.plan import DeviceKind, DeviceSpec, ExecutionPlan, ExecutionSettings, PlanSubject
from dryfit.core.settings import DataSettings, ModelSettings, ObjectiveSettings, Settings, Task
from dryfit.core.trial import Scalar, TrialConfig
from dryfit.core.wire import Wire


class Job(StrEnum):
    """What a child process is for."""

    RESOLVE = "resolve"
    TRAIN = "train"
    CHECK = "check"
    PLAN = "plan"
    CALIBRATE = "calibrate"
    PROBE = "probe"
    REHEARSE = "rehearse"
    IMPORT = "import"
    OBJECTIVE = "objective"
    FINAL = "final"
    PREDICT = "predict"


ENTRY_POINTS: dict[Job, str] = {
    Job.RESOLVE: "dryfit.preflight:resolve",
    Job.TRAIN: "dryfit.train.entry:train",
    Job.CHECK: "dryfit.preflight:check",
    Job.PLAN: "dryfit.planning:plan",
    Job.CALIBRATE: "dryfit.calibration:calibrate",
    Job.PROBE: "dryfit.preflight:probe",
    Job.REHEARSE: "dryfit.rehearse:rehearse",
    Job.IMPORT: "dryfit.objective.entry:check",
    Job.OBJECTIVE: "dryfit.objective.entry:run",
    Job.FINAL: "dryfit.train.final:final",
    Job.PREDICT: "dryfit.train.predict:predict",
}
"""Where each job's function lives, as ``module:function``; it takes the request body and the child's channel."""


class ResolveRequest(Wire):
    """Check the data, tokenise it for some (model, length) pairs, say what the machine has."""

    job: Literal[Job.RESOLVE] = Job.RESOLVE
    task: Task
    data: DataSettings
    pairs: tuple[tuple[ModelSettings, int], ...] = Field(description="models and lengths to prepare")
    cache_dir: str
    device: str
    precisions: tuple[str, ...] = ()


class SplitFacts(Wire):
    """Size and label counts of one split."""

    rows: int
    label_counts: dict[int, int]


class ResolveResult(Wire):
    """What RESOLVE found. Nothing is missing: a failed check is an error, not a result."""

    data_fingerprint: str
    splits: dict[str, SplitFacts]
    revisions: dict[str, str] = Field(description="resolved revision or content hash of each model, by name")
    device: DeviceKind
    device_count: int
    versions: dict[str, str]
    weights_bytes: dict[str, int] = Field(
        default_factory=dict[str, int], description="each encoder's weights as a trial saves them, by the model's name"
    )
    device_spec: DeviceSpec | None = Field(default=None, description="the smallest CUDA device a trial may get")


class TrainRequest(Wire):
    """Train one trial; go on from the newest good checkpoint if there is one."""

    job: Literal[Job.TRAIN] = Job.TRAIN
    config: TrialConfig
    plan: ExecutionPlan
    attempt: int = Field(ge=1)
    cache_dir: str
    checkpoint_dir: str = Field(description="resumable checkpoints of the trial, shared by its attempts")
    best_dir: str = Field(description="the weights of the best validation so far")
    load_report: str = Field(description="file that says where each tensor of the model came from")
    checkpoint_every_s: float = Field(gt=0)
    verdict_timeout_s: float = Field(gt=0)
    visible_device: str | None = Field(default=None, description="value of CUDA_VISIBLE_DEVICES; None on CPU")


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
        value: The best validation's metric; None where there is none.
        also: Values of the study's further goals at the best validation, in their order.
        best: Index of the best report.
        steps: Optimizer steps done.
        stopped_by: None where all epochs were done.
        peak_allocated_bytes: Most memory its tensors took of the device; None on the CPU.
        peak_reserved_bytes: Most that the allocator took of the device for them; None on the CPU.
        peak_rss_bytes: Most host memory of the process; None on a device.
    """

    value: float | None
    also: tuple[float, ...] = ()
    best: int | None
    steps: int
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
        model_dir: Where to save the model; None: nowhere, its scores are all that is wanted.
        study: The study's name, for the model card.
        searched: What the trial's value was in the study, for the model card.
    """

    job: Literal[Job.FINAL] = Job.FINAL
    training: TrainRequest
    last_step: int | None = Field(default=None, ge=1)
    model_dir: str | None
    study: str
    searched: float | None = None

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


class CheckRequest(Wire):
    """Look at a checkpoint; no weight is read."""

    job: Literal[Job.CHECK] = Job.CHECK
    folder: str = Field(description="a model's folder, or `minilm`")
    task: str | None = Field(description="as in `dryfit.load`; None: what the folder itself says")
    trust: bool = Field(description="run code that comes with the model")


class CheckResult(Wire):
    """What CHECK found. A checkpoint that cannot be loaded is a finding, not an error."""

    health: Health


class StudyTokens(Settings):
    """Where the lengths of a study's rows are known from."""

    data: DataSettings
    cache_dir: str
    data_fingerprint: str


class PlanRequest(Wire):
    """Plan the memory of some subjects on a device; nothing is allocated there."""

    job: Literal[Job.PLAN] = Job.PLAN
    subjects: tuple[PlanSubject, ...]
    device: DeviceSpec
    wishes: ExecutionSettings
    tokens: StudyTokens | None = Field(default=None, description="None: rows of train.max_length are taken")
    trace_dir: str = Field(description="folder of recorded traces, shared by all studies")
    every_rung: bool = Field(default=False, description="price every rung of the ladder, and changes nobody made")


class PlanAnswer(Wire):
    """What the planner found for one subject.

    Attributes:
        memory: The memory of ``execution``; of the plan as asked where it was refused; None where it is unknown.
        execution: What the trial is to be run with; None where it was refused or is unknown.
        fallbacks: What else fits with less memory, in the order to try.
        shortfall_bytes: What the device lacks for the plan as asked; 0 where it fits.
        ladder: Changes, each with what it saves.
        reasons: Why it is unknown or refused.
        torch: Version the traces speak for.
    """

    verdict: VerdictKind
    device: DeviceSpec
    memory: MemoryPlan | None = None
    execution: ExecutionChoice | None = None
    fallbacks: tuple[ExecutionChoice, ...] = ()
    shortfall_bytes: int = 0
    ladder: tuple[Rung, ...] = ()
    reasons: tuple[str, ...] = ()
    confidence: Confidence = Confidence.UNCALIBRATED
    torch: str
    planner_s: float


class PlanResult(Wire):
    """One answer for each subject, in order."""

    answers: tuple[PlanAnswer, ...]


class CalibrateRequest(Wire):
    """Measure what training steps take of a GPU, or compare earlier measurements with plans.

    Attributes:
        case: What to measure; None: compare all that was measured, with every device hidden.
        folder: The exchange: ``CASE.json`` holds a case with its observation, ``CASE.pickle`` the allocator's history.
        calibration_dir: Where to keep what the comparison gives; None: nowhere.
        visible_device: Value of CUDA_VISIBLE_DEVICES.
    """

    job: Literal[Job.CALIBRATE] = Job.CALIBRATE
    case: MemoryCase | None
    folder: str
    calibration_dir: str | None = None
    visible_device: str | None = None


class CalibrateResult(Wire):
    """What CALIBRATE found: an observation, or a calibration and what it was made from."""

    observation: Observation | None = None
    calibration: Calibration | None = None
    comparisons: tuple[CaseComparison, ...] = ()


class ProbeRequest(Wire):
    """Say what this build of torch can use of the machine."""

    job: Literal[Job.PROBE] = Job.PROBE


class ProbeResult(Wire):
    """What PROBE found.

    Attributes:
        cuda_build: Version of CUDA that torch was built for; None: a CPU build.
        devices: The CUDA devices on which a small sum came out right.
        bf16: Whether all of them have bf16.
        trouble: Why torch can use no device, or not all; empty where nothing went wrong.
    """

    torch: str
    cuda_build: str | None
    devices: tuple[DeviceSpec, ...] = ()
    bf16: bool = True
    trouble: str = ""


class RehearseRequest(Wire):
    """Walk through one model's batches and do one step of them; nothing is learned, and nothing is kept.

    Attributes:
        trial: The study's own values with this model, its largest batch and its longest input.
        lengths: Every ``train.max_length`` that this model can get.
        points: Further trials that the space can ask for with this model; each does one small step.
    """

    job: Literal[Job.REHEARSE] = Job.REHEARSE
    trial: TrainRequest
    lengths: tuple[int, ...]
    points: tuple[TrialConfig, ...] = ()


class BatchWalk(Wire):
    """All batches of one split at one length.

    Attributes:
        longest: Tokens of the longest row.
        faults: What is wrong with batches, in words; the first few.
    """

    max_length: int
    split: str
    rows: int
    batches: int
    longest: int
    faults: tuple[str, ...] = ()


class StepFacts(Wire):
    """What one forward and backward pass gave.

    Attributes:
        step_s: Seconds of a step on rows of median length; None where the largest was the only one.
        not_finite: Trainable parameters whose gradient is infinite or NaN.
        untouched: Trainable parameters that got no gradient, or zeros alone.
        micro_batch: Rows in memory at once; fewer than asked for where the device had no more room.
    """

    parameters: int
    trainable: int
    rows: int
    length: int
    micro_batch: int
    loss: float
    largest_s: float
    step_s: float | None = None
    not_finite: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


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


class ErrorParts(Wire):
    """A dryfit error on its way through a file; see :func:`dryfit.core.errors.error_from_parts`."""

    code: str
    doing: str
    found: str
    allowed: str = ""
    hint: str = ""


class Stumble(Wire):
    """A dryfit error that a rehearsal met on its way; it went on with what it could.

    Attributes:
        stage: What was being done: ``tokens``, ``weights``, ``step``, or a point's values.
    """

    stage: str
    error: ErrorParts


class PointFacts(Wire):
    """One small step of a trial that the space can ask for."""

    params: dict[str, Scalar]
    step: StepFacts | None = None
    error: ErrorParts | None = None


class RehearseResult(Wire):
    """What REHEARSE found. A model that cannot be trained is a finding, not an error.

    Attributes:
        step: The largest batch; None where it was not reached.
    """

    walks: tuple[BatchWalk, ...] = ()
    step: StepFacts | None = None
    points: tuple[PointFacts, ...] = ()
    stumbles: tuple[Stumble, ...] = ()


class ChildResult(Wire):
    """A child's last word: the field of its job is set, or ``fault``."""

    resolve: ResolveResult | None = None
    train: TrainResult | None = None
    check: CheckResult | None = None
    plan: PlanResult | None = None
    calibrate: CalibrateResult | None = None
    probe: ProbeResult | None = None
    rehearse: RehearseResult | None = None
    imported: ImportResult | None = None
    final: FinalResult | None = None
    predict: PredictResult | None = None
    fault: ChildFault | None = None
    error: ErrorParts | None = Field(default=None, description="set beside `fault` where a dryfit error was raised")


Body: TypeAlias = (
    ResolveRequest
    | TrainRequest
    | CheckRequest
    | PlanRequest
    | CalibrateRequest
    | ProbeRequest
    | RehearseRequest
    | ImportRequest
    | ObjectiveRequest
    | FinalRequest
    | PredictRequest
)
"""A job."""


class ChildRequest(Wire):
    """What a child is started with.

    Attributes:
        placed_at_s: ``time.monotonic()`` of the control process when it decided to start this child.
        doorbell: A FIFO the child rings after each message; None: the control process polls.
        body: The job itself.
    """

    placed_at_s: float
    doorbell: str | None
    body: Annotated[Body, Field(discriminator="job")]
