"""``show``, ``status`` and ``status --watch`` as a user meets them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dryfit.documents.command_line import app
from dryfit.settings.errors import ConfigError, LedgerError
from ledgers import eventful

CRASHED = 7
"""A trial of the eventful study that crashed once."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eventful().write(tmp_path_factory.mktemp("eventful"))


def printed(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def test_show_tells_a_story_in_words_and_as_json(study: Path) -> None:
    text = printed("show", study, str(CRASHED))
    assert "attempt 1: native_crash: SIGSEGV in the first step" in text
    assert "then: it is tried again" in text
    assert f"log: {study / 'trials/0007/attempt-2/log.txt'}" in text
    document = json.loads(printed("show", study, str(CRASHED), "--json"))
    assert (document["schema"], document["number"]) == (1, CRASHED)
    assert [one["failure"] and one["failure"]["kind"] for one in document["attempts"]] == ["native_crash", None]


def test_status_groups_failures(study: Path) -> None:
    text = printed("status", study)
    assert "4 x native_crash in trial(s) 7, 17, 27, 37: 4 retry; " in text
    assert "4 refused: does not fit made-up 1 GiB" in text
    assert "side by side: 1 (as asked for)" in text
    troubles = json.loads(printed("status", study, "--json"))["troubles"]
    assert {one["kind"] for one in troubles["failures"]} == {"lost", "native_crash", "user_code"}
    assert troubles["success"]["attempts"] > troubles["success"]["clean_attempts"] > 0


def test_options_that_do_not_go_together_are_refused(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--watch and --json"):
        printed("status", study, "--watch", "--json")
    with pytest.raises(ConfigError, match="--json without a trial"):
        printed("show", study, "--json")
    with pytest.raises(LedgerError, match="watching the study"):
        printed("status", tmp_path, "--watch")
    with pytest.raises(ConfigError, match="there is no trial 99"):
        printed("show", study, "99")
