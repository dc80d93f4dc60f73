"""Refuse settings that would have no effect."""

from dryfit.core.errors import ConfigError, InternalError
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.switches import TRIAL_NEEDS
from dryfit.core.settings.trial import TrialConfig


def check_effect(config: TrialConfig) -> None:
    """Refuse keys that are set away from their default and act on nothing.

    Where the switch itself is searched, an idle key is no mistake: it acts in other trials.

    Raises:
        ConfigError: Such a key is set.
        InternalError: The number format was not decided.
    """
    if config.settings.train.precision is Precision.AUTO:
        raise InternalError("checking train.precision of a trial", "it is auto", "a number format")
    for needs in TRIAL_NEEDS:
        value, switched = config.settings.value(needs.key), config.settings.value(needs.switch)
        if switched in needs.values or needs.switch in config.params or needs.may_idle:
            continue
        if not config.settings.is_changed(needs.key):
            continue
        raise ConfigError(
            f"checking {needs.key} = {value!r}",
            f"it has no effect with {needs.switch} = {switched!r}",
            allowed=f"{needs.key} only with {needs.condition}",
            hint="leave the key out (in a search: give it a `when`)",
        )
