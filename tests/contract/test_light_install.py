"""Without extras, dryfit rehearses and checks; every other command says which extra it needs, in one line."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from declared import normal

OURS = "dryfit"
START = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from dryfit.documents.command_line import main
try:
    main()
finally:
    sys.stdout.flush()
    loaded = {{name.partition(".")[0] for name in sys.modules}}
    print("loaded besides:", sorted(loaded & {absent!r}), file=sys.stderr)
"""
PROGRAM = """
import torch

model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def closure(names: set[str]) -> set[str]:
    """Distributions that come along where these are installed."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            lines = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # of another platform
            continue
        wanted = {normal(line.name) for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})}
        waiting |= wanted - found
    return found


def absent() -> set[str]:
    """Packages that a user without extras does not have."""
    always = {Requirement(line) for line in requires(OURS) or [] if "extra ==" not in line}
    there = closure({normal(line.name) for line in always}) | {OURS}
    homes = packages_distributions()
    found = {package for package, names in homes.items() if not {normal(name) for name in names} & there}
    return found - {"_distutils_hack"}  # every interpreter that has setuptools loads it


@pytest.fixture(scope="module")
def start() -> str:
    assert {"torch", "numpy", "optuna", "transformers", "huggingface_hub"} <= absent()
    return START.format(absent=absent())


def run(start: str, folder: Path, *words: str, active: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VIRTUAL_ENV": str(active or "")}
    command = [sys.executable, "-c", start, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.heavy
def test_a_script_is_rehearsed_in_the_users_environment(start, tmp_path):
    theirs = tmp_path / "theirs"
    venv.create(theirs, symlinks=True)
    (packages,) = theirs.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run(start, tmp_path, "rehearse", "--device", "rtx4090", "--html", "page.html", "train.py", active=theirs)
    assert done.returncode == 0 and done.stdout.startswith("rehearsal fits"), done.stderr
    assert "loaded besides: []" in done.stderr
    assert "Plotly" in (tmp_path / "page.html").read_text()
    (tmp_path / "gpu-memory.toml").write_text('[run.one]\ncommand = "train.py"\ndevice = "rtx4090"\nbudget = "4 GiB"\n')
    done = run(start, tmp_path, "check", active=theirs)
    assert done.returncode == 0 and "loaded besides: []" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("tune", "study"),
        ("plan", "study", "--device", "rtx4090"),
        ("status", "study"),
        ("resume", "study"),
        ("report", "study"),
        ("doctor",),
        ("load", "model"),
        ("calibrate",),
        ("push", "model", "a/b"),
    ],
)
def test_a_command_without_its_extra_says_the_line_to_type(words, start, tmp_path):
    done = run(start, tmp_path, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"^error: running this command: \w+ is not installed    \[MACHINE\]$", done.stderr, re.MULTILINE)
    assert re.search(r"^  next: pip install 'dryfit\[(search|tasks)\]'; 'dryfit\[all\]' for", done.stderr, re.MULTILINE)


def test_a_function_without_its_extra_says_the_same(start, tmp_path):
    code = start.replace("    main()", "    import dryfit; dryfit.tune")
    done = run(code, tmp_path)
    assert "MachineError: running this command: " in done.stderr and "pip install 'dryfit[search]'" in done.stderr


def test_help_and_versions_need_nothing(start, tmp_path):
    for words in (("--help",), ("--version",), ("rehearse", "--help"), ("tune", "--help"), ("schema",)):
        done = run(start, tmp_path, *words)
        assert done.returncode == 0 and "loaded besides: []" in done.stderr, done.stderr
