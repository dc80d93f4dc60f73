"""The Python API: a function for each command of the command line. What this module imports are its names."""

# pyright: reportUnusedImport=false

from dryfit.api.doctor import bug_report, doctor, submitted_text, with_nodes
from dryfit.api.files import layout_of
from dryfit.api.handle import Study, StudyReport, export, trial_of, write_report
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
from dryfit.api.studies import (
    StudyRun,
    TuneAllResult,
    TuneResult,
    Turn,
    agent,
    follow,
    init,
    node_logs,
    nodes,
    open_study,
    owner,
    resume,
    status,
    status_all,
    stop,
    story,
    tune,
    tune_all,
    with_total,
)
from dryfit.api.training import (
    CompareOutcome,
    TopOutcome,
    TrainOutcome,
    compare,
    in_process,
    train,
    train_top,
)
from dryfit.study.doctor.finding import Diagnosis, Finding, Status
from dryfit.study.loop.next_step import End
from dryfit.study.loop.observers import Observer
from dryfit.study.planning.plan_requests import SpacePlan
