"""Check a model folder, predict rows with a trained model, merge its adapters, export it, and send it to a hub."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pydantic import BaseModel, Field

from dryfit.processes.node import available_cores
from dryfit.settings.check_messages import CheckRequest, Health
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.tables import HUB_PREFIX, PACKAGED_MODEL
from dryfit.settings.training_messages import (
    ExportRequest,
    MergeRequest,
    PredictRequest,
    PredictResult,
    is_plain_model,
    is_study,
    model_folder,
)
from dryfit.settings.wire import Message, Note, Progress
from dryfit.study.child_jobs import run_alone
from dryfit.study.final_training import copy_model


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
    folder, target = model_folder(model, f"looking at {model}"), Path(out).expanduser().absolute()
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
    folder, target = model_folder(model, doing), _new_folder(out, doing)
    body = MergeRequest(model_dir=str(folder), out=str(target), threads=available_cores(), trust=trust)
    return Path(run_alone(doing, body).out)


def export_model(
    model: Path | str,
    out: Path | str | None,
    *,
    encoder_alone: bool = False,
    trust: bool = False,
    on_note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Save a trained model as a folder that plain transformers loads; see :func:`dryfit.export`."""
    doing = f"exporting {model} to transformers"
    folder = Path(model).expanduser().resolve()
    plain = is_plain_model(folder)  # a Trainer of the user's own, or a script, saved it
    if not plain:
        folder = model_folder(model, doing)
    elif encoder_alone:
        raise ConfigError(doing, "other code than dryfit's saved it, and its encoder is not known", "--to transformers")
    if out is None:
        study = next((parent for parent in folder.parents if is_study(parent)), None)
        if study is not None:
            raise ConfigError(doing, f"it lies in the study {study}, which keeps its folders itself", "-o FOLDER")
        out = folder.with_name(f"{folder.name}-{'encoder' if encoder_alone else 'transformers'}")
    target = _new_folder(out, doing)
    if plain:
        copy_model(folder, target)
        on_note("it is as your own code saved it, and copied as it is")
        return target
    body = ExportRequest(
        model_dir=str(folder), out=str(target), encoder_alone=encoder_alone, threads=available_cores(), trust=trust
    )
    return Path(run_alone(doing, body, lambda message: _pass_on(message, on_note)).out)


class Pushed(BaseModel, frozen=True):
    """What was sent to a hub, or would be.

    Attributes:
        schema_version: The number of its format.
        repo: The repository, ``owner/name``.
        sizes: The bytes of each file, by its path in the model's folder.
        url: The commit's address; empty: nothing was sent.
    """

    schema_version: int = Field(default=1, serialization_alias="schema")
    repo: str
    sizes: dict[str, int]
    url: str = ""


def push(model: Path | str, repo: str, *, public: bool = False, dry_run: bool = False) -> Pushed:
    """Send a trained model, its tokenizer and its card to a Hugging Face hub, as one commit.

    Nothing else in dryfit sends anything to a hub. The hub is that of ``HF_ENDPOINT``; the token comes from
    ``HF_TOKEN`` or from what ``hf auth login`` keeps.

    Args:
        model: A folder that `dryfit train` wrote, or a trial's best weights.
        repo: ``owner/name``, made if it is not there yet; one that is keeps who may see it.
        public: A new repository can be seen by everyone; otherwise by its owner alone.
        dry_run: Only return what would be sent.

    Raises:
        LoadError: The folder is none of a model; the models in it are named.
        ConfigError: The repository's name is none, or the folder holds links.
        MachineError: The hub cannot be reached, or refuses.
    """
    doing = f"sending {model} to {repo}"
    folder = model_folder(model, doing)
    files = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    links = [path for path in files if path.is_symlink()]
    if links:
        raise ConfigError(doing, f"{links[0]} is a link, and what it points at may be no part of the model", "files")
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    if dry_run:
        return Pushed(repo=repo, sizes=sizes)
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # The error of the HTTP client that this huggingface_hub uses (its name depends on the version), and OSError.
    unreachable = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    hub = huggingface_hub.HfApi(library_name="dryfit")
    try:
        there = hub.create_repo(repo, private=not public, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=there.repo_id, folder_path=folder, commit_message="Model trained with dryfit"
        )
    except HFValidationError as error:
        raise ConfigError(doing, f"{repo!r} is no name of a repository: {error}", "OWNER/NAME") from error
    except OfflineModeIsEnabled as error:
        raise MachineError(doing, "HF_HUB_OFFLINE is set", hint="unset it for this command") from error
    except HfHubHTTPError as error:
        hint = "export HF_TOKEN, one that may write, or run `hf auth login`"
        raise MachineError(doing, f"{hub.endpoint} refuses: {error}", hint=hint) from error
    except unreachable as error:
        raise MachineError(doing, f"{hub.endpoint} cannot be reached: {error}", hint="see HF_ENDPOINT") from error
    return Pushed(repo=there.repo_id, sizes=sizes, url=str(commit.commit_url))


def _new_folder(out: Path | str, doing: str) -> Path:
    """Return the whole path of a folder that is to be made.

    Raises:
        ConfigError: It is there already, or the folder that it is to lie in is not.
    """
    target = Path(out).expanduser().absolute()
    if target.exists() or not target.parent.is_dir():
        found = f"{target} exists" if target.exists() else f"there is no folder {target.parent}"
        raise ConfigError(doing, found, "a new folder in one that is there")
    return target


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
