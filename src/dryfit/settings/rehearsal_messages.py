"""Request and result of a rehearsal: anyone's training script, run on a virtual GPU.

All bytes are integers. A *line* is ``path:number`` of the script's own code; a *source* is the deepest line of any
code outside torch and dryfit, so that of a library's model where the script only calls ``trainer.train()``.
"""

from dataclasses import field
from typing import Final, Literal

from dryfit.settings.choices import Wall
from dryfit.settings.memory_terms import Confidence, DeviceSpec, Effect, MemoryCategory, PeakAt, StepPhase, VerdictKind
from dryfit.settings.older_python import StrEnum
from dryfit.settings.records import Message, Record
from dryfit.settings.text import Shown, gib

REHEARSED_VARIABLE: Final = "DRYFIT_REHEARSAL"
"""Environment variable that marks the process of a rehearsal: it must not begin another."""


STAND_INS: Final = (
    *("triton", "flash_attn", "flash_attn_interface", "xformers", "causal_conv1d", "mamba_ssm", "apex"),
    "transformer_engine",
)
"""Packages of which there is a stand-in where they are not installed."""

BATCH: Final = "per_device_train_batch_size"
ACCUMULATION: Final = "gradient_accumulation_steps"
EVALUATION_BATCH: Final = "per_device_eval_batch_size"
CHECKPOINTING: Final = ("activation_checkpointing", "gradient_checkpointing")
"""The names of one argument, of which a version of transformers has one or both; the newer name first."""

FAILED_BY_ITSELF: Final = "the script failed by itself"
NO_STEP_TAKEN: Final = "no optimizer took a step"
"""Reason of a rehearsal that was ended by an exception of the script."""


class ScriptEnd(StrEnum):
    """How a rehearsed script ended."""

    FINISHED = "finished"
    """It ran to its end, shortened."""
    STOPPED = "stopped"
    """Enough steps were seen, and it was ended there."""
    OUT_OF_MEMORY = "out_of_memory"
    """An out-of-memory error that it did not catch."""
    FAILED = "failed"
    """It failed by itself."""
    NO_STEP = "no_step"
    """It ended, or the time was up, before any step of an optimizer; a script that ended after a backward pass, or that
    makes no optimizer, has finished."""


class LineBytes(Record):
    """Bytes that one line of the script holds at the peak.

    Attributes:
        line: Line of the script's own code; empty where none was running.
        code: The text of that line.
        source: Deepest line outside of torch: of a library, or the same.
        source_code: The text of that line; empty where it is the same.
    """

    line: str
    code: str
    source: str
    module: str
    category: MemoryCategory
    bytes: int
    source_code: str = ""


class StepMemory(Record):
    """Memory of one optimizer step.

    Attributes:
        number: From 1.
        peak_bytes: Most allocated within it.
        end_bytes: Allocated at its end.
    """

    number: int
    peak_bytes: int
    end_bytes: int


class HostTensors(Record):
    """Host memory of one rank's weights, gradients and states that lie on the host; the data of batches is left out.

    Attributes:
        held_bytes: At the end of the last step.
        pinned_bytes: The page-locked part of that, with the rounding of torch's allocator.
        peak_bytes: Most at once, while the script loads its model included.
    """

    held_bytes: int
    pinned_bytes: int
    peak_bytes: int


class Growth(Record):
    """Memory that a step adds and nothing frees.

    Attributes:
        bytes_per_step: By how much the end of a step lies above that of the step before.
        line: Line of the script that made most of what is kept.
    """

    bytes_per_step: int
    line: str
    code: str
    source: str


class EvaluationGrowth(Record):
    """Memory that an evaluation keeps of each batch until its end: logits, as a rule.

    Attributes:
        batches_left_out: How many more batches it has than were rehearsed; None: not known.
        line: Line of the script that made most of what is kept.
    """

    bytes_per_batch: int
    batches_left_out: int | None
    line: str
    code: str
    source: str


CHARACTERS: Final = "characters"
"""The name of what is measured of texts that the script tokenises only after its data loader."""


class LargestBatch(Record):
    """The largest batch of the script's own data.

    Attributes:
        shapes: Shape of each tensor of the batch by its name; of texts alone: rows, and characters of the longest one.
        seen: Batches that were collated to find it.
        of: Batches in the loader; None where it has no length.
        fed_first: Whether the rehearsal trained on it first.
    """

    shapes: dict[str, tuple[int, ...]]
    seen: int
    of: int | None
    fed_first: bool


class Muted(Record):
    """Something that the script would have done outside of its process.

    Attributes:
        what: ``wandb run``, ``hub repository``, ``checkpoint``, ...
        where: Path, repository or address.
        bytes: What would have been written; None where nobody knows.
    """

    what: str
    where: str
    bytes: int | None = None


class Unknown(Record):
    """Something that cannot be known without a device, and where the script asked for it."""

    what: str
    line: str
    code: str


class TimelinePoint(Record):
    """Allocated and reserved bytes after an event, and who made it."""

    event: int
    step: int
    phase: StepPhase
    allocated_bytes: int
    reserved_bytes: int
    module: str
    line: str
    source: str


class RehearsalMemory(Record):
    """Memory of a rehearsed script; the first fields are those of a memory plan.

    Attributes:
        required_bytes: ``min_cap + overhead + margin``: the capacity that the device must have.
        least_bytes: The capacity without what kernels may do without: tensors that compiled code may fuse, scratch
            memory of kernels that nobody knows. Then ``required_bytes`` is an upper bound. None: there is none.
        nccl_bytes: Buffers of NCCL's communicators, a part of the overhead: an allowance, which is not measured.
        by_line: What is held at the peak, largest first.
        by_module: The same by the module that made it.
        timeline: A sample of events: all peaks, and at most 2 000 others.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    min_cap_bytes: int
    overhead_bytes: int
    margin_bytes: int
    required_bytes: int
    fragmented_bytes: int
    by_category: dict[MemoryCategory, int]
    by_phase: dict[StepPhase, int]
    peak_at: PeakAt
    peak_line: str
    peak_code: str
    peak_source: str
    by_line: tuple[LineBytes, ...]
    by_module: dict[str, int]
    steps: tuple[StepMemory, ...]
    growth: Growth | None = None
    evaluation_growth: EvaluationGrowth | None = None
    timeline: tuple[TimelinePoint, ...] = ()
    least_bytes: int | None = None
    nccl_bytes: int = 0

    def between(self, capacity_bytes: int, cause: str = "what its kernels keep") -> "tuple[VerdictKind, str] | None":
        """Return the verdict of the two bounds, and why; None: there are none, or the device has room for both."""
        least_bytes, most_bytes = self.least_bytes, self.required_bytes
        if least_bytes is None or most_bytes <= capacity_bytes:
            return None
        kept = f"between {gib(least_bytes)} and {gib(most_bytes)}, by {cause}"
        return (VerdictKind.REFUSED if least_bytes > capacity_bytes else VerdictKind.UNKNOWN), f"it needs {kept}"


class OutOfMemory(Record):
    """An out-of-memory error that the virtual GPU raised.

    Attributes:
        message: As torch words it.
        caught: Whether the script went on after it.
    """

    message: str
    requested_bytes: int
    line: str
    code: str
    source: str
    phase: StepPhase
    step: int
    caught: bool


class StepTime(Record):
    """How long one optimizer step takes on the device, estimated.

    Attributes:
        estimate_s: Median.
        low_s: Four of five steps take at least as long as this, and at most ``high_s``: an interval of 80 %.
        high_s: Its upper end.
        level: How well the device's reach is known: measured, power-limited, guessed, calibrated.
        busy_share: Share of the time in which the device computes.
        launch_bound_high_s: What a slow host may take, where that exceeds the device's time; else None.
        by_kind: Share of the device's time by kind of operator, the largest first.
        basis: Who measured the device's reach.
        not_counted: What a run has besides.
        decides: Which of the device's shares most of the time depends on: ``tensor``, ``simt`` or ``bandwidth``.
        assumed: What no measurement was held against: compiled code, collectives.
        optimizer_s: Part of the estimate that does not depend on the batch: clipping and the optimizer.
    """

    estimate_s: float
    low_s: float
    high_s: float
    level: str
    busy_share: float
    launch_bound_high_s: float | None
    by_kind: dict[str, float]
    basis: str
    not_counted: tuple[str, ...]
    decides: str = ""
    assumed: tuple[str, ...] = ()
    optimizer_s: float = 0.0


class FittedReach(Record):
    """What a device must reach so that the rehearsed step takes as long as a measured one.

    Attributes:
        quantity: What decides on the step: ``tensor``, ``simt`` or ``bandwidth``.
        value: Share of the published peak; None: no share gives that time.
        before: The share without the measurement.
        why: Why there is none.
    """

    quantity: str
    value: float | None
    before: float | None
    why: str = ""


class Interval(Record):
    """An amount that is not known exactly: its median, and the ends of an interval of 80 %."""

    estimate: float
    low: float
    high: float


class RunCost(Interval):
    """What a run costs on a device.

    Attributes:
        currency: Of the user's price; empty: not said.
        per_hour: The price of one device.
        as_of: The day of the price, ISO 8601.
        is_old: Whether the price is older than 90 days.
    """

    currency: str
    per_hour: float
    as_of: str
    is_old: bool = False


class RunTime(Record):
    """How long the script trains, where nothing ends it early.

    Attributes:
        steps: Optimizer steps; None: not known.
        source: Who says so: ``TrainingArguments``, ``Lightning``, ``the script``, ``--train-steps``.
        epoch_steps: Optimizer steps in which the training loader is read once; None: the loader has no length.
        batch_share: Elements of the loader's mean batch, where those of the timed step's are 1; None: not known.
        batches_per_s: Batches that the loader made on this machine in one process; None: not measured.
        workers: Processes of the loader that the script asks for.
        hours: Of all steps; None: steps or seconds a step are not known.
        cost: Of all devices; None: no price was given.
    """

    steps: int | None
    source: str
    epoch_steps: int | None
    batch_share: float | None
    batches_per_s: float | None
    workers: int
    hours: Interval | None = None
    cost: RunCost | None = None


class StepWork(Record):
    """Arithmetic of one optimizer step, and the least time that the device could take for it.

    Attributes:
        flops_per_step: Of matrix products, convolutions and attention, forward and backward.
        bytes_per_step: Read and written by all operators.
        least_step_s: Sum over operators of the longer of arithmetic and traffic at the device's published rates;
            None where the device has none (an amount of memory).
        rates: What the time was computed with, and their source.
        step_time: How long the step takes; None where nothing is known of what the device reaches.
    """

    flops_per_step: int
    bytes_per_step: int
    least_step_s: float | None = None
    rates: str = ""
    step_time: StepTime | None = None


ArgumentValue = str | int | float | bool | None
"""Value of a field of ``transformers.TrainingArguments`` that the ladder may change."""


class SeenArguments(Record):
    """The ``transformers.TrainingArguments`` that a script made, the first one if it made several.

    Attributes:
        values: Those that the ladder may change, by the names that the installed version has.
        checkpointing: Which of these switches activation checkpointing.
        from_command_line: Whether they were parsed from the script's arguments; else they stand in its code.
    """

    values: dict[str, ArgumentValue]
    checkpointing: str
    from_command_line: bool

    def whole(self, name: str) -> int:
        """Return the whole number above zero that an argument is; 0: it is none."""
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


class PricedArguments(Record):
    """A change of the script's arguments, rehearsed.

    Attributes:
        arguments: As they are added to the command line: ``--per_device_train_batch_size 2 ...``.
        required_bytes: None where the rehearsal did not tell.
    """

    arguments: tuple[str, ...]
    change: str
    effect: Effect
    required_bytes: int | None
    fits: bool


class RehearsalAnswer(Shown, Message):
    """What a rehearsal says of a script.

    Attributes:
        verdict: ``fits``, ``refused`` or ``unknown``; ``fits_with`` where it does not fit as it is, but with
            arguments of the ladder that keep the experiment.
        memory: None where nothing was allocated.
        assumed: Packages that were taken to be there, each with the reason and the source of what they take.
        reasons: Why it is unknown, refused or could not run.
        at_least: Whether the memory is a lower bound: the script did not go through, or could not be followed.
        training_arguments: None where the script made none.
        traceback: Of a script that failed by itself.
        run: How long it trains; None where it made no step.
        killed_by: Name of the signal that ended its process before it could answer; empty: none did.
        wall: What kept the script from the user's files; None: no script was run.
        ranks_wanted: Size of the process group that the script made, where fewer ranks were rehearsed; else 0.
        sized_by_values: Whether sizes depend on values that nobody knows: the largest were taken.
        sent: Bytes that a rank sends in one optimizer step, by kind; None for one rank.
        libraries: Versions of the libraries for training that the script imported, beside torch.
        host_peak_bytes: Most host memory of the rehearsal itself.
        host: None where no tensor of the host was without values.
        others: The same recording on other devices. One with an out-of-memory error is an answer of a device without a
            limit, and the error is where the device would refuse first: what the script does then is not known.
        apart: Why other devices need a rehearsal of their own; empty: they do not.
        fitted: What a measured step says of the device; None: none was given.
    """

    verdict: VerdictKind
    end: ScriptEnd
    device: DeviceSpec
    ranks: int = 1
    ranks_wanted: int = 0
    sized_by_values: bool = False
    memory: RehearsalMemory | None = None
    shortfall_bytes: int = 0
    out_of_memory: tuple[OutOfMemory, ...] = ()
    work: StepWork | None = None
    run: RunTime | None = None
    sent: dict[str, int] | None = None
    worst_batch: LargestBatch | None = None
    wall: Wall | None = None
    muted: tuple[Muted, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    at_least: bool = False
    training_arguments: SeenArguments | None = None
    ladder: tuple[PricedArguments, ...] = ()
    traceback: str = ""
    killed_by: str = ""
    confidence: Confidence = Confidence.UNCALIBRATED
    torch: str = ""
    libraries: dict[str, str] = field(default_factory=dict[str, str])
    rehearsal_s: float = 0.0
    host_peak_bytes: int = 0
    host: HostTensors | None = None
    others: "tuple[RehearsalAnswer, ...]" = ()
    apart: str = ""
    fitted: FittedReach | None = None

    @property
    def went_through(self) -> bool:
        """Whether the script came so far that a verdict can be given."""
        return self.end not in (ScriptEnd.FAILED, ScriptEnd.NO_STEP)

    @property
    def ran(self) -> bool:
        """Whether anything can be said of the script's memory."""
        return self.went_through or self.memory is not None

    @property
    def fits(self) -> bool:
        """Whether the script fits as it is."""
        return self.went_through and self.verdict is VerdictKind.FITS


SNAPSHOT: Final = "snapshot.pickle"
"""A memory snapshot of PyTorch's."""
TRACE: Final = "trace.json"
"""A Chrome trace."""


class RehearsalRequest(Message):
    """Run a script on a virtual GPU, in a fresh process.

    Attributes:
        script: Path of a script; None: ``module``.
        module: Name of a module, run as by ``python -m``.
        function: ``module:name`` or ``file.py:name`` of a function, called without arguments.
        arguments: The script's own arguments.
        parameters: What a function is called with.
        others: Devices of the same architecture for which the recording is replayed.
        given: Packages that are taken to be installed, and files of the user's own rows.
        ranks: Size of the process group of which the script is rank 0.
        steps: Optimizer steps after which it is ended; None: three, or two long ones.
        worst_batch: Whether to look for the largest batch and train on it first.
        unlimited: Whether the device has room for everything, to find out how much the script needs.
        smallest_sizes: Whether sizes that depend on unknown values are as small as they can be, not as large.
        overrides: Fields of the installed ``TrainingArguments`` that the ladder sets, with their values.
        timeout_s: Most seconds until the first optimizer step has ended.
        keep_caches: Whether what libraries download and prepare stays in their caches.
        wall: The strongest wall to try; None: the strongest that there is.
        scratch_dir: Where everything that the script writes goes.
        answer_file: Where the answer is written.
        measured_step_s: What a step takes on the device, to find what the device reaches; None: not known.
        views: Files for viewers that are written beside the answer's: :data:`SNAPSHOT`, :data:`TRACE`.
        parent_pid: The process that waits for the answer; the rehearsal ends with it.
    """

    script: str | None = None
    module: str | None = None
    function: str | None = None
    arguments: tuple[str, ...] = ()
    parameters: dict[str, ArgumentValue] = field(default_factory=dict[str, ArgumentValue])
    device: DeviceSpec
    others: tuple[DeviceSpec, ...] = ()
    given: tuple[str, ...] = ()
    ranks: int = 1
    steps: int | None = None
    worst_batch: bool = True
    unlimited: bool = False
    smallest_sizes: bool = False
    overrides: dict[str, ArgumentValue] = field(default_factory=dict[str, ArgumentValue])
    timeout_s: float = 1800.0
    calibration_dir: str | None = None
    measured_step_s: float | None = None
    keep_caches: bool = False
    wall: Wall | None = None
    scratch_dir: str
    answer_file: str
    views: tuple[str, ...] = ()
    parent_pid: int | None = None
    kind: Literal["rehearsal"] = "rehearsal"

    def __post_init__(self) -> None:
        if min(self.ranks, 1 if self.steps is None else self.steps) < 1 or self.timeout_s <= 0:
            raise ValueError(f"{self.ranks} ranks, {self.steps} steps, {self.timeout_s} s: none may be less than one")


_HOUR_S: Final = 3600.0


def run_hours(time: StepTime, steps: int, batch_share: float | None) -> Interval:
    """Return the hours of steps on the loader's mean batch: but for the optimizer they are as long as it is large.

    The upper end of a step that the host may decide does not shrink with the batch.

    Args:
        batch_share: Elements of the mean batch, where those of the timed one are 1; None: not known.
    """
    share = 1.0 if batch_share is None else batch_share

    def hours(step_s: float) -> float:
        fixed_s = min(time.optimizer_s, step_s)
        return steps * (fixed_s + (step_s - fixed_s) * share) / _HOUR_S

    high = hours(time.high_s)
    if time.launch_bound_high_s is not None:
        high = max(high, steps * time.launch_bound_high_s / _HOUR_S)
    return Interval(estimate=hours(time.estimate_s), low=hours(time.low_s), high=high)


def times(hours: Interval, count: int) -> Interval:
    """Return the hours of several runs one after the other; their errors are one."""
    return Interval(estimate=count * hours.estimate, low=count * hours.low, high=count * hours.high)
