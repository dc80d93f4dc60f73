"""Experiment trackers open no run and speak to nobody; that the script used one is listed.

A tracker that can be switched off is (by its variable, and by the keyword that the script may set otherwise); the
others give objects that take everything and do nothing. MLflow tracks into the scratch folder.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Final

from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.writes.replacing import named_as, replace_everywhere

Say = Callable[[str, str], None]

_VARIABLES: Final = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "SWANLAB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
_PROJECT: Final = ("entity", "workspace", "project", "project_name", "experiment_name", "name", "run_name")
"""Keywords by which trackers name what is tracked."""


@dataclass(frozen=True, slots=True)
class _Tracker:
    """How a tracker is muted.

    Attributes:
        switched: Functions that get a keyword, ``(its name, its value)``.
        silent: Functions and classes in whose place is nothing.
    """

    switched: dict[str, tuple[str, str]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


_TRACKERS: Final = {
    "wandb": _Tracker({"init": ("mode", "disabled")}, ("login", "sweep", "agent")),
    "swanlab": _Tracker({"init": ("mode", "disabled")}, ("login",)),
    "neptune": _Tracker(
        dict.fromkeys(("init_run", "init_model", "init_model_version", "init_project", "init"), ("mode", "debug"))
    ),
    "comet_ml": _Tracker(
        silent=(
            *("Experiment", "OfflineExperiment", "ExistingExperiment", "ExistingOfflineExperiment"),
            *("APIExperiment", "start", "init", "login"),
        )
    ),
    "clearml": _Tracker(silent=("Task", "Logger", "OutputModel", "Dataset", "TaskTypes")),
    "trackio": _Tracker(
        silent=("init", "log", "log_system", "finish", "sync", "save", "show", "alert", "delete_project")
    ),
    "aim": _Tracker(silent=("Run", "Repo", "Session")),
    "codecarbon": _Tracker(silent=("EmissionsTracker", "OfflineEmissionsTracker")),
    "dvclive": _Tracker(silent=("Live",)),
}


class _OfClass(type):
    """Of classes whose every attribute does nothing: ``Task.init(...)``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Silent(metaclass=_OfClass):
    """Takes everything, does nothing, and gives itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself; of one function, as a decorator gets it, that function."""
        return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __delitem__(self, key: Any) -> None: ...

    def __contains__(self, key: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    def __str__(self) -> str:
        return ""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def install(scratch: Path, say: Say) -> None:
    """Mute all trackers that the script will import.

    Args:
        scratch: Where MLflow tracks.
        say: Called with what was used, and what it would have tracked.
    """
    os.environ.update(_VARIABLES)
    uri = (scratch / "mlflow").resolve().as_uri()
    os.environ["MLFLOW_TRACKING_URI"] = os.environ["MLFLOW_REGISTRY_URI"] = uri
    for name, tracker in _TRACKERS.items():
        when_imported(name, functools.partial(_mute, name, tracker, say))
    when_imported("mlflow", functools.partial(_mlflow, uri, say))
    for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        when_imported(name, functools.partial(_tensorboard, say))


def _mute(tracker: str, how: _Tracker, say: Say, module: ModuleType) -> None:
    names = vars(module)
    replaced: dict[Any, Any] = {}
    for name, keyword in how.switched.items():
        if name in names:
            replaced[names[name]] = _switched(names[name], keyword, functools.partial(say, f"{tracker} run"))
    for name in how.silent:
        if name in names:
            replaced[names[name]] = _silent(names[name], functools.partial(say, f"{tracker} run"))
    replace_everywhere(replaced)


def _switched(function: Callable[..., Any], keyword: tuple[str, str], say: Callable[[str], None]) -> Any:
    """Return a function that is called with a keyword of ours."""

    @named_as(function)
    def muted(*args: Any, **kwargs: Any) -> Any:
        say(_named(kwargs))
        return function(*args, **{**kwargs, keyword[0]: keyword[1]})

    return muted


def _silent(real: Any, say: Callable[[str], None]) -> Any:
    """Return what stands for a function, or for a class."""

    def begin(*args: Any, **kwargs: Any) -> Silent:
        say(_named(kwargs))
        return Silent()

    if not isinstance(real, type):
        return named_as(real)(begin)

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        say(_named(kwargs))

    return _OfClass(real.__name__, (Silent,), {"__init__": made, "init": staticmethod(begin)})


def _named(keywords: dict[str, Any]) -> str:
    """Return how a script names what it tracks."""
    return "/".join(str(keywords[name]) for name in _PROJECT if isinstance(keywords.get(name), str))


def _mlflow(uri: str, say: Say, module: ModuleType) -> None:
    """Let MLflow track into a folder, whatever server the script names."""

    def elsewhere(server: Any = None, *args: Any, **kwargs: Any) -> None:
        say("mlflow run", str(server or ""))

    start, client = module.start_run, module.MlflowClient.__init__
    module.set_tracking_uri(uri)

    @named_as(start)
    def start_run(*args: Any, **kwargs: Any) -> Any:
        say("mlflow run", _named(kwargs))
        return start(*args, **kwargs)

    @functools.wraps(client)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        client(self, tracking_uri=uri, registry_uri=uri)

    module.MlflowClient.__init__ = init
    replace_everywhere(
        {module.start_run: start_run, module.set_tracking_uri: elsewhere, module.set_registry_uri: elsewhere}
    )


def _tensorboard(say: Say, module: ModuleType) -> None:
    """List the folders of event files, which are redirected as all files are."""
    real = module.SummaryWriter.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        folder = getattr(self, "log_dir", None) or getattr(self, "logdir", "")
        say("tensorboard log", os.path.abspath(folder))

    module.SummaryWriter.__init__ = init
