"""Environments that checks throw away: what leads into them, and what is left of them."""

from pathlib import Path

import pytest

from throwaway import CheckError, copy_sources, outside, temporary_folder

ROOT = Path(__file__).resolve().parents[1]


def test_nothing_of_this_environment_leads_into_another(monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "COVERAGE_PROCESS_START"):
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    env = outside({"ADDED": "2"})
    assert "here" not in env.values()
    assert (env["PIP_NO_CACHE_DIR"], env["ADDED"]) == ("1", "2")


@pytest.mark.parametrize("keep", [False, True])
def test_the_folder_vanishes_whatever_happens_unless_it_is_to_be_kept(monkeypatch, tmp_path, keep):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("KEEP", "1" if keep else "0")
    with pytest.raises(CheckError), temporary_folder("test") as folder:
        (folder / "file").touch()
        raise CheckError("no")
    assert list(tmp_path.iterdir()) == ([folder] if keep else [])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these sources are such a copy")
def test_the_copy_of_the_sources_has_what_git_does_not_ignore(tmp_path):
    copy_sources(tmp_path)
    assert (tmp_path / "src/dryfit/py.typed").is_file() and (tmp_path / "tests/test_throwaway.py").is_file()
    assert not (tmp_path / ".venv").exists() and not list(tmp_path.rglob("__pycache__"))
