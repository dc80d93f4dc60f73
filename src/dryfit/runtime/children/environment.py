"""The environment variables of child processes, and the table of which child has which secrets.

No process is started with a secret in its environment, where ``/proc/PID/environ`` and crash reports would show it. All
secrets come through the standard input: a child takes them out of what it says, and sets those that its job may have.
"""

import json
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from dryfit.core.errors import MachineError
from dryfit.core.jobs.export import ExportRequest, MergeRequest
from dryfit.core.jobs.job import JobRequest
from dryfit.core.jobs.plan import RehearsedPlanRequest
from dryfit.core.jobs.train import (
    ImportRequest,
    ObjectiveRequest,
    PredictRequest,
    RowsRequest,
    ScriptRequest,
    TrainerRequest,
)
from dryfit.core.settings.objective_table import OwnCode
from dryfit.core.settings.tables import HUB_PREFIX, PACKAGED_MODEL, DataSettings, JointSettings, ModelSettings
from dryfit.core.text.secrets import HUB_TOKENS, forget_secrets, public_environment
from dryfit.core.wire import MARKER_VARIABLE

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
        case TrainerRequest() | ScriptRequest() | RehearsedPlanRequest():
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
