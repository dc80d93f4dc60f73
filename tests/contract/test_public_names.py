"""Public names stay what they are, whatever else of the package has been imported; older names lead to them."""

import importlib
import json
import subprocess
import sys

import pytest

import dryfit

IMPORT_ALL = """
import importlib, json, pkgutil
import dryfit
for module in pkgutil.walk_packages(dryfit.__path__, "dryfit."):
    if not module.name.endswith(("__main__", "ray_agents")):
        importlib.import_module(module.name)
kinds = {name: type(getattr(dryfit, name)).__name__ for name in dryfit.__all__}
for package in (dryfit.meta, importlib.import_module("dryfit.parallel")):
    kinds |= {f"{package.__name__}.{name}": type(getattr(package, name)).__name__ for name in package.__all__}
print(json.dumps(kinds))
"""


def test_no_module_hides_a_public_name():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    kinds = json.loads(done.stdout.splitlines()[-1])
    modules = {name for name, kind in kinds.items() if kind == "module"}
    assert modules == {"events"}
    functions = ("plan", "rehearse", "tune", "doctor", "report", "virtual_gpu", "check")
    assert {kinds[name] for name in functions} == {"function"}


@pytest.mark.parametrize(
    ("older", "name"),
    [
        ("dryfit.api", "plan"),
        ("dryfit.parallel.planning.planner", "plan_shards"),
        ("dryfit.parallel.proof.prove", "prove"),
        ("dryfit.scoring.analysis", "analyse"),
    ],
)
def test_an_older_name_is_the_module_of_today(older, name):
    sys.modules.pop(older, None)
    with pytest.warns(DeprecationWarning, match="since dryfit 0.2"):
        module = importlib.import_module(older)
    assert module is importlib.import_module(module.__name__) and not module.__name__ == older
    assert callable(getattr(module, name)) and dryfit.__version__
