"""Run code in processes that are rehearsed: what each writes is redirected for the life of that process."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_HEAD = """
import os, sys, traceback
from pathlib import Path
import torch
from dryfit.meta.private_apis.torch_fakes import FakeTensor, FakeTensorMode
from dryfit.virtual.writes.muting import install
fakes = FakeTensorMode(allow_non_fake_inputs=True)
def made(shape, dtype):
    with fakes: return torch.empty(shape, dtype=dtype)
"""
_EACH = """
names, failed = dict(globals()), 0
for name, code in CASES.items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            names["muting"] = install(SCRATCH / name.replace(" ", "-"), made)
            exec(compile(code, name, "exec"), names)
            status = 0
        except BaseException:
            print("FAILED", name, muting.muted if "muting" in globals() else "")
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    failed += os.waitpid(child, 0)[1] != 0
assert not failed
"""


def run(code: str, scratch: Path, cwd: Path, **environment: str) -> str:
    """Run code after the installation, which gives it ``muting``; return what it prints.

    Raises:
        AssertionError: It failed; what it said.
    """
    return _run(f"{_HEAD}muting = install(Path({str(scratch)!r}), made)\n{code}", cwd, environment)


def run_each(head: str, cases: Mapping[str, str], scratch: Path, cwd: Path, **environment: str) -> str:
    """Run each code in a process of its own with a scratch folder of its own, forked after what the head imports.

    Raises:
        AssertionError: One failed; what it said.
    """
    return _run(f"{_HEAD}{head}\nCASES = {dict(cases)!r}\nSCRATCH = Path({str(scratch)!r})\n{_EACH}", cwd, environment)


def _run(code: str, cwd: Path, environment: Mapping[str, str]) -> str:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    return done.stdout


def tree(folder: Path) -> dict[str, str]:
    """Return what is in a folder: content, kind, mode and time of each path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        of_file = facts.st_mtime_ns if not path.is_dir() else ""
        found[str(path.relative_to(folder))] = f"{hashlib.sha256(content).hexdigest()} {facts.st_mode:o} {of_file}"
    return found
