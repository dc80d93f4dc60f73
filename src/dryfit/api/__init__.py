"""The Python API: a function for each command of the command line."""

from dryfit.api.compare import CompareOutcome, compare
from dryfit.api.doctor import bug_report, doctor, submitted_text, with_nodes
from dryfit.api.files import layout_of
from dryfit.api.handle import Study, StudyReport, trial_of
from dryfit.api.imports import import_rows
from dryfit.api.models import Pushed, check, merge, predict, push
from dryfit.api.own_rows import init_rows, init_script
from dryfit.api.planning import calibrate, plan, plan_combinations, plan_input, plan_space, plan_trial
from dryfit.api.rehearsal import (
    RehearsalInterrupted,
    RehearsalOptions,
    read_command,
    rehearse,
    rehearse_command,
    write_rehearsal,
)
from dryfit.api.reports import export, write_report
from dryfit.api.several import StudyRun, TuneAllResult, Turn, status_all, tune_all
from dryfit.api.studies import (
    TuneResult,
    agent,
    follow,
    init,
    node_logs,
    nodes,
    open_study,
    owner,
    resume,
    status,
    stop,
    story,
    tune,
    with_total,
)
from dryfit.api.training import TopOutcome, TrainOutcome, in_process, train, train_top
from dryfit.study.doctor.finding import Diagnosis, Finding, Status
from dryfit.study.loop.next_step import End
from dryfit.study.loop.observers import Observer
from dryfit.study.planning.plan_requests import SpacePlan

__all__ = [
    "CompareOutcome",
    "Diagnosis",
    "End",
    "Finding",
    "Observer",
    "Pushed",
    "RehearsalInterrupted",
    "RehearsalOptions",
    "SpacePlan",
    "Status",
    "Study",
    "StudyReport",
    "StudyRun",
    "TopOutcome",
    "TrainOutcome",
    "TuneAllResult",
    "TuneResult",
    "Turn",
    "agent",
    "bug_report",
    "calibrate",
    "check",
    "compare",
    "doctor",
    "export",
    "follow",
    "import_rows",
    "in_process",
    "init",
    "init_rows",
    "init_script",
    "layout_of",
    "merge",
    "node_logs",
    "nodes",
    "open_study",
    "owner",
    "plan",
    "plan_combinations",
    "plan_input",
    "plan_space",
    "plan_trial",
    "predict",
    "push",
    "read_command",
    "rehearse",
    "rehearse_command",
    "resume",
    "status",
    "status_all",
    "stop",
    "story",
    "submitted_text",
    "train",
    "train_top",
    "trial_of",
    "tune",
    "tune_all",
    "with_nodes",
    "with_total",
    "write_rehearsal",
    "write_report",
]
