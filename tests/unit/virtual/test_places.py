"""Whose code a line is: the user's own, or a library's, wherever it was installed."""

import runpy
from pathlib import Path

import pytest

from dryfit.virtual.places import Place, Places, code_of

pytestmark = pytest.mark.heavy


def place_of(folder: Path, places: Places) -> Place:
    """Where a function of a module in a folder finds itself, called by a script of the user's."""
    (folder / "module.py").write_text("def ask(places):\n    return places.now()\n")
    ask = runpy.run_path(str(folder / "module.py"))["ask"]
    found = ask(places)
    assert isinstance(found, Place)
    return found


@pytest.mark.parametrize("installed", [True, False])
def test_a_folder_into_which_packages_were_installed_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    if installed:
        (tmp_path / "module-1.0.dist-info").mkdir()
    place = place_of(tmp_path, Places())
    assert place.source == f"{tmp_path}/module.py:2"
    assert (place.line == place.source) is not installed
    assert code_of(place.source) == "return places.now()" and code_of("") == ""


def test_a_script_is_the_users_own_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module-1.0.dist-info").mkdir()
    places = Places()
    places.own.add(str(tmp_path / "module.py"))
    assert place_of(tmp_path, places).line == f"{tmp_path}/module.py:2"
