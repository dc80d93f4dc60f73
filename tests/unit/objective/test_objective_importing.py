"""Finding a function in a process that did not define it."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import objectives
from dryfit.settings.errors import ObjectiveError
from dryfit.settings.tables import ObjectiveSettings
from dryfit.settings.user_code import FunctionName
from dryfit.training.objective import check_callable, import_function, seed_libraries

SCRIPT = """
import sys
from dataclasses import dataclass

@dataclass
class Point:
    x: float

def objective(trial):
    return Point(trial).x

ran_as = __name__
if __name__ == "__main__":
    raise SystemExit("the block was run")
"""


@pytest.fixture
def own_path(monkeypatch):
    """Undoes what importing does to this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def settings(function: str, *paths: Path) -> ObjectiveSettings:
    return ObjectiveSettings(function=function, paths=tuple(map(str, paths)))


def test_a_name_has_two_parts():
    name = FunctionName.parse("a.b:C.f")
    assert (name.place, name.qualname, name.in_script, str(name)) == ("a.b", "C.f", False, "a.b:C.f")
    assert FunctionName.parse("dir/search.py:f").in_script


def test_functions_of_modules(own_path):
    assert import_function(settings("objectives:quadratic")) is objectives.quadratic
    assert import_function(settings("objectives:Holder.static")) is objectives.Holder.static


def test_a_module_of_a_given_folder(own_path, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("def f(trial): return 7.0")
    assert import_function(settings("package.inner:f", tmp_path))(None) == 7.0


def test_a_script_is_run_without_its_main_block(own_path, tmp_path):
    (tmp_path / "search.py").write_text(SCRIPT)
    function = import_function(settings("search.py:objective", tmp_path / "empty", tmp_path))
    assert function(4.5) == 4.5
    assert function.__module__ == sys.modules["__main__"].ran_as == "__mp_main__"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "there is no module no_such_module"),
        ("objectives.inner:f", "there is no module objectives.inner"),
        ("objectives:quadratik", "did you mean quadratic?"),
        ("objectives:Holder.nothing", "has no Holder.nothing"),
        ("objectives:SPACE", "it is a dict"),
        ("objectives:Holder", "it is a class"),
        ("objectives:needs_two", "missing a required argument: 'other'"),
        ("search.py:f", "there is no such file"),
    ],
)
def test_what_cannot_be_imported_is_named(own_path, tmp_path, function, said):
    with pytest.raises(ObjectiveError) as caught:
        import_function(settings(function, tmp_path))
    assert said in str(caught.value)


def test_an_import_that_fails_inside_the_module_is_told_as_it_is(own_path, tmp_path):
    (tmp_path / "broken_inside.py").write_text("import no_such_library\ndef f(trial): return 0.0")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_function(settings("broken_inside:f", tmp_path))


def test_builtins_that_tell_no_signature_are_taken():
    check_callable(max, "importing")
    check_callable(lambda *args, **kwargs: 0.0, "importing")


def test_all_generators_are_seeded():
    drawn = []
    for seed in (3, 3, 4):
        seed_libraries(seed)
        drawn.append((random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_childs_side_imports_nothing_heavy():
    code = """
        import sys
        import dryfit.training.objective
        print(sorted({"torch", "numpy", "transformers", "optuna"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
