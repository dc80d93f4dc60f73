"""Check a model folder, predict rows with a trained model, and merge its adapters."""

import os
from collections.abc import Callable
from pathlib import Path

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.jobs.checkpoint_health import Health
from dryfit.core.jobs.diagnostics import CheckRequest
from dryfit.core.jobs.train import MergeRequest, PredictRequest, PredictResult
from dryfit.core.settings.tables import HUB_PREFIX, PACKAGED_MODEL
from dryfit.core.wire import Message, Note, Progress
from dryfit.runtime.machine.local_devices import available_cores
from dryfit.study.loop.child_jobs import run_alone


def check(folder: Path | str, *, task: str | None = None, trust: bool = False) -> Health:
    """Check in a child process whether a checkpoint can be loaded, and what is in it. No weight is read.

    Args:
        folder: A trial's folder, any other model's, a PEFT adapter's, or ``minilm``.
        task: As in ``dryfit.load``; None: a trial's encoder with its head, else what the folder's config names.
        trust: Run code that comes with the model, and that of a task of your own.

    Returns:
        What was found. A damaged file or a missing weight is a finding, not an error.

    Raises:
        LoadError: There is no such folder.
        ConfigError: There is no such task, the architecture has no such head, or its code is not trusted.
        ChildError: The process ended without an answer.
    """
    name = str(folder)
    if name != PACKAGED_MODEL:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise LoadError(
                f"looking at {name}",
                "it is a file" if path.exists() else "there is no such folder",
                allowed="a model's folder, with its config.json; nothing is downloaded",
                hint="check the path",
            )
        name = str(path)
    return run_alone(f"looking at {name}", CheckRequest(folder=name, task=task, trust=trust)).health


def predict(
    model: Path | str,
    source: Path | str,
    out: Path | str,
    *,
    batch: int = 64,
    device: str = "auto",
    force: bool = False,
    trust: bool = False,
    on_note: Callable[[str], None] = lambda _: None,
) -> PredictResult:
    """Predict every row of a source with a trained model, in a child process.

    One JSON line a row, in order: ``row`` (line or index), ``id``, ``label`` and ``probabilities``; a row that cannot
    be predicted has an ``error`` instead of the last two. The output appears when it is complete, or not at all.

    Args:
        model: A folder that ``dryfit train`` wrote, or a trial's best weights.
        source: A ``.jsonl``, ``.csv`` or ``.parquet`` file, or ``hub:NAME[:SPLIT]``; labels are not needed.
        out: Where to write.
        batch: Rows at once.
        device: ``auto``, ``cpu`` or ``cuda``.
        force: Overwrite an existing file.
        trust: Run code that comes with the model, and that of a task of your own.
        on_note: Called with a line for each bad row, and for progress.

    Raises:
        ConfigError: ``out`` is there already, or its folder is not.
        LoadError: The model's folder is absent or not of dryfit.
        DataError: The source is absent, or cannot be read to its end.
        MachineError: There is no such device.
    """
    folder, target = _model_folder(model, f"looking at {model}"), Path(out).expanduser().absolute()
    _check_target(target, force=force)
    name = str(source)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    body = PredictRequest(
        model_dir=str(folder),
        source=name if name.startswith(HUB_PREFIX) else str(Path(source).expanduser().absolute()),
        out=str(target),
        temporary=str(temporary),
        batch_rows=batch,
        device=device,
        threads=available_cores(),
        trust=trust,
    )

    try:
        return run_alone(f"predicting {name}", body, lambda message: _pass_on(message, on_note))
    finally:
        temporary.unlink(missing_ok=True)


def merge(model: Path | str, out: Path | str, *, trust: bool = False) -> Path:
    """Merge the LoRA adapters of a trained model into its base, and save it for plain transformers.

    Args:
        model: A folder that ``dryfit train`` wrote, or a trial's best weights.
        out: The new folder.
        trust: Run code that comes with the model.

    Returns:
        The new folder.

    Raises:
        ConfigError: ``out`` is there already, or the model has no adapters.
        LoadError: The model's folder is absent or not of dryfit, or its base is no longer where it was.
    """
    doing = f"merging the adapters of {model}"
    folder, target = _model_folder(model, doing), Path(out).expanduser().absolute()
    if target.exists() or not target.parent.is_dir():
        found = f"{target} exists" if target.exists() else f"there is no folder {target.parent}"
        raise ConfigError(doing, found, "a new folder in one that is there")
    body = MergeRequest(model_dir=str(folder), out=str(target), threads=available_cores(), trust=trust)
    return Path(run_alone(doing, body).out)


def _model_folder(model: Path | str, doing: str) -> Path:
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        raise LoadError(doing, "there is no such folder", "a trained model's folder", "check the path")
    return folder


def _pass_on(message: Message, on_note: Callable[[str], None]) -> None:
    match message:
        case Note(text=text):
            on_note(text)
        case Progress(step=rows):
            on_note(f"{rows} rows")
        case _:
            pass


def _check_target(target: Path, *, force: bool) -> None:
    doing = f"writing predictions to {target}"
    if target.is_dir():
        raise ConfigError(doing, "it is a folder", "a file")
    if not target.parent.is_dir():
        raise ConfigError(doing, f"there is no folder {target.parent}", "a file in a folder that is there")
    if target.exists() and not force:
        raise ConfigError(doing, "it is there already", "a new file", "another one, or --force")
