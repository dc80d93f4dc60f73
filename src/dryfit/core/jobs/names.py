"""What child processes are for, and where the function of each job lives."""

from enum import StrEnum


class Job(StrEnum):
    """What a child process is for."""

    RESOLVE = "resolve"
    TRAIN = "train"
    CHECK = "check"
    PLAN = "plan"
    CALIBRATE = "calibrate"
    PROBE = "probe"
    REHEARSE = "rehearse"
    IMPORT = "import"
    OBJECTIVE = "objective"
    FINAL = "final"
    ENSEMBLE = "ensemble"
    PREDICT = "predict"
    MERGE = "merge"
    TINY_LM = "tiny-lm"
    ROWS = "rows"


ENTRY_POINTS: dict[Job, str] = {
    Job.RESOLVE: "dryfit.preflight:resolve",
    Job.TRAIN: "dryfit.train.entry:train",
    Job.CHECK: "dryfit.preflight:check",
    Job.PLAN: "dryfit.planning:plan",
    Job.CALIBRATE: "dryfit.calibration:calibrate",
    Job.PROBE: "dryfit.preflight:probe",
    Job.REHEARSE: "dryfit.rehearse:rehearse",
    Job.IMPORT: "dryfit.objective.entry:check",
    Job.OBJECTIVE: "dryfit.objective.entry:run",
    Job.FINAL: "dryfit.train.final:final",
    Job.ENSEMBLE: "dryfit.train.ensembles:ensemble",
    Job.PREDICT: "dryfit.train.predict:predict",
    Job.MERGE: "dryfit.tasks.merging:merge",
    Job.TINY_LM: "dryfit.tasks.tiny_lm:write",
    Job.ROWS: "dryfit.tasks.copying:copy_rows",
}
"""Where each job's function lives, as ``module:function``; it takes the request body and the child's channel."""
