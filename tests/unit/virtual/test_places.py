"""Whose code a line is: the user's own, or a library's, wherever it was installed."""

import copy
import runpy
from pathlib import Path

import pytest

from dryfit.gpu.script_recorder import Place, Places

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
    places = Places()
    place = place_of(tmp_path, places)
    assert place.source == f"{tmp_path}/module.py:2"
    assert (place.line == place.source) is not installed
    assert places.code_of(place.source) == "return places.now()" and places.code_of("") == ""


def test_a_script_is_the_users_own_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module-1.0.dist-info").mkdir()
    places = Places()
    for own in (f"{tmp_path}/module.py", f"{tmp_path}/"):
        places.own = own
        assert place_of(tmp_path, places).line == f"{tmp_path}/module.py:2"
        places = Places()


def test_a_line_keeps_its_file_where_the_script_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "module.py").write_text("another\nfile\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(elsewhere))
    places = Places()
    monkeypatch.chdir(elsewhere)
    line = place_of(tmp_path, places).line
    assert (line, places.code_of(line)) == ("module.py:2", "return places.now()")


def test_the_standard_library_is_between() -> None:
    class Asks:
        def __reduce__(self) -> tuple[object, tuple[()]]:
            return places.now, ()  # called by a line of copy.py

    places = Places()
    place = copy.copy(Asks())
    assert isinstance(place, Place)
    assert place.line == place.source and places.code_of(place.source) == "place = copy.copy(Asks())"
