"""What tests need and may be missing: skipped for a developer, a failure under CI, installed by `make engines`."""

import re
from pathlib import Path

import pytest

import engines
import parts
from engines import ENGINES, Engine, absent, commands, refusal
from parts import need, need_package

ROOT = Path(__file__).resolve().parents[1]
MADE_UP = Engine("no-such-engine", "no-such-package", "nothing")


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(parts.BY_COMMAND, MADE_UP.command, MADE_UP)


@pytest.mark.parametrize("value", [None, "", "0", "false", "False"])
def test_without_ci_a_missing_part_is_a_skip_that_says_what_to_do(monkeypatch, made_up, value):
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.skip.Exception, match="make engines.* no-such-package"):
        need(MADE_UP.command)
    with pytest.raises(pytest.skip.Exception, match="no_such_module .*make setup"):
        need_package("no_such_module")


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_under_ci_a_missing_part_is_a_failure(monkeypatch, made_up, value):
    monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.fail.Exception, match="make engines.*CI is set"):
        need(MADE_UP.command)
    with pytest.raises(pytest.fail.Exception, match="make setup.*CI is set"):
        need_package("no_such_module")


def test_what_is_there_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setitem(parts.BY_COMMAND, MADE_UP.command, MADE_UP)
    program = tmp_path / MADE_UP.command
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert need(MADE_UP.command) == str(program)
    need_package("pytest")


def test_a_test_may_need_no_program_that_nobody_installs():
    with pytest.raises(KeyError, match="no-such-engine"):
        need("no-such-engine")


def test_no_test_skips_by_itself_what_is_missing():
    """But for itself and the helper; spelled in halves for that."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("parts.py", Path(__file__).name)]
    assert not [path for path in files if re.search(r"importorskip|shutil\.which", path.read_text("utf-8"))]


def test_packages_are_installed_as_root_or_by_sudo_or_not_at_all():
    def everything(command):
        return f"/bin/{command}"

    update, install = commands(["a", "b"], root=True, look=everything)
    assert update[0] == "env" and update[-1] == "update"
    assert install[-4:] == ["--yes", "--no-install-recommends", "a", "b"]
    assert [step[0] for step in commands(["a"], root=False, look=everything)] == ["/bin/sudo", "/bin/sudo"]
    assert commands(["a"], root=False, look=lambda command: None if command == "sudo" else command) == []
    assert commands(["a"], root=True, look=lambda command: None) == []


def test_only_what_is_missing_is_installed_and_named_where_it_cannot_be():
    first, second, *_ = ENGINES
    assert absent(ENGINES, lambda command: command) == []
    assert absent((first, second), lambda command: None if command == second.command else command) == [second]
    said = refusal([second], "there is no apt-get here")
    assert second.command in said and first.command not in said
    assert f"apt-get install {second.package}" in said


def test_the_command_says_nothing_where_all_is_there_and_what_to_do_without_apt(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engines, "ADMIN_FOLDERS", ())
    for engine in ENGINES:
        (tmp_path / engine.command).touch(mode=0o755)
    assert (engines.main(), *capfd.readouterr()) == (0, "", "")
    (tmp_path / "systemd-analyze").unlink()
    assert engines.main() == 1
    out, said = capfd.readouterr()
    assert not out and "systemd-analyze (Debian package systemd)" in said and "unshare (" not in said


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
