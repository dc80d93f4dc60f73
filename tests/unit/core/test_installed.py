"""What ``dryfit --version`` says, from metadata alone."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dryfit.settings.installed import version_lines
from dryfit.settings.version import VERSION
from study_runs import run_here

OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)  Thu Jan
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""


def test_version_says_what_dryfit_stands_on() -> None:
    done = run_here("--version")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"dryfit {VERSION}"
    assert any(line.startswith(f"torch {version('torch').partition('+')[0]}") for line in lines)
    assert f"transformers {version('transformers')}" in lines
    assert lines[-1].startswith("NVIDIA driver ")


@pytest.mark.parametrize(
    ("text", "said"), [(OPEN, "570.86.15"), (CLOSED, "535.54.03"), ("", "unknown"), (None, "not loaded")]
)
def test_the_version_of_the_driver_is_read_from_its_module(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert version_lines(file)[-1] == f"NVIDIA driver {said}"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("cuda: Optional[str] = '13.0'\n__version__ = '2.9.1+cu130'", "torch 2.9.1+cu130 (built for CUDA 13.0)"),
        ("__version__ = '2.9.1'\ncuda = None\nhip = '6.4'", "torch 2.9.1 (built for ROCm 6.4)"),
        ("__version__ = '2.9.1'\ncuda = None\nhip = None", "torch 2.9.1 (built for the CPU)"),
        ("raise SystemExit(1)", "torch 2.9.0"),
        ("not python (", "torch 2.9.0"),
        (None, "torch 2.9.0"),
    ],
)
def test_what_torch_was_built_for_is_read_and_not_run(
    source: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "torch-2.9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n", encoding="utf-8")
    (tmp_path / "torch").mkdir()
    if source is not None:
        (tmp_path / "torch" / "version.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert line in version_lines()


def test_a_machine_without_torch_gets_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "torch not installed" in version_lines()
    assert "transformers not installed" in version_lines()
