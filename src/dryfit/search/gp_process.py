"""The process of Gaussian processes: a question on each line of stdin, which is a socket; the answer goes back there.

python -m dryfit.search.gp_process --parent PID
"""

import argparse
import os
import sys
import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import GPSampler
from optuna.trial import TrialState

from dryfit.processes.process import die_with_parent
from dryfit.search.samplers import GpAnswer, GpQuestion, GpTrial
from dryfit.search.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.search.space import from_text
from dryfit.settings.trial import Scalar


def answer(question: GpQuestion) -> GpAnswer:
    """Return the suggestion of Optuna's sampler, a new one for each question: it depends on nothing else."""
    space = {name: from_text(text) for name, text in question.space.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        sampler = GPSampler(seed=question.seed, n_startup_trials=0)
    asked = scratch_trial(TrialState.RUNNING)
    trials = [_made(trial) for trial in question.trials]
    study = ScratchStudy(trials, asked, directions=question.directions, sampler=sampler)
    params: dict[str, Scalar] = sampler.sample_relative(study.study, study.trial, dict(space))
    return GpAnswer(params=params)


def _made(trial: GpTrial) -> ScratchTrial:
    if not trial.values:
        return scratch_trial(TrialState.RUNNING, params=trial.params)
    return scratch_trial(TrialState.COMPLETE, params=trial.params, values=trial.values, excess=trial.excess)


def main() -> None:
    """Answer until the other end is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    die_with_parent(parser.parse_args().parent)
    GPSampler()  # imports torch, before the first question comes
    with os.fdopen(os.dup(sys.stdin.fileno()), "wb", buffering=0) as back:
        for line in sys.stdin.buffer:
            try:
                said = answer(GpQuestion.model_validate_json(line))
            except (ValueError, ArithmeticError, RuntimeError) as error:  # of numerics: another try may do no better
                said = GpAnswer(trouble=f"{type(error).__name__}: {error}")
            back.write(said.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
