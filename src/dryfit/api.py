"""The Python face of dryfit: what each command of the command line does, as a function."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dryfit.config.checks import Use
from dryfit.config.load import LoadedStudy, load_study_file, load_study_text
from dryfit.core.devices import parse_device
from dryfit.core.errors import ConfigError, ExitStatus, InternalError, LedgerError, LoadError
from dryfit.core.health import Health
from dryfit.core.plan import DeviceSpec
from dryfit.core.settings import ModelSettings, Task
from dryfit.core.trial import Outcome
from dryfit.core.units import parse_bytes
from dryfit.core.wire import CalibrateResult, CheckRequest, PlanAnswer, write_text_atomic
from dryfit.report.summary import StudySummary, summarise
from dryfit.search.space import Space
from dryfit.starter.preset import preset_text
from dryfit.starter.template import init_folder
from dryfit.store.layout import StudyLayout, shared_traces
from dryfit.store.ledger import lock_owner
from dryfit.store.replay import StudyState, TrialState
from dryfit.study.calibrating import measure_and_compare
from dryfit.study.devices import first_gpu, named_gpu
from dryfit.study.errand import run_alone
from dryfit.study.machine import End
from dryfit.study.observers import Observer
from dryfit.study.plans import OnNote, PlanInput, SpacePlan
from dryfit.study.plans import plan_one as _plan_one
from dryfit.study.plans import plan_space as _plan_space
from dryfit.study.refusals import nothing_fits_text
from dryfit.study.session import SessionResult, read_study, run_session
from dryfit.study.stops import GRACEFUL, NOW

_PACKAGED = ModelSettings().name


@dataclass(frozen=True, slots=True)
class TuneResult:
    """How a run of a study ended.

    Attributes:
        end: Why it ended.
        summary: The study in numbers.
        folder: Where everything lies.
        status: What the command line exits with.
        advice: Where nothing fits the device: what came closest, and what would fit.
    """

    end: End
    summary: StudySummary
    folder: Path
    status: ExitStatus
    advice: str = ""


def init(folder: Path | str, *, task: Task = Task.CRITERIA, force: bool = False) -> list[Path]:
    """Write a commented ``study.toml`` and a small synthetic data set into ``folder``.

    Returns:
        The files written.

    Raises:
        ConfigError: A file is already there, and ``force`` is not set; or the task cannot be trained yet.
    """
    return init_folder(Path(folder), task=task, force=force)


def plan(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    ladder: bool = False,
    on_note: OnNote = lambda _: None,
) -> PlanAnswer:
    """Say whether a trial with the study's own values fits a device, without using one.

    Args:
        study_file: A study file or its folder; None: the defaults, or ``preset``. Its data may be missing.
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...; None: this machine's first GPU.
        overrides: ``key=value`` pairs that replace keys of the file; ``execution.*`` keys are kept as given.
        preset: A study file that comes with dryfit.
        ladder: Price every change, also where none is needed; slower.
        on_note: Hears what is being done.

    Raises:
        ConfigError: A key, a size or the device is wrong, or there is no GPU and none was named.
        DryfitError: The data or the model is wrong.
    """
    asked = plan_input(study_file, device=device, overrides=overrides, preset=preset)
    return _plan_one(asked, on_note, ladder=ladder)


def plan_space(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    on_note: OnNote = lambda _: None,
) -> SpacePlan:
    """Say which part of a study's search space fits a device. The arguments are as in :func:`plan`.

    Raises:
        ConfigError: As :func:`plan`; or there are too many combinations.
        DryfitError: The data or a model is wrong.
    """
    return _plan_space(plan_input(study_file, device=device, overrides=overrides, preset=preset), on_note)


def plan_input(
    study_file: Path | str | None, *, device: str | None, overrides: Sequence[str], preset: str | None
) -> PlanInput:
    """Read and check what is to be planned; nothing is started.

    Raises:
        ConfigError: As :func:`plan`.
    """
    if study_file is not None and preset is not None:
        raise ConfigError("planning", f"a study file ({study_file}) and a preset ({preset})", "one of them")
    layout = None
    if study_file is not None:
        loaded = load_study_file(study_file_of(Path(study_file)), overrides, Use.PLAN)
        layout = layout_of(study_file)
    elif preset is not None:
        loaded = load_study_text(preset_text(preset), Path(f"preset {preset}"), overrides, Use.PLAN)
    else:
        loaded = load_study_text("", Path("the defaults"), overrides, Use.PLAN)
    spec = _device(device)
    limit = loaded.config.execution.memory_limit
    if limit is not None:
        spec = spec.model_copy(update={"capacity_bytes": min(spec.capacity_bytes, parse_bytes(limit))})
    return PlanInput(loaded.config, space_of(loaded), spec, shared_traces(os.environ, Path.home()), layout)


def _device(text: str | None) -> DeviceSpec:
    found = parse_device(text) if text is not None else first_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found is None:
        raise ConfigError(
            "looking for a device to plan for",
            "this machine has no GPU that can be seen",
            "--device with a name or an amount of memory: rtx4090, a100-80, h200, 24GiB",
        )
    return found


def tune(
    study_file: Path | str,
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    folder: Path | str | None = None,
    observers: Sequence[Observer] = (),
) -> TuneResult:
    """Search the hyperparameters of a study, going on where an earlier run stopped.

    Args:
        study_file: A study file, or a folder with a ``study.toml``.
        overrides: ``key=value`` pairs that replace keys of the file.
        trials: The study's total of counted trials; replaces ``study.trials``.
        folder: Where the study lives; see :func:`layout_of` for the default.

    Raises:
        DryfitError: It could not run.
    """
    path = study_file_of(Path(study_file))
    loaded = load_study_file(path, _with_total(overrides, trials))
    layout = StudyLayout(Path(folder).resolve()) if folder is not None else layout_of(path)
    return _result(run_session(loaded.config, space_of(loaded), layout, observers))


def resume(
    folder: Path | str,
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    observers: Sequence[Observer] = (),
) -> TuneResult:
    """Go on with a study exactly as it was last run, ``--set`` of that run included.

    Raises:
        LedgerError: There is no study in the folder.
        DryfitError: It could not run.
    """
    layout = layout_of(folder)
    read_study(layout)
    loaded = load_study_file(layout.frozen_file, _with_total(overrides, trials))
    return _result(run_session(loaded.config, space_of(loaded), layout, observers))


def open_study(folder: Path | str) -> StudyState:
    """Read a study, running or not, without owning it.

    Raises:
        LedgerError: There is no study in the folder.
    """
    return read_study(layout_of(folder))


def status(folder: Path | str) -> StudySummary:
    """The study in numbers, whether it runs or not.

    Raises:
        LedgerError: There is no study in the folder.
    """
    return summarise(open_study(folder))


def owner(folder: Path | str) -> int | None:
    """The process that runs the study now; None where nobody does."""
    return lock_owner(layout_of(folder).lock)


def trial_of(state: StudyState, number: int) -> TrialState:
    """A trial by its number.

    Raises:
        ConfigError: There is none.
    """
    if number < len(state.trials):
        return state.trials[number]
    raise ConfigError("looking for a trial", f"there is no trial {number}", f"0 to {len(state.trials) - 1}")


def stop(folder: Path | str, *, now: bool = False) -> int | None:
    """Ask the process that runs a study to stop.

    Args:
        now: Do not wait for checkpoints.

    Returns:
        The process asked; None where nobody runs the study.

    Raises:
        LedgerError: There is no study in the folder.
    """
    layout = layout_of(folder)
    if not layout.ledger.exists():
        raise LedgerError(f"stopping the study in {layout.folder}", "there is none (no ledger.jsonl)")
    asked = lock_owner(layout.lock)
    if asked is not None:
        write_text_atomic(layout.stop_request, NOW if now else GRACEFUL)
    return asked


def calibrate(device: str = "cuda:0", *, quick: bool = False, on_note: OnNote = lambda _: None) -> CalibrateResult:
    """Measure a handful of training steps on a GPU and keep what later plans for its kind of device can use.

    Args:
        device: ``cuda`` or ``cuda:N``, counted among those that this process may use.
        quick: Fewer steps.
        on_note: Hears what is being done.

    Raises:
        ConfigError: It is no such name.
        MachineError: There is no such device.
        ChildError: Nothing could be measured.
    """
    visible = named_gpu(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    keep_in = shared_traces(os.environ, Path.home()).parent
    return measure_and_compare(visible, keep_in, on_note, quick=quick)


def check(folder: Path | str, *, task: str | None = None, trust: bool = False) -> Health:
    """Look at a checkpoint in a process of its own: whether it can be loaded, and what is in it. No weight is read.

    Args:
        folder: A trial's folder, any other model's, a PEFT adapter's, or ``minilm``.
        task: As in ``dryfit.load``; None: a trial's encoder with its head, else what the folder's config names.
        trust: Run code that comes with the model.

    Returns:
        What was found. A damaged file or a missing weight is a finding, not an error.

    Raises:
        LoadError: There is no such folder.
        ConfigError: There is no such task, the architecture has no such head, or its code is not trusted.
        ChildError: The process ended without an answer.
    """
    name = str(folder)
    if name != _PACKAGED:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise LoadError(
                f"looking at {name}",
                "it is a file" if path.exists() else "there is no such folder",
                allowed="a model's folder, with its config.json; nothing is downloaded",
                hint="check the path",
            )
        name = str(path)
    result = run_alone(f"looking at {name}", CheckRequest(folder=name, task=task, trust=trust))
    if result.check is None:
        raise InternalError(f"looking at {name}", "the child's answer is of another job")
    return result.check.health


def load_config(study_file: Path | str, overrides: Sequence[str] = ()) -> LoadedStudy:
    """Read and check a study file without starting anything.

    Raises:
        ConfigError: All that is wrong with it, with file and line.
    """
    return load_study_file(study_file_of(Path(study_file)), overrides)


def space_of(loaded: LoadedStudy) -> Space:
    """The search space of a study file.

    Raises:
        ConfigError: A searched key, with the place where it stands.
    """
    try:
        return Space.from_config(loaded.config)
    except ConfigError as error:
        places = [loaded.origins.get(f"space.{name}") for name in loaded.config.space if error.doing.endswith(name)]
        place = next((place for place in places if place), None)
        doing = f"{error.doing} ({place})" if place else error.doing
        raise ConfigError(doing, error.found, error.allowed, error.hint) from None


def study_file_of(path: Path) -> Path:
    """The study file meant by a file or folder.

    Raises:
        ConfigError: There is none.
    """
    file = path / "study.toml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"looking for a study at {path}",
            f"there is no file {file}",
            "a study file, or a folder with a study.toml",
            f"write one with `dryfit init {path}`",
        )
    return file


def layout_of(path: Path | str) -> StudyLayout:
    """Where a study lives: a folder is itself, ``X/study.toml`` lives in ``X``, ``X/name.toml`` in ``X/name``."""
    file = Path(path)
    if file.is_dir() or file.suffix != ".toml":
        return StudyLayout(file.resolve())
    if file.name in ("study.toml", "frozen.toml"):
        return StudyLayout(file.parent.resolve())
    return StudyLayout(file.with_suffix("").resolve())


def _with_total(overrides: Sequence[str], trials: int | None) -> tuple[str, ...]:
    return (*overrides, f"study.trials={trials}") if trials is not None else tuple(overrides)


def _result(session: SessionResult) -> TuneResult:
    return TuneResult(
        end=session.end,
        summary=summarise(session.state),
        folder=session.layout.folder,
        status=exit_status(session.end, session.state),
        advice=nothing_fits_text(session.state) if session.end is End.REFUSED else "",
    )


def exit_status(end: End, state: StudyState) -> ExitStatus:
    """What a command exits with after a study's session."""
    match end:
        case End.DONE | End.NO_IMPROVEMENT:
            useful = state.counts[Outcome.COMPLETE] + state.counts[Outcome.PRUNED]
            return ExitStatus.DONE if useful else ExitStatus.ANSWER_IS_NO
        case End.TOO_MANY_FAILURES | End.REFUSED:
            return ExitStatus.ANSWER_IS_NO
        case End.MAX_HOURS | End.STOPPED | End.PAUSED:
            return ExitStatus.STOPPED
        case End.INTERRUPTED:
            return ExitStatus.INTERRUPTED
        case End.BROKEN:
            return ExitStatus.BUG
