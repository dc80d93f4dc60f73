"""The best trial's configuration as a study file without a search."""

import json

from dryfit.config.checks import cross_problems
from dryfit.config.freeze import dump_toml
from dryfit.config.schema import SearchSettings, StudyConfig
from dryfit.core.settings.tables import Settings, TrialSettings
from dryfit.core.settings.trial import Scalar
from dryfit.reporting.terminal.tables import number_text
from dryfit.search.space.fields import apply_params
from dryfit.store.events import StudyCreated
from dryfit.store.state import TrialState

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
