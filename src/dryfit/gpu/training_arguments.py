"""``transformers.TrainingArguments`` of a rehearsed script: which values it made them with, and others in their place.

The names are those of the installed version. Classes derived from it, such as TRL's ``SFTConfig``, come to the same
``__post_init__``, after what they do themselves; values are replaced there, before
transformers derives others from them.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from dryfit.gpu.import_hooks import when_imported
from dryfit.settings.rehearsal_messages import (
    ACCUMULATION,
    BATCH,
    CHECKPOINTING,
    EVALUATION_BATCH,
    ArgumentValue,
    SeenArguments,
)

_NAMES = (BATCH, ACCUMULATION, EVALUATION_BATCH, "optim", "bf16", "fp16")
_PARSER = "transformers.hf_argparser"


class ArgumentWatch:
    """Watches the first ``TrainingArguments`` that the script makes.

    Args:
        overrides: Values that take the place of the script's own, by name.

    Attributes:
        overrides: As given.
        seen: None until one was made.
        replaced: Values of the script's own that others took the place of, by name.
    """

    def __init__(self, overrides: Mapping[str, ArgumentValue]) -> None:
        self.overrides = dict(overrides)
        self.seen: SeenArguments | None = None
        self.replaced: dict[str, ArgumentValue] = {}

    def install(self) -> None:
        """Watch from now on; transformers is not imported for it."""
        when_imported("transformers.training_args", self._wrap)

    def _wrap(self, module: Any) -> None:
        cls = module.TrainingArguments
        cls.__post_init__ = self._watched(cls.__post_init__)

    def _watched(self, post_init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(post_init)
        def watched(arguments: Any, *args: Any, **kwargs: Any) -> None:
            for name, value in self.overrides.items():
                if hasattr(arguments, name):
                    if getattr(arguments, name) != value:
                        self.replaced.setdefault(name, _plain(getattr(arguments, name)))
                    setattr(arguments, name, value)
                    if name in CHECKPOINTING:  # no older spelling may speak against it
                        _set_all_spellings(arguments, value)
            post_init(arguments, *args, **kwargs)
            if self.seen is None:
                self.seen = _seen(arguments)

        return watched


def _set_all_spellings(arguments: Any, value: ArgumentValue) -> None:
    for name in CHECKPOINTING:
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def _seen(arguments: Any) -> SeenArguments:
    checkpointing = next((name for name in CHECKPOINTING if hasattr(arguments, name)), "")
    names = [name for name in (*_NAMES, checkpointing) if name and hasattr(arguments, name)]
    values = {name: _plain(getattr(arguments, name)) for name in names}
    return SeenArguments(values=values, checkpointing=checkpointing, from_command_line=_from_parser())


def _plain(value: object) -> ArgumentValue:
    if isinstance(value, Enum):
        value = value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _from_parser() -> bool:
    """Whether a parser of command lines is among the callers: transformers' own, or one derived from it (TRL's)."""
    return any(frame.f_globals.get("__name__") == _PARSER for frame, _ in traceback.walk_stack(sys._getframe()))
