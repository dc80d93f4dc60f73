"""A private keyword of transformers' cache: asking for a file that a model may not have."""

from typing import Final

from transformers.utils.hub import cached_file

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # asking for a file that a model may not have, offline too; until: a public keyword; huggingface_hub tells
    # an absent file from an unreachable hub
    "transformers.utils.hub.cached_files(_raise_exceptions_for_missing_entries=)",
)

FILES: Final = PrivateNames("transformers", NAMES)


def cached_or_none(name: str, file: str, *, revision: str | None) -> str | None:
    """The path of a model's file, downloaded if need be; None where the model has no such file."""
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
