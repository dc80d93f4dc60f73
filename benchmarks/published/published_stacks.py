"""Environments with the versions of torch, transformers and others that a row's measurement ran with."""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from throwaway import Environment, make_environment

OLDEST_TORCH = (2, 8)
"""What a rehearsal follows; a row of an older torch takes the one that runs here."""

OLDEST_BITSANDBYTES = (0, 46)
"""What a rehearsal follows; a row of an older one takes this version, and what the older one kept."""
BITSANDBYTES, KEEPS_INPUT = "0.49.2", (0, 43)
KEPT_INPUT = ("ctx.tensors = (None, B)", "ctx.tensors = (A, B)")
"""Until :data:`KEEPS_INPUT` a product with a 4-bit matrix kept its input, which no gradient needs."""

STAND_INS = """import torch as _torch
if "+cpu" in _torch.__version__:  # operators of a build for CUDA, which no script here calls
    _library = _torch.library.Library("torchvision", "FRAGMENT")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
TORCHVISION = {"2.13": "0.28.0", "2.12": "0.27.0", "2.11": "0.26.0"}
"""The version that goes with each torch."""


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def here() -> Environment:
    """Return the environment of this interpreter."""
    return Environment(Path(sys.prefix))


def versions_of(environment: Environment, pins: Mapping[str, str]) -> dict[str, str | None]:
    """Return an environment's versions of what a row names, without their builds."""
    found = environment.versions(*pins)
    return {name: version.partition("+")[0] or None for name, version in zip(pins, found, strict=True)}


def own(pins: Mapping[str, str], requires: tuple[str, ...], folder: Path) -> Environment:
    """Return an environment with a row's versions, which is made where the folder has none.

    Args:
        pins: The row's versions.
        requires: What else its script imports; the newest version of each, or torchvision's that fits.
        folder: Of all environments.

    Raises:
        CheckError: A package could not be installed.
    """
    torch, quantizer = pins["torch"], _number(pins.get("bitsandbytes", BITSANDBYTES))
    taken = {**pins}
    if _number(torch) < OLDEST_TORCH:
        torch = taken["torch"] = versions_of(here(), pins)["torch"] or ""
    if quantizer < OLDEST_BITSANDBYTES:
        taken["bitsandbytes"] = BITSANDBYTES
    keeps_input = quantizer < KEEPS_INPUT
    pinned = [f"{name}=={version}" for name, version in taken.items()]
    wanted = [name for name in requires if name not in pins and name != "torchvision"]
    fitting = TORCHVISION.get(torch.rpartition(".")[0])
    vision = [f"torchvision=={fitting}" if fitting else "torchvision"] * ("torchvision" in requires)
    made_of = [*pinned, *wanted, *vision, *KEPT_INPUT[:keeps_input]]
    home = folder / hashlib.sha256(" ".join(made_of).encode()).hexdigest()[:12]
    if (home / "made").exists():
        return Environment(home)
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    environment = make_environment(home)
    environment.install(pinned[0])  # torch first and alone: together pip may take another build
    environment.install(*pinned, *wanted)
    if vision:
        environment.install("--no-deps", *vision)
        (package,) = home.glob("lib/python*/site-packages/torchvision/__init__.py")
        package.write_text(STAND_INS + package.read_text("utf-8"), "utf-8")
    if keeps_input:
        (module,) = home.glob("lib/python*/site-packages/bitsandbytes/autograd/_functions.py")
        text = module.read_text("utf-8")
        assert text.count(KEPT_INPUT[0]) == 1
        module.write_text(text.replace(*KEPT_INPUT), "utf-8")
    (home / "made").touch()
    return environment
