"""The configuration of a trial: the study file's values, with those that were drawn for it."""

from collections.abc import Mapping

from dryfit.config.schema import StudyConfig
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.trial import Scalar, TrialConfig
from dryfit.core.wire import digest
from dryfit.search.sampling.pruning import most_reports
from dryfit.search.space.fields import apply_params, setting
from dryfit.search.space.params import enumerated
from dryfit.search.space.space import Space
from dryfit.study.trials.context import AnyStudy, StudyContext

_FEW_VALUES = 100


def trial_settings(study: AnyStudy, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> TrialSettings:
    """Return the tables of a trial: the study file's, with the drawn values in them.

    Args:
        study: The study of the trial.
        params: The values that were drawn for it.
        own: The study file's values at that time. A key that is searched only since then keeps its value of then.
    """
    kept = {name: own[name] for name in study.config.space if name in own}
    return apply_params(study.config.trial_settings, {**kept, **params})


def trial_config(study: AnyStudy, number: int, params: Mapping[str, Scalar], seed: int) -> TrialConfig:
    """Return everything that decides what trial ``number`` learns; the trial need not exist yet."""
    trials = study.state.trials
    own = trials[number].own if number < len(trials) else dict[str, Scalar]()
    settings, data = trial_settings(study, params, own), study.resolved.data_fingerprint
    return config_of(study.config, settings, params, number=number, seed=seed, data_fingerprint=data)


def config_of(
    config: StudyConfig,
    settings: TrialSettings,
    params: Mapping[str, Scalar],
    *,
    data_fingerprint: str,
    number: int = 0,
    seed: int | None = None,
) -> TrialConfig:
    """Return everything that decides what a trial learns.

    Args:
        config: The study's.
        settings: The trial's tables.
        params: The drawn values, which are in them.
        data_fingerprint: Of the rows.
        number: The trial's.
        seed: None: the study's, for a trial that is none of it.
    """
    return TrialConfig(
        number=number,
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        also=config.study.also,
        data=config.data,
        settings=settings,
        params=dict(params),
        seed=config.study.seed if seed is None else seed,
        data_fingerprint=data_fingerprint,
    )


def trial_fingerprint(study: StudyContext, number: int, params: Mapping[str, Scalar], seed: int) -> str:
    """Return a hash of all that changes a trial's result; the user's own function counts by its name and version."""
    own = study.config.function
    if own is None:
        return trial_config(study, number, params, seed).fingerprint
    decides = {"function": own.function, "version": own.version, "params": dict(params), "seed": seed}
    return digest(decides)


def fold_reports(study: StudyContext) -> int:
    """Return how many report numbers each fold of a trial has.

    It is the same for all trials, so that reports of one number compare: they follow as many validations of one fold.
    """
    return most_reports(study.space, study.config.trial_settings) if study.config.data.folds > 1 else 1


def possible_values(config: StudyConfig, space: Space, key: str) -> tuple[str, ...]:
    """Return every word that a key of few values may have in a trial: those in the space, else the file's own.

    A value that the device or the disk does not allow can so be refused before the first trial.
    """
    choices = [enumerated(param.distribution, limit=_FEW_VALUES) for param in space.cases(key)]
    searched = {str(value) for values in choices for value in values or ()}
    return tuple(sorted(searched)) or (str(setting(config.trial_settings, key)),)
