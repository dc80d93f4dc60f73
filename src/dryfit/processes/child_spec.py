"""A child as the control process starts it: its job, limits, environment, and the messages that ask for it."""

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dryfit.settings.devices import HERE, cpu_of
from dryfit.settings.errors import Evidence, MachineError
from dryfit.settings.jobs import JOBS, ChildResult, JobRow
from dryfit.settings.plan_messages import RehearsedPlanRequest
from dryfit.settings.secrets import HUB_TOKENS, forget_secrets, public_environment
from dryfit.settings.study_file import Isolation, StudyConfig
from dryfit.settings.tables import HUB_PREFIX, PACKAGED_MODEL, DataSettings, JointSettings, ModelSettings, OwnCode
from dryfit.settings.task_facts import TASK_MODULES
from dryfit.settings.training_messages import (
    ExportRequest,
    ImportRequest,
    MergeRequest,
    ObjectiveRequest,
    OwnTrainingRequest,
    PredictRequest,
    RowsRequest,
)
from dryfit.settings.user_code import script_imports
from dryfit.settings.wire import MARKER_VARIABLE, Job, JobRequest, Message, Wire

# The environment variables of child processes, and the table of which child has which secrets.
#
# No process is started with a secret in its environment, where ``/proc/PID/environ`` and crash reports would show it.
# All secrets come through the standard input: a child takes them out of what it says, and sets those that its job may
# have.


FIXED: Mapping[str, str] = {
    # One thread before the fork: thread pools of libgomp, OpenBLAS and tokenizers do not survive it. A child
    # raises its own count (pytorch/pytorch #17199).
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # pyarrow's jemalloc starts a thread at import, even where the system allocator is chosen.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # torch.cuda.is_available() must not make a CUDA context before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def child_environment(base: Mapping[str, str], marker: str, additions: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server and of fresh children; it has no secrets.

    Args:
        base: The control process's own, normally ``os.environ``.
        marker: The study's.
        additions: Further variables; they win over all but the marker.
    """
    return public_environment({**base, **FIXED, **additions, MARKER_VARIABLE: marker})


def kept_secrets(body: JobRequest[Any]) -> frozenset[str]:
    """Return the names of the secrets that a job may have.

    ==========================================  ============================
    the user's own function: import, and call   those in its ``secrets``
    any other job, if it may read from the hub  the hub's token
    any other job                               none
    ==========================================  ============================
    """
    match body:
        case ImportRequest() | ObjectiveRequest():
            return frozenset(body.objective.secrets)
        case OwnTrainingRequest() | RehearsedPlanRequest():
            return frozenset(body.calling.objective.secrets)
        case PredictRequest() | MergeRequest() | ExportRequest():
            return HUB_TOKENS  # the base of adapters may be on the hub, which only their folder says
        case RowsRequest():
            return HUB_TOKENS if body.source.startswith(HUB_PREFIX) else frozenset()
        case _:
            return HUB_TOKENS if _reads_hub(body) else frozenset()


def _reads_hub(value: object) -> bool:
    """Whether a request names rows or a model on the hub, wherever in it."""
    match value:
        case DataSettings():
            sources = (value.train, value.validation, value.test, value.file)
            return any(source is not None and source.startswith(HUB_PREFIX) for source in sources)
        case ModelSettings():
            return _on_hub(value.name)
        case JointSettings():
            return value.criteria_model is not None and _on_hub(value.criteria_model)
        case BaseModel():
            return any(_reads_hub(getattr(value, name)) for name in type(value).model_fields)
        case tuple():
            return any(_reads_hub(item) for item in cast("tuple[object, ...]", value))
        case _:
            return False


def _on_hub(model: str) -> bool:
    return not Path(model).is_absolute() and model != PACKAGED_MODEL


def demand_secrets(function: OwnCode | None, environment: Mapping[str, str], *, table: str = "objective") -> None:
    """Check, before anything starts, that the secrets are there which a user's own function reads.

    Args:
        function: The study's ``[objective]``, ``[trainer]`` or ``[script]``; None: it has none.
        environment: The control process's own.
        table: Which of them it is.

    Raises:
        MachineError: One is not set.
    """
    names = () if function is None else function.secrets
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise MachineError(
            f"starting trials with {table}.secrets = {json.dumps(names)}",
            f"not set in the environment: {', '.join(missing)}",
            "variables that hold the secrets of your function",
            f"export {missing[0]}=..., or take it out of {table}.secrets",
        )


def leave_secrets(body: JobRequest[Any], secrets: Mapping[str, str]) -> None:
    """Give this process those of the secrets that its job may have, and no others."""
    kept = kept_secrets(body)
    forget_secrets(os.environ, keep=kept)
    os.environ.update({name: secrets[name] for name in kept if name in secrets})


@contextmanager
def secrets_as_input(secrets: Mapping[str, str]) -> Generator[int, None, None]:
    """Hold secrets ready for a new process, in memory where the system can do that.

    Yields:
        The descriptor that is to be its standard input.
    """
    in_memory = sys.platform == "linux"  # elsewhere in a file without a name, which nobody else can open
    with os.fdopen(os.memfd_create("input"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        file.write(json.dumps(dict(secrets)).encode())
        file.seek(0)
        yield file.fileno()


def secrets_from_input() -> dict[str, str]:
    """Return the secrets that this process received on standard input, and make them unreadable afterwards."""
    with open(0, "rb", closefd=False) as file:
        data = file.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return json.loads(data or b"{}")


def hide_devices(visible: str | None) -> None:
    """Let this process, which must not have touched CUDA yet, see one device; None hides all."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""


def launch_one_by_one() -> None:
    """Let this process, which must not have touched CUDA yet, wait for every kernel, so that an error names its place.

    Kernels of a build with device assertions also say which of them failed. (Errors name the macro of such a build,
    ``TORCH_USE_CUDA_DSA``; at run time it is asked for by another name: c10/cuda/CUDADeviceAssertionHost.cpp.)
    """
    os.environ.update(CUDA_LAUNCH_BLOCKING="1", PYTORCH_USE_CUDA_DSA="1")


# Messages between the control process and its fork server: one JSON object a line over a socket pair.


SERVE: Final = "--"
"""Among the modules of a fork server: here it makes the children that were asked for and whose job is imported.

All others are made once everything is imported, and share it.
"""


class ForkRequest(Wire):
    """Control to server: fork a child for the request in a folder."""

    # Pydantic keeps thousands of short strings that it has read: here no two are the same, and the server is to stay
    # as it is however many children it has made.
    model_config = ConfigDict(cache_strings="keys")

    key: str
    request_path: str
    entry: str


class Ready(Wire):
    """Everything is imported; forks follow."""

    type: Literal["ready"] = "ready"
    import_s: float


class Forked(Wire):
    """A child was made."""

    type: Literal["forked"] = "forked"
    key: str
    pid: int


class Refused(Wire):
    """A fork would not be safe (and will not become so), or failed (and may work later)."""

    type: Literal["refused"] = "refused"
    key: str
    why: str
    unsafe: bool


class Exited(Wire):
    """A child has ended and is reaped; what was left of its session is killed."""

    type: Literal["exited"] = "exited"
    key: str
    status: int


ServerMessage = Annotated[Ready | Forked | Refused | Exited, Field(discriminator="type")]
SERVER_MESSAGE: TypeAdapter[ServerMessage] = TypeAdapter(ServerMessage)


@dataclass(slots=True)
class LineBuffer:
    """Cuts a stream of bytes into lines."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines they complete, without their ends."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines


# A child as the control process starts it: its job, its limits, its events, and the settings of all children.


PRELOAD = (
    "dryfit.training.resolve",
    *TASK_MODULES,
    SERVE,  # RESOLVE reads the data meanwhile
    "sklearn.metrics",
    "dryfit.tasks.baselines",
    SERVE,  # and BASELINES takes its time; a third of the imports is still to come
    "dryfit.training.trial_jobs",
    "dryfit.training.trial_jobs",
    "dryfit.training.plan_job",
    "dryfit.training.batch_check",
)
"""Modules the fork server imports once for all children, in this order."""

OBJECTIVE_PRELOAD = ("dryfit.training.objective",)
"""The same where children call a function of the user's own: no torch, so the server is small and there at once."""

TRAINER_PRELOAD = (*OBJECTIVE_PRELOAD, "dryfit.training.own_trainer")
"""The same where that function makes a Trainer: what every Trainer needs."""

SCRIPT_PRELOAD = ("dryfit.training.script",)
"""The same where children run the user's own script."""

_WARM = {"transformers": "dryfit.training.script_trainers", "torch": "torch"}
_ON_TRANSFORMERS = frozenset({"transformers", "trl", "sentence_transformers", "setfit", "span_marker", "peft"})
_ON_TORCH = frozenset({"torch", "lightning", "pytorch_lightning", "timm", "torchvision", "accelerate"})
"""What scripts import that is slow, and is therefore imported once."""


def preload_of(config: StudyConfig) -> tuple[str, ...]:
    """Return the modules that the fork server of a study imports."""
    own = config.function
    if own is None:
        return PRELOAD
    if config.script is None:
        return (*(OBJECTIVE_PRELOAD if config.trainer is None else TRAINER_PRELOAD), *own.preload)
    imported = script_imports(config.script.command, Path(config.script.folder))
    slow = "transformers" if imported & _ON_TRANSFORMERS else "torch" if imported & _ON_TORCH else None
    return (*SCRIPT_PRELOAD, *((_WARM[slow],) if slow is not None else ()), *own.preload)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How long a child may take; time in which the control process itself did not run is not counted.

    Attributes:
        start_s: Until its first line.
        hang_s: Without a heartbeat.
        hang_learned: Whether a shorter limit is learned from the child's own signs of life
            (:mod:`dryfit.processes.attempt`).
        total_s: From its first line to its end; None: no limit.
        stop_grace_s: To write a checkpoint after a request to stop.
    """

    start_s: float
    hang_s: float
    total_s: float | None
    stop_grace_s: float
    hang_learned: bool = False


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child to start.

    Attributes:
        key: Name of the child, unique among those that run.
        folder: Its folder for messages and files; made if absent.
        body: Its job.
        limits: How long it may take.
        place: Where it runs, which names its node too (:mod:`dryfit.settings.devices`).
        planned_bytes: The memory that it is planned to take of each of its devices; None: not known.
    """

    key: str
    folder: Path
    body: JobRequest[Any]
    limits: ChildLimits
    place: str = cpu_of(HERE)
    planned_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """A message of a child, and the node that it is from."""

    key: str
    message: Message
    node: str = HERE


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The end of a child; its messages came before.

    Attributes:
        result: Its result; None if it left none.
        evidence: The evidence of how it ended.
        node: The node that it ran on.
    """

    key: str
    result: ChildResult | None
    evidence: Evidence
    node: str = HERE


ChildEvent: TypeAlias = ChildMessage | ChildExited


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """How one control process runs its children.

    Attributes:
        marker: The study's (:func:`~dryfit.processes.helpers.marker_of`); every process carries it in its
            environment (see :mod:`dryfit.processes.helpers`).
        wakeup_fifo: Path of the FIFO that children write to after each message; None: their files are polled.
        isolation: How children are made.
        server_log: Where the fork server's output goes.
        preload: Modules the fork server imports.
        environment: Variables added to every child's environment.
        jobs: The jobs that they do.
        server_start_s: How long the fork server may take to import.
        probe: Adds evidence from outside the child, such as the state of its device; takes the child's key.
    """

    marker: str
    wakeup_fifo: Path | None
    isolation: Isolation
    server_log: Path
    preload: tuple[str, ...] = PRELOAD
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    jobs: Mapping[Job, JobRow] = field(default_factory=lambda: JOBS)
    server_start_s: float = 120.0
    probe: Callable[[str, Evidence], Evidence] = lambda _key, evidence: evidence

    @classmethod
    def of_no_study(cls, folder: Path, isolation: Isolation, preload: tuple[str, ...] = PRELOAD) -> Self:
        """Return settings under a marker of their own: a study's start ends every process that carries the study's.

        Args:
            folder: Where the FIFO is made, and the fork server's output goes.
            isolation: How children are made.
            preload: Modules the fork server imports.
        """
        fifo, server_log = folder / f"doorbell-{os.getpid()}", folder / "forkserver.txt"
        return cls(uuid.uuid4().hex, fifo, isolation, server_log, preload)
