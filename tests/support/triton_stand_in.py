"""Launch kernels of a package that stands in for Triton, on a virtual GPU, and print what came of it as JSON.

The stand-in has the classes and the call path of Triton 3 (``triton/runtime/jit.py``, ``autotuner.py``): a launch asks
for a driver, which is not there.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import dryfit

JIT = """
class KernelInterface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)

class JITFunction(KernelInterface):
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, grid, warmup, **kwargs):
        raise RuntimeError("0 active drivers")
"""
AUTOTUNER = """
from triton.runtime.jit import KernelInterface

class Autotuner(KernelInterface):
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, **kwargs):
        raise RuntimeError("0 active drivers")

class Heuristics(Autotuner):
    pass
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "triton", "runtime")
        package.mkdir(parents=True)
        for path, text in (
            (package.parent / "__init__.py", ""),
            (package / "__init__.py", ""),
            (package / "jit.py", JIT),
            (package / "autotuner.py", AUTOTUNER),
        ):
            path.write_text(text, encoding="utf-8")
        with dryfit.virtual_gpu("1GiB") as gpu:
            sys.path.insert(0, folder)  # torch itself has looked for the package by now
            import torch

            jit = importlib.import_module("triton.runtime.jit").JITFunction
            tuned = importlib.import_module("triton.runtime.autotuner")

            def fused(_source, _out):
                raise AssertionError("a kernel's code is not for Python")

            source, out = torch.arange(4, device="cuda"), torch.zeros(4, device="cuda", dtype=torch.int64)
            known = [source.tolist(), (out + 1).tolist()]
            before = torch.cuda.memory_allocated()
            plain = jit(fused)
            for kernel in (plain, tuned.Autotuner(plain), tuned.Heuristics(tuned.Autotuner(plain))):
                kernel[(1,)](source, out)
            facts = {
                "known": known,
                "taken": torch.cuda.memory_allocated() - before,
                "after": (out + 1).tolist(),
                "notes": gpu.notes,
            }
    print(json.dumps(facts))
