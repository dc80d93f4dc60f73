"""timm and what it needs, installed in a folder of its own: transformers in the environment would use torchvision too.

The index has torchvision for CUDA builds of torch only. On another build its compiled operators do not load, and its
import fails at the first one that it describes. A vision transformer calls none of them, so their names are enough.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

import warm

PACKAGES = ("timm==1.0.31", "torchvision==0.28.0", "pillow==13.0.0")
_NAMES = """import torch

names = torch.library.Library("torchvision", "DEF")
names.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
names.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


def with_timm(folder: Path) -> dict[str, str]:
    """Install timm into a new folder; return the surroundings in which it can be imported."""
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(pip, check=True, timeout=300)
    if torch.version.cuda is None:
        (folder / "sitecustomize.py").write_text(_NAMES, encoding="utf-8")
    # Which of these packages there are, libraries ask while they are imported: nothing is forked that has asked before.
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]), warm.COLD_VARIABLE: "1"}
