"""Presets: study files that come with dryfit, by name."""

import difflib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from dryfit.core.errors import ConfigError

_FOLDER: Final = files("dryfit.starter") / "presets"
_SUFFIX: Final = ".toml"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def preset_text(name: str) -> str:
    """Return the study file of a preset.

    Raises:
        ConfigError: There is no such preset.
    """
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise ConfigError("looking for a preset", f"there is no preset {name!r}", ", ".join(names), hint)
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def preset_study(name: str, study_name: str, data: Mapping[str, str]) -> str:
    """Return the study file of a preset with another study name and data files.

    Args:
        name: The preset.
        study_name: Name of the study.
        data: Keys of ``[data]`` that name files.

    Raises:
        ConfigError: There is no such preset.
    """
    text = preset_text(name)
    paths = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())
    named = text.replace(f'[study]\nname = "{name}"', f"[study]\nname = {json.dumps(study_name)}", 1)
    return named.replace("[data]\n", f"[data]\n{paths}", 1)
