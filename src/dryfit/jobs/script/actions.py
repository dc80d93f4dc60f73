"""The arguments that parsers of ``argparse`` define, by its public means: each is an object of a public class."""

import argparse
import functools
from collections.abc import Container
from typing import Any, final


@final
class DefinedArguments:
    """The arguments that are defined in this process from :meth:`install` on."""

    def __init__(self) -> None:
        self._defined: list[argparse.Action] = []

    def install(self) -> None:
        """Note each argument that is defined from now on, for good."""
        action: Any = argparse.Action
        initialise, defined = action.__init__, self._defined

        @functools.wraps(initialise)
        def noting(self: argparse.Action, *args: Any, **kwargs: Any) -> None:
            initialise(self, *args, **kwargs)
            defined.append(self)

        action.__init__ = noting

    def of(self, attributes: Container[str]) -> list[argparse.Action]:
        """Return the arguments, in their order, whose values are attributes of what a parser has returned."""
        return [action for action in self._defined if action.dest in attributes]
