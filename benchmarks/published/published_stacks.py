"""Environments with the versions of torch, transformers and others that a row's measurement ran with."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 8)
"""What a rehearsal follows; a row of an older torch takes the one that runs here."""

ASK = """import json, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try: return version(name).partition("+")[0]
    except PackageNotFoundError: return None
print(json.dumps({name: of(name) for name in sys.argv[1:]}))
"""
STAND_INS = """import torch as _torch
if "+cpu" in _torch.__version__:  # operators of a build for CUDA, which no script here calls
    _library = _torch.library.Library("torchvision", "FRAGMENT")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
TORCHVISION = {"2.13": "0.28.0", "2.12": "0.27.0", "2.11": "0.26.0"}
"""The version that goes with each torch."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, and its versions of what a row names."""

    python: Path
    versions: Mapping[str, str | None]


def here(pins: Mapping[str, str]) -> Environment:
    """Return this interpreter."""
    return _asked(Path(sys.executable), pins)


def own(pins: Mapping[str, str], requires: tuple[str, ...], folder: Path) -> Environment:
    """Return an environment with a row's versions, which is made where the folder has none.

    Args:
        pins: The row's versions.
        requires: What else its script imports; the newest version of each, or torchvision's that fits.
        folder: Of all environments.

    Raises:
        subprocess.CalledProcessError: A package could not be installed.
    """
    torch = pins["torch"]
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        torch = here(pins).versions["torch"] or ""
    fitting = {"torchvision": TORCHVISION.get(torch.rpartition(".")[0], "")}
    wanted = [f"{name}=={fitting[name]}" if fitting.get(name) else name for name in requires if name not in pins]
    pinned = [f"{name}=={version}" for name, version in {**pins, "torch": torch}.items()]
    home = folder / hashlib.sha256(" ".join([*pinned, *wanted]).encode()).hexdigest()[:12]
    python = home / "bin" / "python"
    if not (home / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, pinned[0]], check=True)  # torch first and alone: together pip may take another build
        subprocess.run([*install, *pinned, *[one for one in wanted if "torchvision" not in one]], check=True)
        for one in wanted:
            if "torchvision" in one:
                subprocess.run([*install, "--no-deps", one], check=True)
                (package,) = home.glob("lib/python*/site-packages/torchvision/__init__.py")
                package.write_text(STAND_INS + package.read_text("utf-8"), "utf-8")
        (home / "made").touch()
    return _asked(python, pins)


def _asked(python: Path, pins: Mapping[str, str]) -> Environment:
    done = subprocess.run([str(python), "-c", ASK, *pins], capture_output=True, text=True, check=True)
    return Environment(python, json.loads(done.stdout))
