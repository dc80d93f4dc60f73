"""Study files that come with dryfit, by name."""

import difflib
from importlib.resources import files
from typing import Final

from dryfit.core.errors import ConfigError

_FOLDER: Final = files("dryfit.starter") / "presets"
_SUFFIX: Final = ".toml"


def preset_names() -> tuple[str, ...]:
    """Every preset."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def preset_text(name: str) -> str:
    """The study file of a preset.

    Raises:
        ConfigError: There is no such preset.
    """
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise ConfigError("looking for a preset", f"there is no preset {name!r}", ", ".join(names), hint)
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
