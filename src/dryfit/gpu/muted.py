"""The Hugging Face Hub and experiment trackers, muted: nothing is created elsewhere, what a script used is listed."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Final

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.redirect import named_as, replace_everywhere

# Experiment trackers open no run and speak to nobody; that the script used one is listed.
#
# A tracker that can be switched off is (by its variable, and by the keyword that the script may set otherwise); the
# others give objects that take everything and do nothing. MLflow tracks into the scratch folder.


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


def mute_trackers(scratch: Path, say: Say) -> None:
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


# Nothing is written to the Hugging Face Hub: what would have been is listed with its repository and size.
#
# Reads stay as they are: configurations, tokenizers, data.


_HUB: Final = "huggingface_hub.hf_api"
_WRITES: Final = (
    *("create_", "upload_", "delete_", "update_", "move_", "duplicate_", "super_squash_", "permanently_delete_"),
    *("preupload_", "batch_", "sync_", "copy_files", "add_", "set_", "request_", "pause_", "resume_", "restart_"),
    *("enable_", "disable_", "scale_", "suspend_", "trigger_", "run_job", "run_uv_job", "rerun_job", "cancel_"),
    *("merge_", "edit_", "hide_", "comment_", "rename_", "change_", "grant_", "accept_", "reject_", "unlike"),
)
"""How the names of methods begin that change anything."""
_COMMITS: Final = frozenset(
    {"create_commit", "upload_file", "upload_folder", "delete_file", "delete_files", "delete_folder"}
)
_NOBODY: Final = "user"
"""The namespace of a repository whose name has none: nobody is asked who would own it."""
_NO_COMMIT: Final = "0" * 40


class MutedHub:
    """What stands for the methods that write.

    Args:
        module: ``huggingface_hub.hf_api``.
        say: Called with what, where, and how many bytes.
        size_of: Returns the bytes that a file or folder would have had.
    """

    def __init__(
        self, module: ModuleType, say: Callable[[str, str, int | None], None], size_of: Callable[[Any], int]
    ) -> None:
        self._module = module
        self._say = say
        self._size_of = size_of

    def mute(self) -> dict[Any, Any]:
        """Replace the methods; return what takes the place of the functions that are bound ones."""
        api = self._module.HfApi
        replaced: dict[Any, Any] = {}
        for name, method in list(vars(api).items()):
            if name.startswith(_WRITES) and inspect.isfunction(method):
                setattr(api, name, self._muted(name, method))
                function = vars(self._module).get(name)
                if inspect.ismethod(function) and function.__func__ is method:
                    replaced[function] = getattr(function.__self__, name)
        return replaced

    def _muted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def muted(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            given = {**given, **given.get("kwargs", {})}
            repository = str(given.get("repo_id", given.get("name", given.get("from_id", ""))))
            repository = repository if "/" in repository or not repository else f"{_NOBODY}/{repository}"
            if not name.startswith("preupload_"):  # what it would send is in the commit after it
                self._say("hub repository" if repository else f"hub: {name}", repository, self._bytes(name, given))
            answer = self._answer(name, repository, given)
            if given.get("run_as_future"):
                done: Future[Any] = Future()
                done.set_result(answer)
                return done
            return answer

        return muted

    def _answer(self, name: str, repository: str, given: dict[str, Any]) -> Any:
        """Return what a script may go on with."""
        kind = given.get("repo_type") or "model"
        address = f"https://huggingface.co/{'' if kind == 'model' else kind + 's/'}{repository}"
        if name in ("create_repo", "duplicate_repo", "duplicate_space"):
            return self._module.RepoUrl(address)
        if name in _COMMITS:
            return commit(self._module, address, str(given.get("commit_message") or "rehearsed"))
        return None if name.startswith(("delete_", "preupload_", "upload_large")) else Silent()

    def _bytes(self, name: str, given: dict[str, Any]) -> int | None:
        """Return how many bytes would be sent."""
        if name == "upload_file":
            return self._size(given.get("path_or_fileobj"))
        if name in ("upload_folder", "upload_large_folder"):
            return self._folder_size(given)
        if name == "create_commit":
            added = (getattr(one, "path_or_fileobj", None) for one in given.get("operations", ()))
            return sum(self._size(one) for one in added if one is not None)
        return None

    def _size(self, content: Any) -> int:
        if isinstance(content, bytes):
            return len(content)
        if isinstance(content, str | os.PathLike):
            return self._size_of(content)
        at = content.tell()
        end = content.seek(0, os.SEEK_END)
        content.seek(at)
        return end - at

    def _folder_size(self, given: dict[str, Any]) -> int:
        folder = os.fspath(given["folder_path"])
        paths = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
        kept = self._module.filter_repo_objects(
            [os.path.relpath(path, folder) for path in paths],
            allow_patterns=given.get("allow_patterns"),
            ignore_patterns=[*_texts(given.get("ignore_patterns")), ".git/*", ".cache/*"],
        )
        return sum(self._size_of(os.path.join(folder, path)) for path in kept)


def mute_hub(say: Callable[[str, str, int | None], None], size_of: Callable[[Any], int]) -> None:
    """Mute the hub as soon as its library is imported."""

    def sign_in(token: str | None = None, *args: Any, **kwargs: Any) -> None:
        if token:
            os.environ["HF_TOKEN"] = token  # reading goes on with it; it is written nowhere
        say("hub: login", "", None)

    def sign_out(*args: Any, **kwargs: Any) -> None:
        say("hub: logout", "", None)

    def hub(module: ModuleType) -> None:
        replaced = MutedHub(module, say, size_of).mute()
        face = importlib.import_module("huggingface_hub")
        names = {"login": sign_in, "interpreter_login": sign_in, "notebook_login": sign_in, "logout": sign_out}
        signed = {getattr(face, name): muted for name, muted in names.items() if hasattr(face, name)}
        replace_everywhere(replaced | signed)

    def data(module: ModuleType) -> None:
        def push_to_hub(self: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
            tables = self.values() if isinstance(self, dict) else (self,)
            sizes = [getattr(getattr(table, "data", None), "nbytes", None) for table in tables]
            say("hub repository", repo_id, None if None in sizes else sum(size for size in sizes if size))
            address = f"https://huggingface.co/datasets/{repo_id}"
            return commit(sys.modules[_HUB], address, str(kwargs.get("commit_message") or "rehearsed"))

        for name in ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict"):
            if hasattr(getattr(module, name, None), "push_to_hub"):
                getattr(module, name).push_to_hub = push_to_hub

    when_imported(_HUB, hub)
    when_imported("datasets", data)


def commit(module: ModuleType, address: str, message: str) -> Any:
    """Return what the hub tells of a commit."""
    return module.CommitInfo(
        commit_url=f"{address}/commit/{_NO_COMMIT}", commit_message=message, commit_description="", oid=_NO_COMMIT
    )


def _texts(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
