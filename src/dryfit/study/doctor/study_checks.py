"""Judges a study's file, folder and ledger before anything is run."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dryfit.config.schema import SamplerName, StudyConfig
from dryfit.config.trackers import tracker_of
from dryfit.core.errors import ConfigError, LedgerError, MachineError
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.trial import Scalar
from dryfit.core.sharding.rank_search import AUTO
from dryfit.core.text.units import gib
from dryfit.search.changes import comparability_key
from dryfit.search.followers.targets import demand_tracker, server_trouble, storage_url
from dryfit.search.sampling.suggest import suggest
from dryfit.search.space.fields import apply_params
from dryfit.search.space.space import Space
from dryfit.store.events import Compatibility, GenerationBegan, StudyRevised
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import each_event
from dryfit.store.lock import lock_owner
from dryfit.store.replay import StudyState
from dryfit.study.doctor.finding import Finding, failed, failed_by, passed, warned
from dryfit.study.doctor.folder import FolderFacts, look_at_folder
from dryfit.study.loop.generations import next_generation, recorded
from dryfit.study.planning.pace import recorded_precision, with_precision
from dryfit.study.resources.disk import DiskNeed, what_fits

ABOUT: Final = "study"

_DRAWS: Final = 64
_CONNECT_S: Final = 5.0
_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "redis": 6379}
_ROOMY: Final = 2.0
"""Free disk below this many times the need gives a warning: other programs write too."""

_NO_LONGER: Final = "values so far do not compare with new ones, and a new generation would begin"

Drawn = tuple[tuple[dict[str, Scalar], TrialSettings], ...]
"""Points of a space, with the settings that they give."""


def space_findings(config: StudyConfig, space: Space) -> tuple[Finding, Drawn]:
    """Draw points of the space at random, and check that they give legal settings."""
    drawn: list[tuple[dict[str, Scalar], TrialSettings]] = []
    search = config.search.model_copy(update={"sampler": SamplerName.RANDOM})
    for number in range(_DRAWS if space.params else 0):
        point = suggest(
            space,
            (),
            search=search,
            directions=(config.study.resolved_direction,),
            points=(),
            seed=config.study.seed,
            number=number,
        )
        if config.function is not None:  # its names are its own: there are no settings to put the values into
            drawn.append((point.params, config.trial_settings))
            continue
        try:
            drawn.append((point.params, apply_params(config.trial_settings, point.params)))
        except ConfigError as error:
            return failed_by(ABOUT, "space", error), tuple(drawn)
    return passed(ABOUT, "space", _space_text(space, len(drawn))), tuple(drawn)


def _space_text(space: Space, drawn: int) -> str:
    if not space.params:
        return "nothing is searched: every trial has the study's own values"
    conditions = sum(1 for param in space.params if param.when)
    legal = f"{drawn} points drawn at random give legal settings"
    return f"{len(space.names)} keys, {conditions} cases with a condition; {legal}"


def lock_finding(layout: StudyLayout) -> Finding:
    """Check that no process runs the study now."""
    try:
        owner = lock_owner(layout.lock)
    except OSError as error:
        return failed(ABOUT, "lock", f"{layout.lock}: {error.strerror}", "make the study's files yours (chown, chmod)")
    if owner is not None:
        fix = f"wait for it, or stop it with `dryfit stop {layout.folder}`"
        return failed(ABOUT, "lock", f"process {owner} is running it", fix)
    return passed(ABOUT, "lock", "nobody runs it")


def record_findings(config: StudyConfig, space: Space, layout: StudyLayout) -> tuple[list[Finding], StudyState]:
    """Check the ledger, and the effect of this file on its study."""
    state, events = StudyState(), 0
    try:
        for event in each_event(layout.ledger):
            state.apply(event)
            events += 1
    except LedgerError as error:
        return [failed_by(ABOUT, "ledger", error)], StudyState()
    except OSError as error:
        fix = "make the study's files readable for you"
        return [failed(ABOUT, "ledger", f"{layout.ledger}: {error.strerror}", fix)], StudyState()
    if state.created is None or not state.trials:
        return [passed(ABOUT, "ledger", "no trial yet: `dryfit tune` begins the study")], StudyState()
    ended = sum(1 for trial in state.trials if trial.outcome is not None)
    found = passed(ABOUT, "ledger", f"{events} events, {len(state.trials)} trials, {ended} of them ended")
    return [found, *_going_on(config, space, layout, state)], state


_FORKS_FIX: Final = "nothing, if that is meant: all trials are kept, and the total counts from zero; or change it back"


def _going_on(config: StudyConfig, space: Space, layout: StudyLayout, state: StudyState) -> Iterator[Finding]:
    missing = recorded(state, layout)
    if missing is not None:
        state.apply(missing)
    config = with_precision(config, recorded_precision(state))
    now = comparability_key(config, space, data=state.generation.comparability.data, folder=layout.folder)
    following = next_generation(state, now)
    match following:
        case GenerationBegan(generation=number, reasons=reasons, reused=reused) if number > 1:
            kept = f"generation {number} would begin, {len(reused)} of {len(state.trials)} trials would be used"
            yield warned(ABOUT, "going on", f"{Compatibility.FORKS}: {'; '.join(reasons)}: {kept}", _FORKS_FIX)
        case StudyRevised(compatibility=compatibility, reasons=reasons) if reasons:
            found = f"{compatibility}: {'; '.join(reasons)}: its trials count as before"
            yield passed(ABOUT, "going on", found)
        case _:
            yield passed(ABOUT, "going on", "the file fits the study in the folder")


def repeat_findings(config: StudyConfig) -> Iterator[Finding]:
    """Report why a study is not repeatable: measured or random settings; nothing for a repeatable one."""
    found: list[str] = []
    if config.runtime.parallel == AUTO:
        found.append('runtime.parallel = "auto": another run need not have the same trials; with 1 it has')
    if config.train.precision is Precision.AUTO:
        found.append('train.precision = "auto": fp32 or bf16, measured before the first trial, then kept')
    if found:
        yield passed(ABOUT, "repeat", "; ".join(found))


def mirror_finding(target: str, layout: StudyLayout, environment: Mapping[str, str]) -> Finding:
    """Check whether the Optuna mirror can be written; only its missing variable refuses the study.

    Args:
        target: ``search.mirror``; a URL may hold a password, and is not printed.
        layout: The study's folder.
        environment: Has the URL that ``env:NAME`` stands for.
    """
    if target == "none":
        return passed(ABOUT, "mirror", "off")
    if target == "journal":
        return passed(ABOUT, "mirror", str(layout.journal))
    try:
        url = storage_url(target, environment)
    except MachineError as error:
        return failed_by(ABOUT, "mirror", error)
    kind, trouble = _url_trouble(url)
    if trouble:
        return warned(ABOUT, "mirror", f"{kind}: {trouble}", 'start the server, or set search.mirror = "journal"')
    return passed(ABOUT, "mirror", f"{kind}: somebody answers")


def tracker_finding(entry: str, layout: StudyLayout, environment: Mapping[str, str]) -> Finding:
    """Check whether a tracker can be written: a study is refused without its package or its variable.

    Args:
        entry: One of ``study.track``.
        layout: The study's folder.
        environment: Has the URL that ``env:NAME`` stands for.
    """
    tracker, about = tracker_of(entry), f"track {entry}"
    try:
        where = demand_tracker(tracker, layout.folder, environment)
    except MachineError as error:
        return failed_by(ABOUT, about, error)
    trouble = server_trouble(tracker, where, environment)
    if trouble:
        return warned(ABOUT, about, trouble, "a study runs without it: what is missing is written once it is there")
    return passed(ABOUT, about, "can be written")


def _url_trouble(url: str) -> tuple[str, str]:
    """The kind of a storage URL, and why it cannot be reached; nothing is written there."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "search.mirror", "it is no URL"
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":
        facts = look_at_folder(Path(parts.path.removeprefix("/") or ".").parent)
        return "sqlite", facts.not_writable and f"{facts.folder}: {facts.not_writable}"
    if kind not in _PORTS:
        return kind or "search.mirror", "it is no storage that Optuna knows"
    try:
        with socket.create_connection((host or "localhost", port or _PORTS[kind]), timeout=_CONNECT_S):
            return f"{kind} on {host or 'localhost'}", ""
    except OSError as error:
        return f"{kind} on {host or 'localhost'}", error.strerror or str(error)


def cache_finding(layout: StudyLayout, folder: FolderFacts) -> Finding:
    """Describe the token cache."""
    if not layout.cache.is_dir():
        return passed(ABOUT, "token cache", "none yet: it is made from the rows")
    folders = [entry for entry in layout.cache.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    sets = [entry for entry in folders if any(entry.glob("*.safetensors"))]  # others hold what models compute
    size_bytes = sum(file.stat().st_size for entry in sets for file in entry.iterdir() if file.is_file())
    found = f"{len(sets)} of (data, model, length), {gib(size_bytes)}"
    if folder.not_writable:
        return warned(ABOUT, "token cache", f"{found}, and no more can be added", "make the study's folder writable")
    return passed(ABOUT, "token cache", found)


def disk_finding(need: DiskNeed, folder: FolderFacts, taken_bytes: int) -> Finding:
    """Check whether the disk has room for the study's files.

    Args:
        need: What they take at most.
        folder: Their folder.
        taken_bytes: What they take already; a part of the need.
    """
    usable_bytes = folder.free_bytes + taken_bytes
    parts = f"{gib(need.running_bytes)} while trials run, {gib(need.kept_bytes)} weights kept"
    found = f"up to {gib(need.total_bytes)} needed ({parts}), {gib(folder.free_bytes)} free in {folder.folder}"
    if need.total_bytes > usable_bytes:
        fits = what_fits(need, usable_bytes)
        return failed(ABOUT, "disk", found, f"{fits}, or free some space" if fits else "free some space, or use --dir")
    if _ROOMY * need.total_bytes > usable_bytes:
        return warned(ABOUT, "disk", found, "free some space: a full disk pauses a study")
    return passed(ABOUT, "disk", found)


def data_changed(state: StudyState, fingerprint: str) -> Finding | None:
    """Return a warning if the rows are no longer those of the trials so far; else None."""
    before = state.resolved
    if before is None or not state.trials or before.data_fingerprint == fingerprint:
        return None
    found = f"the rows have changed: fingerprint {fingerprint}, it was {before.data_fingerprint}; {_NO_LONGER}"
    return warned("data", "rows", found, _FORKS_FIX)
