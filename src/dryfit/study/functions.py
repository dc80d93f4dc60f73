"""The Python API: a function for each command of the command line. What this module imports are its names."""

from dryfit.study.arguments import layout_of
from dryfit.study.diagnosis import bug_report, doctor, submitted_text, with_nodes
from dryfit.study.handle import Study, StudyReport, export, trial_of, write_report
from dryfit.study.importing import import_rows
from dryfit.study.machine_checks import Diagnosis, Finding, Status
from dryfit.study.models import Pushed, check, merge, predict, push
from dryfit.study.next_step import End
from dryfit.study.observers import Observer
from dryfit.study.own_functions import init_rows, init_script
from dryfit.study.planning import SpacePlan, calibrate, plan, plan_combinations, plan_input, plan_space, plan_trial
from dryfit.study.studies import (
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
from dryfit.study.trainings import CompareOutcome, TopOutcome, TrainOutcome, compare, in_process, train, train_top


# pyright: reportUnusedImport=false
