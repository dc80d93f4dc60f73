"""Models: what a folder holds."""

from pathlib import Path

from dryfit.core.errors import InternalError, LoadError
from dryfit.core.health import Health
from dryfit.core.jobs import CheckRequest
from dryfit.core.settings import ModelSettings
from dryfit.study.errand import run_alone

_PACKAGED = ModelSettings().name


def check(folder: Path | str, *, task: str | None = None, trust: bool = False) -> Health:
    """Look at a checkpoint in a process of its own: whether it can be loaded, and what is in it. No weight is read.

    Args:
        folder: A trial's folder, any other model's, a PEFT adapter's, or ``minilm``.
        task: As in ``dryfit.load``; None: a trial's encoder with its head, else what the folder's config names.
        trust: Run code that comes with the model.

    Returns:
        What was found. A damaged file or a missing weight is a finding, not an error.

    Raises:
        LoadError: There is no such folder.
        ConfigError: There is no such task, the architecture has no such head, or its code is not trusted.
        ChildError: The process ended without an answer.
    """
    name = str(folder)
    if name != _PACKAGED:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise LoadError(
                f"looking at {name}",
                "it is a file" if path.exists() else "there is no such folder",
                allowed="a model's folder, with its config.json; nothing is downloaded",
                hint="check the path",
            )
        name = str(path)
    result = run_alone(f"looking at {name}", CheckRequest(folder=name, task=task, trust=trust))
    if result.check is None:
        raise InternalError(f"looking at {name}", "the child's answer is of another job")
    return result.check.health
