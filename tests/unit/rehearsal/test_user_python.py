"""The user's own interpreter: found, asked, refused in one line, and given no more than the virtual GPU's code."""

import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dryfit.processes import rehearsal_process as module
from dryfit.processes.rehearsal_process import BESIDE, UserPython, code_folder, command, user_python
from dryfit.settings.errors import ConfigError
from dryfit.settings.version import PACKAGE_FOLDER


def interpreter(folder: Path, *, torch: str | None = "2.9.1", customize: str = "", path: str = "bin/python") -> Path:
    """Make an environment of this Python, with a torch that cannot be imported, or none."""
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n")
    python = folder / path
    python.parent.mkdir(exist_ok=True)
    python.symlink_to(os.path.realpath(sys.executable))
    if torch is not None:
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is not there')\n")
        (packages / f"torch-{torch}.dist-info").mkdir()
        (packages / f"torch-{torch}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    if customize:
        (packages / "sitecustomize.py").write_text(customize)
    return python


def refusal(given: Path | None, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        user_python(given, variables)
    assert "\n" not in caught.value.found
    return caught.value.found


@pytest.mark.heavy  # it asks whether torch is here
def test_dryfits_own_interpreter_is_the_default() -> None:
    assert user_python(None, {}) == (None, "")
    assert user_python(Path(sys.executable), {}) == (None, "")
    assert user_python(None, {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": "/nowhere"}) == (None, "")


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_is_taken(tmp_path: Path, variable: str) -> None:
    python = interpreter(tmp_path / "own", customize="print('hello\\ndryfit-interpreter [')")
    assert user_python(None, {variable: str(tmp_path / "own")}) == (UserPython(python, has_eight_bit=False), "")


@pytest.mark.heavy  # it asks whether torch is here
def test_an_active_environment_without_torch_is_passed_over(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "own", torch=None)
    found, remark = user_python(None, {"VIRTUAL_ENV": str(tmp_path / "own")})
    assert found is None and remark.startswith(f"{python} has no torch")


def test_what_cannot_be_used_is_refused_in_a_line(tmp_path: Path) -> None:
    assert refusal(interpreter(tmp_path / "none", torch=None)).endswith("has no torch")
    assert refusal(interpreter(tmp_path / "old", torch="2.1.0+cu121")).endswith("has torch 2.1.0+cu121")
    assert refusal(tmp_path / "none").endswith("is a folder")
    assert refusal(tmp_path / "nothing").startswith("there is no file")
    assert "where there is no bin/python: it was removed or moved" in refusal(None, CONDA_PREFIX=str(tmp_path / "gone"))
    (tmp_path / "moved").symlink_to(tmp_path / "gone" / "python")
    assert "which is not there" in refusal(tmp_path / "moved")
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\necho no\nexit 3\n")
    assert "cannot be started" in refusal(text)
    text.chmod(0o755)
    assert "is no working Python: it ended with status 3" in refusal(text)


@pytest.mark.parametrize(("machine", "name"), [(183, "aarch64"), (62, "x86_64"), (7, "machine 7")])
def test_a_program_for_another_processor_is_refused(tmp_path: Path, machine: int, name: str) -> None:
    other = tmp_path / "python"
    other.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + machine.to_bytes(2, "little") + bytes(44))
    other.chmod(0o755)
    said = refusal(other)
    assert f"is built for {name}" in said or ("cannot be started" in said or "no working" in said)
    assert module._machine(other) == name  # type: ignore[attr-defined]


def test_an_older_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'dryfit-interpreter {\"python\": [3, 9]}'\n")
    old.chmod(0o755)
    assert refusal(old).endswith("is Python 3.9")


def test_the_code_folder_has_what_runs_and_nothing_else() -> None:
    """Each module there can be imported with the standard library alone, but for those that begin with torch."""
    with code_folder() as folder:
        found = {path.relative_to(folder / "dryfit").with_suffix("").as_posix() for path in folder.rglob("*.py")}
        assert {name for name in found if not name.startswith("gpu/")} == set(BESIDE)
        assert not (folder / "dryfit").stat().st_mode & stat.S_IWUSR
        names = [f"dryfit.{name.removesuffix('/__init__').replace('/', '.')}" for name in BESIDE if name != "__init__"]
        code = f"import sys; sys.path[:0] = [{str(folder)!r}]\nfor name in {names}: __import__(name)\n"
        code += "assert not any('site-packages' in (getattr(m, '__file__', '') or '') for m in sys.modules.values())"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert not folder.exists() and (PACKAGE_FOLDER / "gpu" / "__main__.py").exists()


def test_a_file_of_the_folder_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typing.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    with code_folder() as folder:
        words = command(Path(sys.executable), folder, "dryfit.processes.linux_kernel", "request.json")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_other_pythons_read_the_code(version: str) -> None:
    pythons = sorted(Path(sysconfig.get_config_var("prefix")).parent.glob(f"{version}*/bin/python"))
    if not pythons:
        pytest.skip(f"Python {version} is not here")
    with code_folder() as folder:
        names = [f"dryfit.{name.removesuffix('/__init__').replace('/', '.')}" for name in BESIDE if name != "__init__"]
        code = f"""
import ast, pathlib, sys
sys.path[:0] = [{str(folder)!r}]
for file in pathlib.Path({str(folder)!r}, "dryfit", "gpu").rglob("*.py"):
    ast.parse(file.read_text("utf-8"))
for name in {names}: __import__(name)
sys.modules["dryfit.processes.process"].ask_no_one()
"""
        subprocess.run([str(pythons[-1]), "-c", code], check=True)
