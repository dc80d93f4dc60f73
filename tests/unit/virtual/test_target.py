"""A rehearsal runs what Python would run: same arguments, same import path, same ``__main__``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.rehearsal_messages import RehearsalRequest

CODE = """
import sys
from dryfit.settings.rehearsal_messages import RehearsalRequest
from dryfit.gpu.target import add_working_folder, own_code, started
request = RehearsalRequest.model_validate_json(sys.argv[1])
add_working_folder(request)
print("own", own_code(request))
started(request)()
"""
BODY = """
import os, sys
import beside
def main():
    print(__name__, sys.argv[1:], beside.__name__, os.path.basename(__file__))
if __name__ == "__main__":
    main()
"""

CONSOLE_SCRIPT = """#!/usr/bin/python3
import sys
from tool.main import main
if __name__ == "__main__":
    sys.argv[0] = sys.argv[0].removesuffix(".exe")
    sys.exit(main())
"""


@pytest.mark.parametrize(
    ("target", "own", "said"),
    [
        ({"script": "folder/run.py"}, "folder/run.py", "__main__ ['--x', '1'] beside run.py"),
        ({"script": "folder"}, "folder/__main__.py", "__main__ ['--x', '1'] beside __main__.py"),
        ({"module": "package.run"}, "package/run.py", "__main__ ['--x', '1'] beside run.py"),
        ({"module": "package"}, "package/__main__.py", "__main__ ['--x', '1'] beside __main__.py"),
        ({"script": "bin/tool"}, "installed/tool/", "tool.main ['--x', '1'] beside main.py"),
        ({"function": "{}/folder/run.py:main"}, "folder/run.py", "run ["),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_run(tmp_path: Path, target: dict[str, str], own: str, said: str) -> None:
    for name in (
        *("folder/run.py", "folder/__main__.py", "package/run.py", "package/__main__.py"),
        "installed/tool/main.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BODY)
    for name in (
        "folder/beside.py",
        "beside.py",
        "package/__init__.py",
        "installed/beside.py",
        "installed/tool/__init__.py",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text(CONSOLE_SCRIPT)
    request = RehearsalRequest(
        **{kind: value.format(tmp_path) for kind, value in target.items()},
        arguments=("--x", "1"),
        device=DeviceSpec(name="24GiB", capacity_bytes=2**30),
        scratch_dir="",
        answer_file="",
    )
    command = [sys.executable, "-P", "-c", CODE, request.model_dump_json()]
    path = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"own {tmp_path / own}{'/' if own.endswith('/') else ''}"
    assert second.startswith(said)
