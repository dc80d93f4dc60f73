"""Functions of libraries that open files by themselves, in C, C++ or Rust: their paths are replaced, by name.

A library that is not in the table, and tells nothing to Python, writes where the script says.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.writes.redirected_files import named_as, replace_everywhere
from dryfit.virtual.writes.shadow import Shadow


@dataclass(frozen=True, slots=True)
class _Opens:
    """A function that opens a file.

    Attributes:
        name: Of the function in its module: with its class, where it is a method.
        at: Which argument is the path.
        keyword: Its name.
        mode: ``r``: it reads; ``w``: it writes anew; ``a``: it may do both; a digit: which argument says so.
    """

    name: str
    at: int
    keyword: str
    mode: str = "r"


def _all(names: str, at: int, keyword: str, mode: str) -> tuple[_Opens, ...]:
    return tuple(_Opens(name, at, keyword, mode) for name in names.split())


_OPENS: Final = {
    "sqlite3": (_Opens("connect", 0, "database", "a"),),
    "pyarrow": (
        _Opens("memory_map", 0, "path", "1"),
        _Opens("OSFile", 0, "path", "1"),
        _Opens("create_memory_map", 0, "path", "w"),
        _Opens("input_stream", 0, "source"),
        _Opens("output_stream", 0, "source", "w"),
    ),
    "pyarrow.parquet": (
        *_all("read_table ParquetFile.__init__ read_schema read_metadata", 0, "source", "r"),
        *_all("ParquetWriter.__init__ write_metadata", 0, "where", "w"),
        _Opens("write_table", 1, "where", "w"),
    ),
    "pyarrow.feather": (_Opens("write_feather", 1, "dest", "w"), *_all("read_feather read_table", 0, "source", "r")),
    "pyarrow.csv": (_Opens("write_csv", 1, "output_file", "w"), _Opens("read_csv", 0, "input_file")),
    "pyarrow.json": (_Opens("read_json", 0, "input_file"),),
    "pyarrow.dataset": (_Opens("dataset", 0, "source"), _Opens("write_dataset", 1, "base_dir", "a")),
    "tokenizers": (_Opens("Tokenizer.save", 1, "path", "w"), _Opens("Tokenizer.from_file", 0, "path")),
    "tokenizers.models": tuple(
        _Opens(f"{name}.save", 1, "folder", "a") for name in ["BPE", "Unigram", "WordLevel", "WordPiece"]
    ),
    "sentencepiece": (_Opens("SentencePieceProcessor.LoadFromFile", 1, "arg"),),
    "torch.jit": (_Opens("save", 1, "f", "w"), _Opens("load", 0, "f")),
    "torch.export": (_Opens("save", 1, "f", "w"), _Opens("load", 0, "f")),
    "torch.autograd.profiler": (_Opens("profile.export_chrome_trace", 1, "path", "w"),),
    "torch.profiler": (_Opens("profile.export_chrome_trace", 1, "path", "w"),),
    "h5py": (_Opens("File.__init__", 1, "name", "2"),),
    "polars": (
        *_all("DataFrame.write_parquet DataFrame.write_csv DataFrame.write_ipc DataFrame.write_ndjson", 1, "file", "w"),
        *_all("LazyFrame.sink_parquet LazyFrame.sink_csv LazyFrame.sink_ipc LazyFrame.sink_ndjson", 1, "path", "w"),
        *_all("read_parquet read_csv read_ipc read_ndjson scan_parquet scan_csv scan_ipc", 0, "source", "r"),
    ),
    "cv2": (*_all("imwrite VideoWriter", 0, "filename", "w"), *_all("imread VideoCapture", 0, "filename", "r")),
    "soundfile": (
        _Opens("write", 0, "file", "w"),
        _Opens("read", 0, "file"),
        _Opens("SoundFile.__init__", 1, "file", "2"),
    ),
    "torchaudio": (_Opens("save", 0, "uri", "w"), _Opens("load", 0, "uri")),
    "torchvision.io": (
        *_all("write_png write_jpeg", 1, "filename", "w"),
        *_all("write_video write_file", 0, "filename", "w"),
        *_all("read_image read_file", 0, "path", "r"),
    ),
    "faiss": (_Opens("write_index", 1, "fname", "w"), _Opens("read_index", 0, "fname")),
    "xgboost": (_Opens("Booster.save_model", 1, "fname", "w"), _Opens("Booster.load_model", 1, "fname")),
    "lightgbm": (_Opens("Booster.save_model", 1, "filename", "w"),),
}
"""The functions by module."""


def install(shadow: Shadow) -> None:
    """Redirect them as soon as their modules are imported."""
    for name, functions in _OPENS.items():
        when_imported(name, functools.partial(_redirect, shadow, functions))
    when_imported("numpy", functools.partial(_map_privately, shadow))


def _map_privately(shadow: Shadow, module: ModuleType) -> None:
    """Let real files that numpy maps to be changed, as it does unless told otherwise, be changed in memory alone."""
    make = module.memmap.__new__

    def new(cls: Any, filename: Any, dtype: Any = module.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
        if mode in ("r+", "readwrite") and isinstance(filename, str | os.PathLike):
            key = shadow.resolve(filename)
            if shadow.shown(key) == key and not shadow.is_free(key):
                mode = "c"
        return make(cls, filename, dtype, mode, *args, **kwargs)

    module.memmap.__new__ = new


def _redirect(shadow: Shadow, functions: tuple[_Opens, ...], module: ModuleType) -> None:
    replaced: dict[Any, Any] = {}
    for opens in functions:
        owner, _, name = opens.name.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        real = inspect.getattr_static(holder, name, None) if holder is not None else None
        if real is None:
            continue
        function = getattr(holder, name)
        made = _redirected(shadow, opens, function)
        if isinstance(real, staticmethod) or (inspect.isbuiltin(function) and owner):
            made = staticmethod(made)
        if owner or isinstance(function, type):
            setattr(holder, name, made)
        else:
            replaced[function] = made
    replace_everywhere(replaced)


def _redirected(shadow: Shadow, opens: _Opens, function: Callable[..., Any]) -> Callable[..., Any]:
    @named_as(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if shadow.is_busy:
            return function(*args, **kwargs)
        if opens.keyword in kwargs:
            mode = _mode(opens, args, kwargs)
            kwargs[opens.keyword] = _path(shadow, kwargs[opens.keyword], mode)
        elif len(args) > opens.at:
            mode = _mode(opens, args, kwargs)
            args = (*args[: opens.at], _path(shadow, args[opens.at], mode), *args[opens.at + 1 :])
        return function(*args, **kwargs)

    return redirected


def _mode(opens: _Opens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return whether a file is read, written anew, or both."""
    if not opens.mode.isdigit():
        return opens.mode
    at = int(opens.mode)
    mode = str(kwargs.get("mode", args[at] if len(args) > at else "r"))
    return "r" if set(mode) <= set("rbt") else "w" if mode.startswith(("w", "x")) else "a"


def _path(shadow: Shadow, path: Any, mode: str) -> Any:
    """Return where a path lies; what is no path of a file, an address or a database in memory, as it is."""
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fsdecode(path)
    if not text or "://" in text or text.startswith((":", "file:")):
        return path
    if mode == "r" and not shadow.is_used:
        return path
    key = shadow.resolve(text)
    with shadow.as_asked():
        return shadow.shown(key) if mode == "r" else shadow.to_write(key, keep=mode == "a")
