"""A rehearsal in another interpreter: what its process imports, and what it answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.processes.rehearsal_process import BESIDE, RehearsalSurroundings, run_rehearsal
from dryfit.settings.devices import parse_device
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest, ScriptEnd

pytestmark = pytest.mark.heavy

SCRIPT = """
import json, sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    if step == 2:
        print("MODULES", json.dumps(sorted(sys.modules)), flush=True)
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BY_ITSELF = """
import json, sys
for name in json.loads(sys.stdin.read()):
    try:
        __import__(name)
    except Exception:
        pass
print(json.dumps(sorted(sys.modules)))
"""


def rehearsed(script: Path, python: Path | None) -> tuple[RehearsalAnswer, str]:
    output: list[bytes] = []
    request = RehearsalRequest(script=str(script), device=parse_device("24GiB"), scratch_dir="", answer_file="")
    answer = run_rehearsal(request, RehearsalSurroundings(dict(os.environ), python=python), output.append)
    return answer, b"".join(output).decode()


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_the_process_imports_torch_and_the_standard_library_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    answer, output = rehearsed(script, Path(sys.executable))
    assert (answer.verdict, answer.end, answer.traceback) == (VerdictKind.FITS, ScriptEnd.FINISHED, ""), answer
    line = next(line for line in output.splitlines() if line.startswith("MODULES "))
    seen = set(json.loads(line.removeprefix("MODULES ")))
    of_torch = sorted(name for name in seen if name.partition(".")[0] == "torch")
    alone = subprocess.run(
        [sys.executable, "-c", BY_ITSELF], input=json.dumps(of_torch), capture_output=True, text=True, check=True
    )
    brought = tops(set(json.loads(alone.stdout.splitlines()[-1])))  # numpy, sympy, tqdm ...: torch imports them itself
    assert tops(seen) <= brought | {"dryfit", "__mp_main__"}
    assert not {"pydantic", "transformers", "accelerate", "safetensors", "huggingface_hub", "packaging"} & tops(seen)
    ours = {name for name in seen if name.startswith("dryfit.") and not name.startswith("dryfit.gpu")}
    packages = {name.removesuffix("/__init__") for name in BESIDE} - {"__init__"}
    assert ours == {f"dryfit.{name.replace('/', '.')}" for name in packages}


def test_the_answer_is_that_of_dryfits_own_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (own, _), (other, _) = rehearsed(script, None), rehearsed(script, Path(sys.executable))
    assert own.memory is not None and other.memory is not None
    for name in ("peak_allocated_bytes", "required_bytes", "by_category", "by_line", "peak_source"):
        assert getattr(own.memory, name) == getattr(other.memory, name), name


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('libtorch.so is not there')", "ImportError: libtorch.so is not there"),
        ("raise OSError('an undefined symbol')", "OSError: an undefined symbol"),
        (
            "from types import SimpleNamespace as N\n__version__ = '2.9'\ncuda = N(is_available=lambda: True)",
            "sees a GPU",
        ),
    ],
)
def test_a_torch_that_cannot_rehearse_is_told_in_a_line(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    (tmp_path / "train.py").write_text(SCRIPT)
    request = RehearsalRequest(
        script=str(tmp_path / "train.py"), device=parse_device("24GiB"), scratch_dir="", answer_file=""
    )
    surroundings = RehearsalSurroundings({**os.environ, "PYTHONPATH": str(tmp_path)}, python=Path(sys.executable))
    answer = run_rehearsal(request, surroundings, lambda _: None)
    assert (answer.verdict, answer.end, answer.ran) == (VerdictKind.UNKNOWN, ScriptEnd.FAILED, False)
    assert says in answer.reasons[0], answer
    assert answer.traceback == ""
