"""``show``, ``status`` and ``status --watch`` as a user meets them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dryfit.documents.command_line import app
from dryfit.settings.errors import ConfigError, LedgerError
from ledgers import eventful


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eventful().write(tmp_path_factory.mktemp("eventful"))


def printed(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def test_options_that_do_not_go_together_are_refused(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--watch and --json"):
        printed("status", study, "--watch", "--json")
    with pytest.raises(ConfigError, match="--json without a trial"):
        printed("show", study, "--json")
    with pytest.raises(LedgerError, match="watching the study"):
        printed("status", tmp_path, "--watch")
    with pytest.raises(ConfigError, match="there is no trial 99"):
        printed("show", study, "99")
