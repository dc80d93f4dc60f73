"""What tests need and may be missing: skipped for a developer, a failure under CI, installed by `make engines`."""

import re
from pathlib import Path

import pytest

import engines
import parts
from engines import Engine
from parts import need, need_package

ROOT = Path(__file__).resolve().parents[1]
MADE_UP = Engine("no-such-engine", "no-such-package", "nothing")


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(parts.BY_COMMAND, MADE_UP.command, MADE_UP)


@pytest.mark.parametrize("value", ["", "false"])
def test_without_ci_a_missing_part_is_a_skip(monkeypatch, made_up, value):
    monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.skip.Exception):
        need(MADE_UP.command)
    with pytest.raises(pytest.skip.Exception):
        need_package("no_such_module")


def test_under_ci_a_missing_part_is_a_failure(monkeypatch, made_up):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception):
        need(MADE_UP.command)
    with pytest.raises(pytest.fail.Exception):
        need_package("no_such_module")


def test_no_test_skips_by_itself_what_is_missing():
    """But for itself and the helper; spelled in halves for that."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("parts.py", Path(__file__).name)]
    assert not [path for path in files if re.search(r"importorskip|shutil\.which", path.read_text("utf-8"))]


def test_an_installation_that_fails_is_said(monkeypatch, tmp_path, capfd):
    """By a stand-in for apt-get that cannot reach its server, and by one that installs something else."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(engines, "ADMIN_FOLDERS", ())
    monkeypatch.setattr(engines, "ENGINES", (MADE_UP,))
    monkeypatch.setattr(engines.os, "geteuid", lambda: 0)
    for status, said in ((100, "update` ended with status 100"), (0, "are installed and the programs are not there")):
        (tmp_path / "apt-get").write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "apt-get").chmod(0o755)
        assert engines.main() == 1
        assert said in capfd.readouterr().err
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ninstall -m 755 /dev/null {tmp_path}/{MADE_UP.command}\n")
    assert engines.main() == 0
