"""Find the study file, folder and search space that an argument means."""

from pathlib import Path

from dryfit.ledger.folder import StudyLayout
from dryfit.search.space import Space, enqueued_points
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_reading import LoadedStudy


def space_of(loaded: LoadedStudy) -> Space:
    """Return the search space of a study file, and check the enqueued points against it.

    Raises:
        ConfigError: A searched key or an enqueued point is wrong; with its place in the file.
    """
    try:
        space = Space.from_config(loaded.config)
        enqueued_points(space, loaded.config, number=0)
    except ConfigError as error:
        searched = [f"space.{name}" for name in loaded.config.space if error.doing.endswith(name)]
        places = [loaded.origins.get(key) for key in (error.doing.removeprefix("reading "), *searched)]
        place = next((place for place in places if place), None)
        doing = f"{error.doing} ({place})" if place else error.doing
        raise ConfigError(doing, error.found, error.allowed, error.hint) from None
    return space


def study_file_of(path: Path) -> Path:
    """Return the study file meant by a file or folder.

    Raises:
        ConfigError: There is no such file.
    """
    file = path / "study.toml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"looking for a study at {path}",
            f"there is no file {file}",
            "a study file, or a folder with a study.toml",
            f"write one with `dryfit init {path}`",
        )
    return file


def layout_of(path: Path | str) -> StudyLayout:
    """Return the folder of a study: a folder itself, ``X`` for ``X/study.toml``, ``X/name`` for ``X/name.toml``."""
    file = Path(path)
    if file.is_dir() or file.suffix != ".toml":
        return StudyLayout(file.resolve())
    if file.name in ("study.toml", "frozen.toml"):
        return StudyLayout(file.parent.resolve())
    return StudyLayout(file.with_suffix("").resolve())
