"""The process of the Optuna mirror: its command, its environment, the URL of its storage."""

import os
from collections.abc import Mapping
from pathlib import Path

from dryfit.core.errors import MachineError
from dryfit.core.text.secrets import public_environment
from dryfit.search.mirror.follower import FollowerProcess

ENVIRONMENT_PREFIX = "env:"

JOURNAL_PREFIX = "journal:"
_OF_DRIVERS = frozenset({"PGPASSWORD", "MYSQL_PWD"})
"""Variables that the clients of PostgreSQL and MySQL read passwords from."""


def storage_url(storage: str, environment: Mapping[str, str]) -> str:
    """Return the URL that ``env:NAME`` stands for, or any other storage as it is.

    Raises:
        MachineError: There is no such variable.
    """
    if not storage.startswith(ENVIRONMENT_PREFIX):
        return storage
    name = storage.removeprefix(ENVIRONMENT_PREFIX)
    if not environment.get(name):
        raise MachineError(
            f'opening search.mirror = "{storage}"',
            f"the environment variable {name} is not set",
            "a variable that holds an Optuna storage URL",
            f"export {name}=postgresql://...",
        )
    return environment[name]


def mirror_environment(storage: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the mirror: of the secrets, it has the storage's URL and what database drivers read."""
    if storage.startswith(JOURNAL_PREFIX):
        return public_environment(environment)
    return public_environment(environment, keep=_OF_DRIVERS | {storage.removeprefix(ENVIRONMENT_PREFIX)})


class MirrorProcess(FollowerProcess):
    """The process that keeps an Optuna storage equal to a study's ledger.

    Args:
        ledger: The study's ledger.
        storage: ``journal:PATH``, ``env:NAME`` or an Optuna storage URL.
        study: Name of the study in the storage; later generations have names of their own, see the ledger.
        status: File in which the mirror says how far it is.
        log: File for its output.
    """

    def __init__(self, ledger: Path, *, storage: str, study: str, status: Path, log: Path) -> None:
        super().__init__(
            ledger,
            module="dryfit.search.mirror.process",
            arguments=["--storage", "-", "--study", study],
            target=storage,
            environment=lambda: mirror_environment(storage, os.environ),
            status=status,
            log=log,
        )
