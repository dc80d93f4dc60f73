"""When a package that is not installed is taken to be there."""

import importlib.metadata
import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dryfit.gpu.missing_parts import lack
from dryfit.gpu.presence import Presence, StandIn
from dryfit.gpu.stand_ins import STAND_INS, provided
from dryfit.settings.rehearsal_messages import STAND_INS as NAMES

pytestmark = pytest.mark.heavy
MADE = "dryfit_made_up"


def made_up() -> dict[str, dict[str, Any]]:
    return {MADE: {"attend": len}, f"{MADE}.parts": {"part": max}}


@pytest.fixture
def assumed() -> Iterator[list[str]]:
    found: list[str] = []
    presence = Presence(
        {MADE: StandIn("1.2", "its sources", made_up, "dryfit-made-up")}, lambda _, text: found.append(text)
    )
    presence.install()
    yield found
    sys.meta_path.remove(presence)
    for name in [name for name in sys.modules if name.partition(".")[0] == MADE]:
        del sys.modules[name]


def run(folder: Path, code: str) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    return runpy.run_path(str(script))


UNGUARDED = {
    "import": f"import {MADE}\n",
    "from a part": f"from {MADE}.parts import part\n",
    "try without a handler": f"try:\n    import {MADE}\nfinally:\n    pass\n",
    "the handler raises": f"try:\n    import {MADE}\nexcept ImportError as error:\n    raise OSError from error\n",
    "another error is caught": f"try:\n    import {MADE}\nexcept ValueError:\n    pass\n",
    "in a handler": f"try:\n    import no_such_module\nexcept ImportError:\n    import {MADE}\n",
    "by importlib": f"import importlib\nimportlib.import_module('{MADE}')\n",
    "a wide net around all": f"def main():\n    import {MADE}\ntry:\n    main()\nexcept Exception:\n    raise\n",
}
GUARDED = {
    "try": f"try:\n    import {MADE}\nexcept ImportError:\n    made = None\n",
    "bare": f"try:\n    import {MADE}\nexcept:\n    made = None\n",
    "one of several": f"try:\n    import {MADE}\nexcept (OSError, ModuleNotFoundError):\n    made = None\n",
    "suppressed": f"import contextlib\nwith contextlib.suppress(ImportError):\n    import {MADE}\n",
    "around a function": f"def load():\n    import {MADE}\ntry:\n    load()\nexcept ImportError:\n    pass\n",
    "a look": f"import importlib.util\nfound = importlib.util.find_spec('{MADE}')\nassert found is None\n",
}


@pytest.mark.parametrize("how", UNGUARDED)
def test_an_import_that_nothing_guards_finds_it(tmp_path: Path, assumed: list[str], how: str) -> None:
    run(tmp_path, UNGUARDED[how])
    assert assumed == ["dryfit-made-up 1.2 (an import without a guard): counted by its sources"]
    assert sys.modules[MADE].attend is len


@pytest.mark.parametrize("how", GUARDED)
def test_a_guarded_import_finds_the_machine_as_it_is(tmp_path: Path, assumed: list[str], how: str) -> None:
    run(tmp_path, GUARDED[how])
    assert not assumed and MADE not in sys.modules


def test_a_module_that_is_imported_within_a_guard_is_guarded(
    tmp_path: Path, assumed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "between.py").write_text(f"import {MADE}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path, "try:\n    import between\nexcept ImportError:\n    between = None\n")
    assert not assumed


def test_one_that_is_given_is_found_however_it_is_looked_for(assumed: list[str]) -> None:
    presence = next(one for one in sys.meta_path if isinstance(one, Presence))
    assert presence.give(MADE, "--with") and presence.give(MADE, "--with")
    assert importlib.util.find_spec(MADE) is not None
    assert importlib.metadata.version(MADE) == importlib.metadata.version("dryfit-made-up") == "1.2"
    assert importlib.metadata.packages_distributions()[MADE] == ["dryfit-made-up"]
    assert len(assumed) == 1
    with pytest.raises(ImportError, match="no_such"):
        importlib.import_module(f"{MADE}.no_such")


def test_the_command_knows_the_names_of_all_stand_ins() -> None:
    assert set(NAMES) == set(STAND_INS)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "triton"])
def test_what_a_stand_in_has_is_told(name: str) -> None:
    assert all(row.rpartition(".")[0] in ("", *STAND_INS[name].modules()) for row in STAND_INS[name].modules())
    assert provided(name) == provided(f"{name}.absent") == ""  # nobody has imported it


def test_of_a_module_that_a_stand_in_lacks_its_modules_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    told = lack(ModuleNotFoundError("No module named 'apex.optimizers'", name="apex.optimizers"))
    assert "the stand-in for it has apex, apex.normalization, " in told


@pytest.mark.parametrize(
    ("module", "is_told"),
    [("train", True), ("trl.kernels", True), ("transformers.models.x", False), ("torch.x", False)],
)
def test_code_that_goes_on_without_a_part_of_cudas_torch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, is_told: bool
) -> None:
    monkeypatch.setattr("dryfit.gpu.presence._OF_CUDA", {MADE})
    lacking: list[str] = []
    presence = Presence({MADE: StandIn("1.2", "", made_up, MADE)}, lambda *_: None, lacking.append)
    presence.install()
    try:
        for number, code in enumerate(GUARDED.values()):
            script = tmp_path / f"script{number}.py"  # sources are read once
            script.write_text(code, encoding="utf-8")
            runpy.run_path(str(script), run_name=module)
    finally:
        sys.meta_path.remove(presence)
    assert lacking == [MADE] * len(GUARDED) * is_told


def test_of_a_failed_import_what_failed_first_is_named(tmp_path: Path) -> None:
    code = """try:
    import {}
except ImportError as error:
    raise ImportError("Could not import module 'Model'. Are its requirements met?") from error
"""
    (script := tmp_path / "script.py").write_text(code.format(MADE), encoding="utf-8")
    with pytest.raises(ImportError) as caught:
        runpy.run_path(str(script))
    assert lack(caught.value) == f"this machine lacks what the script imports: No module named '{MADE}'"
