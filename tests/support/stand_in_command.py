"""The command line of dryfit, whose jobs that plan, train and look at data are those of :mod:`plan_jobs`.

python stand_in_command.py WORDS
"""

from dryfit.cli.app import main
from dryfit.core.jobs.child import JOBS
from dryfit.core.jobs.job import Job

if __name__ == "__main__":
    for job in (Job.PLAN, Job.TRAIN, Job.RESOLVE):
        JOBS[job] = JOBS[job]._replace(entry=f"plan_jobs:{job}")  # type: ignore[index]
    main()
