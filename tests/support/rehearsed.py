"""Rehearse the programs of ``tests/programs``, or run them for real, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest

PROGRAMS: Final = Path(__file__).parents[1] / "programs"
SUPPORT: Final = Path(__file__).parent
GIB: Final = 2**30
MIB: Final = 2**20
_SURROUNDINGS: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # which datasets heeds too
}


def device(capacity_bytes: int = 24 * GIB, capability: tuple[int, int] = (8, 0)) -> DeviceSpec:
    """A made-up device."""
    return DeviceSpec(name="made up", capacity_bytes=capacity_bytes, capability=capability)


def rehearse(
    folder: Path,
    program: str | None,
    *arguments: str | int,
    surroundings: Mapping[str, str] | None = None,
    **request: Any,
) -> RehearsalAnswer:
    """Rehearse a program of ``tests/programs``, by its name there, with these arguments.

    Args:
        folder: An empty folder: request, answer, and the script's own files.
        surroundings: Environment variables besides those of the tests.
        request: Other fields of the request; ``device`` is one of 24 GiB.
    """
    body = RehearsalRequest(
        script=None if program is None else str(PROGRAMS / program),
        arguments=tuple(map(str, arguments)),
        scratch_dir=str(folder / "scratch"),
        answer_file=str(folder / "answer.json"),
        **{"device": device(), **request},
    )
    file = folder / "request.json"
    file.write_text(body.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "dryfit.gpu", str(file)]
    done = _run(command, folder, {"CUDA_VISIBLE_DEVICES": "", **(surroundings or {})})
    answer = folder / "answer.json"
    assert answer.is_file(), f"no answer, status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return RehearsalAnswer.model_validate_json(answer.read_text(encoding="utf-8"))


def run(
    folder: Path,
    program: str,
    *arguments: str | int,
    ranks: int = 1,
    surroundings: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a program for real, on the CPU; on several ranks by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(PROGRAMS / program), *map(str, arguments)]
    return _run(command, folder, surroundings, input="no\n")


def facts_of(program: str, *arguments: str) -> dict[str, Any]:
    """What a program beside this one prints as JSON, in a fresh process in which a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(SUPPORT / program), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def line_of(program: str, text: str) -> str:
    """``path:number`` of the first line of a program that has this text."""
    lines = (PROGRAMS / program).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"{PROGRAMS / program}:{number}"


def hide(folder: Path, *modules: str) -> dict[str, str]:
    """Surroundings in which these modules are not installed."""
    folder.mkdir()
    code = f"import sys\nsys.modules.update(dict.fromkeys({json.dumps(modules)}))\n"
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def _run(
    command: list[str], folder: Path, surroundings: Mapping[str, str] | None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **_SURROUNDINGS, **(surroundings or {})}
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False, **options
    )
