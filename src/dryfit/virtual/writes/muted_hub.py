"""Nothing is written to the Hugging Face Hub: what would have been is listed with its repository and size.

Reads stay as they are: configurations, tokenizers, data.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Final

from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.writes.muted_trackers import Silent
from dryfit.virtual.writes.replacing import replace_everywhere

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


def install(say: Callable[[str, str, int | None], None], size_of: Callable[[Any], int]) -> None:
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
