"""Settings that would change nothing are errors, not silence."""

from collections.abc import Iterator
from dataclasses import dataclass

from dryfit.core.errors import ConfigError
from dryfit.core.settings import TrialSettings
from dryfit.core.trial import TrialConfig

_OPTIM_READS = {
    "beta1": ("adamw", "adamw8bit", "lion", "sgd"),
    "beta2": ("adamw", "adamw8bit", "lion"),
    "eps": ("adamw", "adamw8bit"),
}


@dataclass(frozen=True, slots=True)
class _Idle:
    """A key that acts only under a value of another: its switch."""

    key: str
    switch: str
    acts: bool
    needs: str


def check_effect(config: TrialConfig) -> None:
    """Refuse keys that are set away from their default and act on nothing.

    Where the switch itself is searched, an idle key is no mistake: it acts in other trials.

    Raises:
        ConfigError: Such a key is set.
    """
    defaults = TrialSettings()
    for idle in _idle_keys(config.settings):
        value = _get(config.settings, idle.key)
        if idle.acts or idle.switch in config.params or value == _get(defaults, idle.key):
            continue
        raise ConfigError(
            f"checking {idle.key} = {value!r}",
            f"it has no effect with {idle.switch} = {_get(config.settings, idle.switch)!r}",
            allowed=f"{idle.key} only with {idle.needs}",
            hint="leave the key out (in a search: give it a `when`)",
        )


def _idle_keys(settings: TrialSettings) -> Iterator[_Idle]:
    loss, head, optim = settings.loss, settings.head, settings.optim
    yield _Idle("loss.gamma", "loss.name", loss.name == "focal", 'loss.name = "focal"')
    smooths = loss.name == "cross_entropy"
    yield _Idle("loss.label_smoothing", "loss.name", smooths, 'loss.name = "cross_entropy"')
    yield _Idle("head.hidden", "head.layers", head.layers > 0, "head.layers above 0")
    yield _Idle("head.activation", "head.layers", head.layers > 0, "head.layers above 0")
    for key, names in _OPTIM_READS.items():
        yield _Idle(f"optim.{key}", "optim.name", optim.name in names, "optim.name " + " or ".join(names))


def _get(settings: TrialSettings, key: str) -> object:
    table, _, name = key.partition(".")
    return getattr(getattr(settings, table), name)
