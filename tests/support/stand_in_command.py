"""The command line of dryfit, whose jobs that plan, train and look at data are those of :mod:`plan_jobs`.

python stand_in_command.py WORDS
"""

from dryfit.documents.command_line import main
from dryfit.settings.jobs import JOBS
from dryfit.settings.wire import Job

if __name__ == "__main__":
    for job in (Job.PLAN, Job.TRAIN, Job.RESOLVE):
        JOBS[job] = JOBS[job]._replace(entry=f"plan_jobs:{job}")  # type: ignore[index]
    main()
