"""What the sources import is what pyproject.toml declares, and the versions tested are among those allowed."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import licenses
from declared import Declared, Import, declared, imports, normal, undeclared, unused

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HOMES = {"PIL": ["pillow"], **packages_distributions()}  # only `make site` installs that extra

# What is declared although no source file names it, each with its reason.
NOT_NAMED = {
    "psycopg": "the driver that SQLAlchemy imports for a mirror in PostgreSQL",
    "mlflow-skinny": "imported by a tracker's process, by its name in `study.track`",
    "tensorboard": "likewise",
}
# Tools of development that no test imports, each with its reason.
TOOLS = {
    "pytest-timeout": "pytest's setting `timeout`",
    "pytest-xdist": "pytest's option -n",
    "ruff": "make lint",
    "pyright": "make lint",
    "import-linter": "make lint",
    "build": "make wheel-test",
    "cmaes": "Optuna's sampler cmaes",
    "pytorch-optimizer": "the optimizer lion of the tests",
    "cryptography": "the certificate of a study whose agents speak TLS",
    "psycopg": "the mirror in a real PostgreSQL",
    "ipykernel": "what nbclient runs a notebook in",
}


def imports_of(*folders: str) -> list[Import]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [item for path in paths for item in imports(str(path.relative_to(ROOT)), path.read_text("utf-8"))]


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return [item for item in imports_of("src") if item.package != "dryfit"]


def test_what_is_imported_is_declared(found):
    assert {"torch", "sklearn", "peft", "pynvml", "bitsandbytes", "google"} <= {item.package for item in found}
    # With nothing declared each is told, and with everything in extras each whose absence is not met.
    known, written = declared(PYPROJECT, without=()), [item for item in found if not item.only_text]
    assert len(undeclared(found, Declared(frozenset(), frozenset()), HOMES)) == len(written)
    in_extras = Declared(always=frozenset(), extras=known.always | known.extras)
    assert len(undeclared(found, in_extras, HOMES)) == sum(not item.guarded for item in written)
    # Where `search` or `tasks` is absent, the command says so: tests/contract/test_light_install.py.
    assert not undeclared(found, declared(PYPROJECT, met=("search", "tasks")), HOMES)


def test_what_is_declared_is_imported(found):
    assert unused(found, declared(PYPROJECT, without=("dev", "site")), HOMES) == set(NOT_NAMED)


def test_what_the_tests_import_is_declared_and_what_they_declare_is_used():
    folders = ("tests", "benchmarks", "examples", "scripts")
    own = {path.stem for folder in folders for path in (ROOT / folder).rglob("*.py")} | {"dryfit"}
    own |= {path.name for path in (ROOT / "tests" / "support").iterdir()}
    users = (
        "tests/programs/timm",
        "tests/programs/odd/lacks_package",
        "tests/programs/odd/own_rows",
        "tests/support/triton_stand_in",
        "tests/support/stand_in_facts",
        "tests/contract/test_stand_ins",
        "benchmarks/gpu_programs",
        "benchmarks/strangers",
        "benchmarks/regressions",
        "benchmarks/published",
    )
    found = [item for item in imports_of(*folders) if item.package not in own and not item.only_text]
    found = [item for item in found if not item.place.startswith(users)]  # of packages that users have
    known = declared(PYPROJECT, without=())
    # Whoever develops has every extra, so that each may be imported as it is.
    everything = Declared(always=known.always | known.extras, extras=frozenset())
    assert not undeclared(found, everything, HOMES)
    dev = {normal(name) for name in PYPROJECT["project"]["optional-dependencies"]["dev"]}
    assert dev & unused(found, known, HOMES) == set(TOOLS)


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    texts = [*project["dependencies"], *(text for texts in project["optional-dependencies"].values() for text in texts)]
    found = [Requirement(text) for text in texts]
    return [item for item in found if item.name != project["name"]]  # extras take in others


def test_what_is_declared_is_pinned_for_the_tests_and_the_pin_is_allowed():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {normal(name): version for name, version in pins.items()}
    assert not {item.name for item in requirements() if normal(item.name) not in pins}
    assert not {
        str(item): pins[normal(item.name)] for item in requirements() if pins[normal(item.name)] not in item.specifier
    }


def test_every_dependency_of_users_says_the_least_version_it_takes():
    project = PYPROJECT["project"]
    users = [
        text
        for name, texts in project["optional-dependencies"].items()
        if name not in ("dev", "demo")
        for text in texts
    ]
    for text in (*project["dependencies"], *users):
        if Requirement(text).name == project["name"]:
            continue
        assert {">=", "==", "~="} & {part.operator for part in Requirement(text).specifier}, text


def test_every_dependency_of_users_is_on_the_page_of_licenses_with_one():
    text = (ROOT / "docs" / "licenses.md").read_text("utf-8")
    tables = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    for title, wanted in licenses.wanted_by_extra().items():
        rows = re.findall(r"^\| \*\*(\S+)\*\* \| \S+ \| (.+) \|$", tables[title], re.MULTILINE)
        assert {normal(name) for name, _ in rows} == {normal(Requirement(line).name) for line in wanted}, title
    head, others = text.partition("\n## ")[0], re.findall(r"^\| (\S+) \| \S+ \| (.+) \|$", text, re.MULTILINE)
    for name, license_ in others:
        plain = licenses.KNOWN.search(license_) and not licenses.COPYLEFT.search(license_)
        assert plain or f"{name.strip('*')} (" in head, "what needs a look is named above the tables"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"expression": "BSD-3-Clause AND Zlib", "text": "BSD"}, "BSD-3-Clause AND Zlib"),
        ({"text": "Apache License, Version 2.0"}, "Apache-2.0"),
        ({"text": "Copyright (c) of somebody", "classifiers": ["BSD License"]}, "BSD"),
        ({"classifiers": ["GNU General Public License v3 (GPLv3)"]}, "GPL-3.0"),
        ({"text": "ours alone"}, "unknown"),
    ],
)
def test_a_license_is_read_from_metadata(said, found):
    assert licenses.license_of({"expression": "", "text": "", "classifiers": [], **said}) == found
