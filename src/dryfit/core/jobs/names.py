"""The jobs that child processes do, and the function of each."""

from enum import StrEnum


class Job(StrEnum):
    """The job of a child process."""

    RESOLVE = "resolve"
    TRAIN = "train"
    CHECK = "check"
    PLAN = "plan"
    CALIBRATE = "calibrate"
    PROBE = "probe"
    BATCH_CHECK = "batch-check"
    IMPORT = "import"
    OBJECTIVE = "objective"
    FINAL = "final"
    ENSEMBLE = "ensemble"
    PREDICT = "predict"
    MERGE = "merge"
    TINY_LM = "tiny-lm"
    ROWS = "rows"


ENTRY_POINTS: dict[Job, str] = {
    Job.RESOLVE: "dryfit.jobs.resolve:resolve",
    Job.TRAIN: "dryfit.jobs.train:train",
    Job.CHECK: "dryfit.jobs.resolve:check",
    Job.PLAN: "dryfit.jobs.plan:plan",
    Job.CALIBRATE: "dryfit.jobs.calibrate:calibrate",
    Job.PROBE: "dryfit.jobs.resolve:probe",
    Job.BATCH_CHECK: "dryfit.jobs.batch_check:batch_check",
    Job.IMPORT: "dryfit.jobs.objective:check",
    Job.OBJECTIVE: "dryfit.jobs.objective:run",
    Job.FINAL: "dryfit.jobs.final:final",
    Job.ENSEMBLE: "dryfit.jobs.ensemble:ensemble",
    Job.PREDICT: "dryfit.jobs.predict:predict",
    Job.MERGE: "dryfit.jobs.merge:merge",
    Job.TINY_LM: "dryfit.tasks.lm.tiny_lm:write",
    Job.ROWS: "dryfit.jobs.copy_rows:copy_rows",
}
"""The function of each job as ``module:function``; it takes the request's body and the child's channel."""
