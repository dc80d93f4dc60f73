"""The private table of transformers' Auto classes: which class a head has for a config."""

from typing import Any, Final

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from dryfit.settings.private_names import PrivateNames, library_error

NAMES: Final = (
    # knowing the class that a head has for a config, without building it; until: the Auto classes give the
    # class for a config
    "transformers.AutoModel._model_mapping",
)


def classes_of(auto: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """The classes that an Auto class has for a config, its first choice first; none where it has no such head.

    Raises:
        LibraryError: It has something else.
    """
    found = auto._model_mapping.get(type(config), ())
    classes = found if isinstance(found, tuple) else (found,)
    strange = [one for one in classes if not isinstance(one, type)]
    if strange:
        doing = f"looking for the {auto.__name__} of a {config.model_type} model"
        raise library_error("transformers", doing, f"_model_mapping gives {strange[0]!r}, which is no class")
    return classes


def _misbehaves() -> str:
    if classes_of(AutoModel, PreTrainedConfig()) or not len(AutoModel._model_mapping):
        return "transformers.AutoModel._model_mapping finds a class for the config of no architecture, or has none"
    return ""


AUTO: Final = PrivateNames("transformers", NAMES, _misbehaves)
