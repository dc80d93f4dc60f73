"""The report of a study: its sections with texts, figures and tables, and the best configuration as a study file."""

import json
from collections.abc import Callable, Sequence

from dryfit.documents.comparison import Comparison, comparison_table, read_comparison
from dryfit.documents.document import counted, duration_text, shortened, time_text, value_text
from dryfit.documents.finals import final_sections
from dryfit.documents.pages import Page, Section
from dryfit.documents.plans import plan_totals, totals_text
from dryfit.documents.plots import (
    MOST_SLICES,
    curves_figure,
    front_figure,
    history_figure,
    importance_figure,
    memory_figure,
    slice_figure,
    timeline_figure,
)
from dryfit.documents.report_tables import FailuresView, failures_by_kind, values_cells
from dryfit.documents.summary import generations_table, nodes_ever
from dryfit.documents.time_spent import TimeSpent, time_spent, with_time
from dryfit.documents.worth import collapses_of, standing_of, verdict_of
from dryfit.ledger.events import StudyCreated
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptEnd, TrialState
from dryfit.processes.attempt import read_phases
from dryfit.search.importance import ENOUGH_TRIALS, Importances, importances_of
from dryfit.search.space import apply_params, setting
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_key import IRRELEVANT, NEUTRAL
from dryfit.settings.study_file import SearchSettings, StudyConfig
from dryfit.settings.study_file_checks import cross_problems
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.tables import Settings, TrialSettings
from dryfit.settings.task_facts import task_word
from dryfit.settings.text import Table, few, gib, number_text
from dryfit.settings.training_messages import BaselinesResult, ResolveResult, SplitFacts
from dryfit.settings.trial import Outcome, Scalar, best_first
from dryfit.study.trial_plans import needed_bytes

_LONGEST_NAME = 100


def best_study_file(config: StudyConfig, study: StudyCreated, trial: TrialState) -> str:
    """Return a study file of one trial with the parameters of ``trial``; its paths are absolute, so it works anywhere.

    Args:
        config: The configuration the study was last run with.
        study: The study.
        trial: The trial whose parameters to take.

    Raises:
        ConfigError: This version has no setting of a parameter's name.
    """
    # The goal's name is quoted: a line end in it would end the comment.
    value = f"{json.dumps(study.metric)} {number_text(trial.value)}"
    head = [
        f"# Trial {trial.number} of study {json.dumps(study.name)}: {value}, without the search.",
        f"# That trial's seed was {trial.seed}; a study gives each trial a seed of its own, so expect another value.",
    ]
    _, *body = dump_toml(narrowed(config, trial.params)).splitlines()
    return "\n".join([*head, *body]) + "\n"


def narrowed(config: StudyConfig, params: dict[str, Scalar]) -> StudyConfig:
    """Return a configuration with the searched values fixed and nothing left to search.

    Settings that nothing reads with these values go back to their defaults. So does ``[search]``, whose ``mirror`` may
    hold a password.

    Raises:
        ConfigError: A parameter is no setting, or its value is not allowed.
    """
    settings = apply_params(config.trial_settings, params, doing="making a study file of the best trial")
    study = config.study.model_copy(
        update={"name": f"{config.study.name[: _LONGEST_NAME - 5]}-best", "trials": 1, "patience": None}
    )
    fixed = config.model_copy(
        update={
            **{table: getattr(settings, table) for table in TrialSettings.model_fields},
            "study": study,
            "space": {},
            "search": SearchSettings(),
        }
    )
    return _without_unread(fixed)


def _without_unread(config: StudyConfig) -> StudyConfig:
    unread = [
        (str(problem.path[0]), str(problem.path[1]))
        for problem in cross_problems(config)
        if len(problem.path) == 2 and problem.path[0] in TrialSettings.model_fields
    ]
    for table, key in unread:
        settings: Settings = getattr(config, table)
        default = type(settings).model_fields[key].default
        config = config.model_copy(update={table: settings.model_copy(update={key: default})})
    return config


def refusals(state: StudyState) -> list[list[TrialState]]:
    """Return the refused trials grouped by plan, in order of their first trial."""
    by_key: dict[str, list[TrialState]] = {}
    for trial in state.present:
        if trial.outcome is Outcome.REFUSED:
            key = trial.plan.key if trial.plan is not None else f"trial {trial.number}"
            by_key.setdefault(key, []).append(trial)
    return list(by_key.values())


_MOST_TRIALS = 200
_MOST_REFUSALS = 100
_MOST_SENTENCES = 3
_MOST_NUMBERS = 8
_FEW_DRAWN = 10
_LONGEST_CELL = 400
"""Most characters of a parameter list or a reason in a table cell."""


def _best_section(state: StudyState, best_file: str, best_missing: str) -> Section | None:
    if not state.ranked:
        return None
    best, first = state.ranked[0], state.present[0]
    names = list(dict.fromkeys((*best.params, *first.params)))
    rows = [(name, _cell(best, name), _cell(first, name)) for name in names]
    heads = ("parameter", f"trial {best.number} (best)", f"trial {first.number}")
    if best.number == first.number:
        heads, rows = heads[:2], [row[:2] for row in rows]
    texts = ("As a study file without the search: save it anywhere and run dryfit tune on it.",) if best_file else ()
    return Section(
        "best",
        "Best configuration",
        texts=texts,
        warnings=(best_missing,) if best_missing else (),
        tables=(("", Table(heads, tuple(rows))),) if rows else (),
        code=best_file,
    )


def _baselines(state: StudyState) -> Section | None:
    """What the metric is worth without a model, and the trials that gave all rows the same answer."""
    collapses = collapses_of(state)
    if state.baselines is None and not collapses.trials:
        return None
    result = state.baselines.result if state.baselines is not None else BaselinesResult()
    metric = state.goals[0].name
    rows = [(one.name, number_text(one.metrics.get(metric)), one.words) for one in result.baselines]
    return Section(
        "baselines",
        "What the metric is worth without a model",
        texts=("A trial is worth its compute where it is better than these, by more than chance.",) if rows else (),
        warnings=collapses.sentences,
        tables=(("", Table(("baseline", metric, "answers"), tuple(rows))),) if rows else (),
        notes=result.notes,
    )


def _compared(comparison: Comparison | None) -> Section | None:
    if comparison is None:
        return None
    return Section(
        "compared",
        "Whether the best trials really differ",
        texts=comparison.judgement,
        tables=(("", comparison_table(comparison)),),
        notes=comparison.notes,
    )


def _cell(trial: TrialState, name: str) -> str:
    return value_text(trial.params[name]) if name in trial.params else "not drawn"


def _history(state: StudyState) -> Section | None:
    if not state.present:
        return None
    return Section("history", "Optimisation history", charts=(history_figure(state),))


def _front(state: StudyState) -> Section | None:
    if len(state.goals) < 2:
        return None
    if not state.front:
        return Section("front", "Pareto front", texts=("No complete trial has a value for every goal.",))
    heads = ("trial", *(f"{goal.name} ({goal.direction})" for goal in state.goals), "parameters")
    front = best_first(state.front, state.direction)
    rows = [(str(trial.number), *values_cells(trial, len(state.goals)), _params(trial.params)) for trial in front]
    others = ("Drawn are the first two goals; the front is that of all.",) if len(state.goals) > 2 else ()
    return Section(
        "front",
        "Pareto front",
        texts=("No other complete trial is as good in every goal and better in one.",),
        charts=(front_figure(state),),
        tables=(("", Table(heads, tuple(rows[:_MOST_TRIALS]))),),
        notes=others,
    )


def _importance(state: StudyState, importances: Importances) -> Section | None:
    if not any(trial.params for trial in state.present):
        return None
    if not importances.params:
        text = "None: nothing was found."
        if importances.missing:
            text = f"Not computed from {importances.trials} complete trials: {importances.missing}."
        return Section("importance", "Parameter importance", texts=(text,))
    total = importances.trials
    warnings: list[str] = []
    if total < ENOUGH_TRIALS:
        warnings.append(
            f"Only {total} complete trials are behind these numbers; below {ENOUGH_TRIALS} they may change "
            "much with the next few."
        )
    rare = [param.name for param in importances.params if param.trials < _FEW_DRAWN]
    if rare:
        warnings.append(f"Drawn in fewer than {_FEW_DRAWN} of them: {', '.join(rare)}.")
    goals = f" for {state.goals[0].name} alone" if len(state.goals) > 1 else ""
    text = (
        f"How much a parameter decides whether a trial is among the best {importances.top} of {total} complete "
        f"ones{goals} (PED-ANOVA). It says nothing of the direction, and nothing of values that were never tried."
    )
    rows = tuple((param.name, f"{param.share:.1%}", f"{param.trials} of {total}") for param in importances.params)
    return Section(
        "importance",
        "Parameter importance",
        texts=(text,),
        warnings=tuple(warnings),
        charts=(importance_figure(importances),),
        tables=(("", Table(("parameter", "share", "trials that drew it"), rows)),),
        notes=("A parameter under a condition counts only through trials that met it: rarely drawn explains little.",),
    )


def _slices(state: StudyState, importances: Importances) -> Section | None:
    drawn = dict.fromkeys(name for trial in state.complete for name in trial.params)
    names = [name for name in drawn if len({repr(trial.params.get(name)) for trial in state.complete}) > 1]
    order = [param.name for param in importances.params]
    ranked = sorted(names, key=lambda name: order.index(name) if name in order else len(order))
    if len(state.complete) < 2 or not ranked:
        return None
    charts = [slice_figure(state, name) for name in ranked[:MOST_SLICES]]
    left_out = len(ranked) - len(charts)
    notes = [f"Darker points are later trials of the {len(state.complete)} complete ones."]
    if left_out:
        notes.append(f"{left_out} more parameter{'s are' if left_out > 1 else ' is'} not drawn.")
    return Section("slices", "Values by parameter", charts=tuple(charts), notes=tuple(notes))


def _curves(state: StudyState) -> Section | None:
    figure, left_out = curves_figure(state)
    if not figure["data"]:
        return None
    colors = "Green is the best trial, blue are complete, orange pruned, red failed and grey unfinished ones."
    notes = (colors, left_out) if left_out else (colors,)
    return Section("curves", "Learning curves", charts=(figure,), notes=notes)


def _outcomes(state: StudyState) -> Section | None:
    if not state.present:
        return None
    rows: list[tuple[str, ...]] = []
    for outcome in (*Outcome, None):
        trials = [trial for trial in state.present if trial.outcome is outcome]
        if trials:
            seconds = sum(trial.time_s for trial in trials)
            rows.append((str(outcome or "not finished"), str(len(trials)), duration_text(seconds)))
    tables = [("", Table(("outcome", "trials", "time of their processes"), tuple(rows)))]
    failed = failures_by_kind(state)
    if failed:
        tables.append(("Failed attempts by kind", Table(_FAILURE_HEADS, tuple(_failure_cells(row) for row in failed))))
    lost = [attempt for attempt in state.attempts if attempt.end is AttemptEnd.LOST]
    total_s = sum(attempt.time_s for attempt in state.attempts)
    lost_s = sum(attempt.lost_s for attempt in state.attempts)
    text = f"{len(state.attempts)} processes worked for {duration_text(total_s)}"
    ended_badly = sum(row.attempts for row in failed) + len(lost)
    if ended_badly:
        text += f"; {ended_badly} of them ended without a result, and {duration_text(lost_s)} of work was lost"
    resumed = ("Lost is what was done since the last checkpoint, or by the last attempt of a failed trial.",)
    return Section(
        "outcomes",
        "Outcomes and time lost",
        texts=(f"{text}.",),
        tables=tuple(tables),
        notes=resumed if ended_badly else (),
    )


_FAILURE_HEADS = ("kind", "attempts", "time", "lost", "trials", "what followed", "what was said")


def _failure_cells(row: FailuresView) -> tuple[str, ...]:
    return (
        str(row.kind),
        str(row.attempts),
        duration_text(row.time_s),
        duration_text(row.lost_s),
        few((str(number) for number in row.trials), _MOST_NUMBERS),
        ", ".join(f"{count} {action}" for action, count in row.actions.items()),
        shortened("; ".join(row.sentences[:_MOST_SENTENCES]), _LONGEST_CELL),
    )


def _timeline(state: StudyState, spent: TimeSpent) -> Section | None:
    if not state.attempts:
        return None
    sessions = len(state.sessions)
    text = "One bar is one process of a trial; shaded is the time of "
    text += f"{sessions} sessions of work, long pauses between them cut out." if sessions > 1 else "the one session."
    charts, tables = (timeline_figure(state),), nodes_ever(state)
    return with_time(Section("timeline", "Timeline of processes", texts=(text,), charts=charts, tables=tables), spent)


def _refused(state: StudyState) -> Section | None:
    refused = refusals(state)
    if not refused:
        return None
    rows = [refusal_cells(trials) for trials in refused]
    count = sum(map(len, refused))
    notes = (f"{len(rows) - _MOST_REFUSALS} more are not shown.",) if len(rows) > _MOST_REFUSALS else ()
    heads = ("parameters that decide memory", "trials", "needs", "device has", "why")
    return Section(
        "refused",
        "Refused part of the space",
        texts=(f"{counted(count, 'trial')} with {counted(len(rows), 'different memory plan')} never started.",),
        tables=(("", Table(heads, tuple(rows[:_MOST_REFUSALS]))),),
        notes=notes,
    )


def refusal_cells(trials: Sequence[TrialState]) -> tuple[str, ...]:
    """Return the row of trials with one plan: only the parameters that decide memory."""
    first, unrelated = trials[0], IRRELEVANT | NEUTRAL.keys()
    answer = first.plan.answer if first.plan is not None else None
    return (
        _params({name: value for name, value in first.params.items() if name not in unrelated}) or "-",
        str(len(trials)),
        gib(needed_bytes(answer)) if answer is not None and answer.memory is not None else "unknown",
        gib(answer.device.capacity_bytes) if answer is not None else "-",
        shortened(first.reason, _LONGEST_CELL),
    )


def _memory(state: StudyState) -> Section | None:
    totals = plan_totals(state)
    figure = memory_figure(state)
    if totals is None and figure is None:
        return None
    texts = (f"Plans: {totals_text(totals)}.",) if totals is not None else ()
    none = ("No trial has both a planned and an observed peak of the same execution.",) if figure is None else ()
    charts = (figure,) if figure is not None else ()
    return Section("memory", "Planned and observed memory", texts=texts, charts=charts, notes=none)


def _trials(state: StudyState) -> Section | None:
    if not state.present:
        return None
    ranked = state.ranked
    ordered = [*ranked, *(trial for trial in state.present if trial.score is None)]
    shown = ordered[:_MOST_TRIALS]
    heads = ("trial", "outcome", *(goal.name for goal in state.goals), "steps", "attempts", "time", "seed")
    rows = [
        (
            str(trial.number),
            str(trial.outcome or "not finished"),
            *values_cells(trial, len(state.goals)),
            str(trial.steps_done),
            str(len(trial.attempts)),
            duration_text(trial.time_s),
            str(trial.seed),
            _params(trial.params),
            shortened(trial.reason, _LONGEST_CELL),
        )
        for trial in shown
    ]
    left_out = len(ordered) - len(shown)
    notes = (f"{left_out} more trials are not shown: dryfit export --to csv writes all.",) if left_out else ()
    table = Table((*heads, "parameters", "reason"), tuple(rows))
    return Section("trials", "Trials, the best first", tables=(("", table),), notes=notes)


def _row_counts(split: SplitFacts, class_name: Callable[[int], str]) -> str:
    """Return the number of rows by label, and of those with evidence if the task reads it."""
    counts = [f"{class_name(label)}: {count}" for label, count in split.label_counts.items()]
    return ", ".join(counts if split.with_evidence is None else [*counts, f"with evidence: {split.with_evidence}"])


def _generations(state: StudyState) -> Section | None:
    if len(state.generations) < 2:
        return None
    text = "The study has changed so that trials before and after do not compare; all else on this page is of the last."
    table = generations_table(state)
    return Section("generations", "Generations of the study", texts=(text,), tables=(("", table),))


def _facts(state: StudyState) -> Section:
    created = state.created
    assert created is not None
    facts = [("study", created.id), ("task", task_word(created.task)), ("study seed", str(created.seed))]
    facts += [(f"goal: {goal.name}", str(goal.direction)) for goal in state.goals]
    resolved = state.resolved
    if resolved is not None:
        facts += [("data fingerprint", resolved.data_fingerprint), ("device", _device(resolved))]
    tables = [("", Table(("what", "value"), tuple(facts)))]
    if resolved is not None:
        splits = tuple(
            (name, str(split.rows), _row_counts(split, resolved.class_name)) for name, split in resolved.splits.items()
        )
        tables.append(("Data", Table(("split", "rows", "rows by label"), splits)))
        tables.append(("Models", Table(("model", "revision or content"), tuple(resolved.revisions.items()))))
        tables.append(("Versions", Table(("package", "version"), tuple(resolved.versions.items()))))
    sessions = tuple(
        (
            time_text(session.opened_at_s),
            duration_text(session.work_s),
            session.opened.host,
            session.opened.version,
            session.closed or "not closed: running, or killed",
            "; ".join(session.opened.notes),
        )
        for session in state.sessions
    )
    if sessions:
        heads = ("session opened (UTC)", "worked", "host", "dryfit", "ended", "notes")
        tables.append(("Sessions", Table(heads, sessions)))
    return Section("facts", "Versions, seeds and data", tables=tuple(tables))


def _device(resolved: ResolveResult) -> str:
    spec = resolved.device_spec
    count = f"{resolved.device_count} x " if resolved.device_count > 1 else ""
    return f"{count}{spec.name}, {gib(spec.capacity_bytes)}" if spec is not None else f"{count}{resolved.device}"


def _params(params: dict[str, Scalar]) -> str:
    return shortened(", ".join(f"{name} = {value_text(value)}" for name, value in params.items()), _LONGEST_CELL)


def build_page(
    state: StudyState, config: StudyConfig | ConfigError, layout: StudyLayout, *, running: bool, now_s: float
) -> Page:
    """Return the report page of a study.

    Args:
        state: The study's state, after ``study_created``.
        config: The configuration the study was last run with, or why it is not known.
        layout: The study's folder.
        running: Whether a process runs the study now.
        now_s: Unix time.
    """
    created = state.created
    assert created is not None
    comparison, importances = read_comparison(layout, state), importances_of(state.history(), state.direction)
    verdict = verdict_of(
        state,
        defaults_first=_began_with_defaults(state, config),
        standing=standing_of(state, layout),
        comparison=comparison,
    )
    spent = time_spent(state, lambda one: read_phases(layout.trial(one.trial).attempt(one.number)))
    sections = (
        _best_section(state, *_best_file(state, config)),
        _baselines(state),
        _compared(comparison),
        *final_sections(layout),
        _history(state),
        _front(state),
        _importance(state, importances),
        _slices(state, importances),
        _curves(state),
        _outcomes(state),
        _timeline(state, spent),
        _refused(state),
        _memory(state),
        _trials(state),
        _generations(state),
        _facts(state),
    )
    return Page(
        title=created.name,
        subtitle=_subtitle(state, running=running),
        verdict=f"{verdict.result} {verdict.certainty}",
        tiles=_tiles(state),
        sections=tuple(section for section in sections if section is not None),
        source=layout.ledger.name,
        made_at_s=now_s,
    )


def _best_file(state: StudyState, config: StudyConfig | ConfigError) -> tuple[str, str]:
    """Return the best configuration as a study file, or why there is none."""
    if not state.ranked or state.created is None:
        return "", ""
    try:
        if isinstance(config, ConfigError):
            raise config
        return best_study_file(config, state.created, state.ranked[0]), ""
    except ConfigError as error:
        return "", f"It cannot be written as a study file: {error.doing}: {error.found}."


def _began_with_defaults(state: StudyState, config: StudyConfig | ConfigError) -> bool:
    """Whether the first trial had the study file's own values."""
    if isinstance(config, ConfigError) or not state.present:
        return False
    try:
        own = {name: setting(config.trial_settings, name) for name in state.present[0].params}
    except AttributeError:
        return False  # a searched name is no setting of this version
    return own == state.present[0].params


def _subtitle(state: StudyState, *, running: bool) -> str:
    created = state.created
    assert created is not None
    goals = " and ".join(f"{goal.direction} {goal.name}" for goal in state.goals)
    total = state.sessions[-1].opened.total if state.sessions else 0
    now = "running now" if running else "not running"
    return f"{task_word(created.task)}: {goals}; {state.counted} of {total} trials counted; {now}"


def _tiles(state: StudyState) -> tuple[tuple[str, str], ...]:
    tiles: list[tuple[str, str]] = []
    if state.ranked:
        best = state.ranked[0]
        tiles.append((f"best {state.goals[0].name}", number_text(best.score)))
        tiles.append(("best trial", str(best.number)))
    tiles += [
        (str(outcome), str(count)) for outcome, count in state.counts.items() if count or outcome is Outcome.COMPLETE
    ]
    if state.open_trials:
        tiles.append(("not finished", str(len(state.open_trials))))
    tiles.append(("time worked", duration_text(state.wall_s)))
    return tuple(tiles)
