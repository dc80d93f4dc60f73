"""Requests and results of the jobs that examine checkpoints, the machine, models and scripts."""

from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import Scalar, TrialConfig
from dryfit.settings.wire import ErrorParts, Job, JobRequest, ProcessNeeds, Wire

# Report of loading a model: the origin of every tensor.


class TensorOrigin(StrEnum):
    """The origin of one tensor."""

    FILE = "file"
    TIED = "tied"
    CONSTRUCTOR = "constructor"
    RANDOM = "random"


class LoadReport(BaseModel):
    """Report of loading a model; every parameter, buffer and plain tensor of the module is named exactly once.

    Attributes:
        source: The folder or file of the weights; empty if there was none.
        files: The files that were read.
        from_file: The file's key of each tensor that was read.
        tied: Names of a tensor that has another name too, with that name.
        constructed: Tensors with the value their constructor gave them.
        random: Tensors drawn at random, as the caller allowed; they depend on the seed of the construction.
        unexpected: Keys of the file for parts that this model does not have (heads of another task).
        ignored: Keys of the file that the architecture declares to be unused.
        renamed: Rules by which keys were renamed, with counts: ``{"bert.": 199}``.
        casts: Conversions of number formats, with counts: ``{"bfloat16 to float32": 391}``.
        notes: Further remarks.
        seconds: Duration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    source: str = ""
    files: tuple[str, ...] = ()
    from_file: dict[str, str] = {}
    tied: dict[str, str] = {}
    constructed: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: dict[str, int] = {}
    casts: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def origins(self) -> dict[str, TensorOrigin]:
        """Return the origin of every tensor, by name."""
        return (
            dict.fromkeys(self.from_file, TensorOrigin.FILE)
            | dict.fromkeys(self.tied, TensorOrigin.TIED)
            | dict.fromkeys(self.constructed, TensorOrigin.CONSTRUCTOR)
            | dict.fromkeys(self.random, TensorOrigin.RANDOM)
        )

    def summary(self) -> str:
        """Return one line with the number of tensors of each origin."""
        counts = (
            (len(self.from_file), "from file"),
            (len(self.tied), "tied"),
            (len(self.constructed), "built by the constructor"),
            (len(self.random), "random as allowed"),
            (len(self.unexpected), "keys not used"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "no tensor"


# Findings about a checkpoint that was examined without reading its weights.


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Subject(StrEnum):
    """The kind of checkpoint in a folder."""

    MODEL = "model"
    """A pretrained model."""
    TRAINED = "trained"
    """An encoder with its head, saved by a trial."""
    ADAPTER = "adapter"
    """A PEFT adapter without its base model."""
    ENSEMBLE = "ensemble"
    """Several models saved by trials, whose predictions are averaged."""


class StoredFile(_Facts):
    """One file with weights."""

    name: str
    size_bytes: int
    tensors: int


class Stored(_Facts):
    """The contents of a checkpoint, by its files' headers.

    Attributes:
        format: ``safetensors`` or ``pickle``.
        files: The files with the weights, in reading order.
        tensors: Number of tensors.
        total_bytes: Bytes of all tensors.
        bytes_by_dtype: The same by number format.
    """

    format: str
    files: tuple[StoredFile, ...]
    tensors: int
    total_bytes: int
    bytes_by_dtype: dict[str, int]


class Built(_Facts):
    """The model that a folder's config describes, and how the checkpoint fits it.

    Attributes:
        architecture: Its class name.
        parameters: Number of trainable parameters; tied ones count once.
        places: Tensors that a complete checkpoint has; tied ones count once.
        filled: How many of them this checkpoint has.
        tied: Groups of names of one tensor.
        renamed: Rules by which keys were renamed, with counts: ``{"module.": 39}``.
        conversions: Tensors made of several keys: ``name: of key, key``.
    """

    architecture: str
    parameters: int
    places: int
    filled: int
    tied: tuple[tuple[str, ...], ...] = ()
    renamed: dict[str, int] = {}
    conversions: tuple[str, ...] = ()


class Adapter(_Facts):
    """A PEFT adapter.

    Attributes:
        kind: PEFT's type: ``LORA``.
        base: Name of its base model; empty if it has none.
        layers: Number of layers it adapts.
        rank: The rank in its config; None for kinds without one.
    """

    kind: str
    base: str
    layers: int
    rank: int | None


class Health(_Facts):
    """The contents of a checkpoint, whether it can be loaded, and if not, why.

    Attributes:
        folder: Its folder.
        subject: Its kind.
        task: The task it was examined for, as in ``dryfit.load(..., task=...)``; empty for a trial's own folder or an
            adapter.
        why: Why that task was taken.
        healthy: Whether ``dryfit.load`` can load it, as far as the headers show.
        stored: Contents of the files; None if they cannot be opened.
        model: The model of the config; None if it cannot be built, and for an adapter.
        adapter: The adapter, if it is one.
        missing: Names of tensors that the files lack.
        shapes: Sentences about tensors of a wrong shape.
        kinds: Sentences about tensors of a wrong kind of number.
        strays: Keys that no tensor has, of parts that the model does have.
        unwritten: Tensors that neither a file nor the constructor fills.
        errors: Errors that ended the examination; four-part messages.
        unexpected: Keys for parts that this model does not have (heads of another task). No fault.
        ignored: Keys that are not used. No fault.
        notes: Further remarks. No fault.
        members: The findings about each model of an ensemble.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    folder: str
    subject: Subject
    task: str = ""
    why: str = ""
    healthy: bool
    stored: Stored | None = None
    model: Built | None = None
    adapter: Adapter | None = None
    missing: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    members: tuple["Health", ...] = ()

    def faults(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return each kind of fault in words, with its tensors; errors are left out."""
        table = (
            ("missing", self.missing),
            ("of another shape", self.shapes),
            ("of another kind of number", self.kinds),
            ("without a place", self.strays),
            ("never written", self.unwritten),
        )
        own = [(what, names) for what, names in table if names]
        of_members = (
            (what, tuple(f"{place}: {name}" for name in names))
            for place, member in enumerate(self.members, start=1)
            for what, names in member.faults()
        )
        return (*own, *of_members)


class CheckResult(Wire):
    """The result of CHECK. A checkpoint that cannot be loaded is a finding, not an error."""

    health: Health


class CheckRequest(JobRequest[CheckResult]):
    """Examine a checkpoint without reading its weights."""

    job: Literal[Job.CHECK] = Job.CHECK
    folder: str = Field(description="a model's folder, or `minilm`")
    task: str | None = Field(description="as in `dryfit.load`; None: what the folder itself says")
    trust: bool = Field(description="run code that comes with the model")


class ProbeResult(Wire):
    """The result of PROBE.

    Attributes:
        cuda_build: Version of CUDA that torch was built for; None: a CPU build.
        devices: The CUDA devices that computed a small sum correctly.
        bf16: Whether all of them support bf16.
        trouble: Why torch cannot use all devices; empty if it can.
    """

    torch: str
    cuda_build: str | None
    devices: tuple[DeviceSpec, ...] = ()
    bf16: bool = True
    trouble: str = ""


class ProbeRequest(JobRequest[ProbeResult]):
    """List the devices that this build of torch can use."""

    job: Literal[Job.PROBE] = Job.PROBE


class BatchWalk(Wire):
    """What checking all batches of one split at one length found.

    Attributes:
        longest: Tokens in the longest row.
        faults: The first few faults found in batches, in words.
    """

    max_length: int
    split: str
    rows: int
    batches: int
    longest: int
    faults: tuple[str, ...] = ()


class StepCheck(Wire):
    """The check of one forward and backward pass.

    Attributes:
        step_s: Seconds for rows of median length; None if only the largest batch was run.
        not_finite: Trainable parameters with an infinite or NaN gradient.
        untouched: Trainable parameters with no gradient, and matrices with only zeros for one.
        micro_batch: Rows in memory at once; fewer than requested if device memory did not suffice.
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


class ProbeFailure(Wire):
    """A dryfit error in one stage of a check, which went on with the other stages.

    Attributes:
        stage: The stage: ``tokens``, ``weights``, ``step``, or a point's values.
    """

    stage: str
    error: ErrorParts


class PointCheck(Wire):
    """The check of one small step at a point of the search space."""

    params: dict[str, Scalar]
    step: StepCheck | None = None
    error: ErrorParts | None = None


class BatchCheckResult(Wire):
    """The result of BATCH_CHECK. A model that cannot be trained is a finding, not an error.

    Attributes:
        step: The step on the largest batch; None if it was not reached.
        failures: Errors of the stages that failed.
    """

    walks: tuple[BatchWalk, ...] = ()
    remarks: tuple[str, ...] = Field(default=(), description="remarks about the rows that are no errors")
    step: StepCheck | None = None
    points: tuple[PointCheck, ...] = ()
    failures: tuple[ProbeFailure, ...] = ()


class BatchCheckRequest(JobRequest[BatchCheckResult]):
    """Collate and check all batches of one model and do one training step; nothing is saved.

    Attributes:
        trial: The study file's values with this model, its largest batch and its longest input.
        lengths: Every ``train.max_length`` in the search space for this model.
        points: Further points of the search space with this model; each does one small step.
    """

    job: Literal[Job.BATCH_CHECK] = Job.BATCH_CHECK
    trial: TrainRequest
    lengths: tuple[int, ...]
    points: tuple[TrialConfig, ...] = ()

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return ProcessNeeds(hides_devices=True, visible_device=self.trial.visible_device)


class PaceResult(Wire):
    """The result of PACE.

    Attributes:
        step_s: Median seconds of an optimizer step, after a first one that is not counted.
        steps: Steps that were counted.
        together: Whether all children that were to run side by side did.
    """

    step_s: float = Field(gt=0)
    steps: int = Field(ge=1)
    together: bool


class PaceRequest(JobRequest[PaceResult]):
    """Time optimizer steps of a trial while others of these children do the same; nothing is learned or saved.

    Attributes:
        trial: The trial; its plan says the threads, its settings the number format.
        rows: Rows of each step, the first of the first batch.
        child: Number of this child among those that run side by side, from 0.
        side_by_side: How many they are.
        meeting: A folder that they share, in which they wait for each other after their first step.
        measured_s: How long steps are counted; one at least is.
    """

    job: Literal[Job.PACE] = Job.PACE
    trial: TrainRequest
    rows: int = Field(ge=1)
    child: int = Field(ge=0)
    side_by_side: int = Field(ge=1)
    meeting: str
    measured_s: float = Field(gt=0)

    def process_needs(self) -> ProcessNeeds:
        """Return what the job needs of its process."""
        return ProcessNeeds(hides_devices=True, visible_device=self.trial.visible_device)


class ScriptArgument(Wire):
    """An argument that a script's parser defines.

    Attributes:
        option: As a command line has it: ``--learning_rate``.
        kind: ``float``, ``int``, ``bool``, ``flag`` (an option without a value), ``choice`` or ``text``.
        default: Its value where the command line does not name it, as JSON has it; None: there is none.
        given: Its value by the command line, where it names it; None: it does not.
        choices: The values that it may have; empty: any of its kind.
        of_trainer: It is a field of transformers' ``TrainingArguments``.
    """

    option: str
    kind: Literal["float", "int", "bool", "flag", "choice", "text"]
    default: bool | int | float | str | None = None
    given: bool | int | float | str | None = None
    choices: tuple[bool | int | float | str, ...] = ()
    of_trainer: bool = False


class ScriptArgumentsResult(Wire):
    """The result of SCRIPT_ARGUMENTS.

    Attributes:
        arguments: In the order of their definition; none that takes several values.
        makes_trainer: The parser fills transformers' ``TrainingArguments``.
    """

    arguments: tuple[ScriptArgument, ...]
    makes_trainer: bool


class ScriptArgumentsRequest(JobRequest[ScriptArgumentsResult]):
    """Run a script up to where it parses its command line, and read which arguments it takes.

    Attributes:
        command: The command, as in ``[script]``.
        folder: The folder that it is run in.
    """

    job: Literal[Job.SCRIPT_ARGUMENTS] = Job.SCRIPT_ARGUMENTS
    needs: ClassVar = ProcessNeeds(hides_devices=True, of_the_user=True)
    command: str
    folder: str
