"""Run a training script for real and time its optimizer steps: ``python timed_run.py ANSWER.json STEPS SCRIPT ARGS``.

It stands alone: the interpreter is the script's own, which imports no dryfit. The script ends after the steps, wherever
it is then, and what it has written stays.
"""

import json
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

_LAST = 20
"""Steps at the end whose median counts: the first ones load kernels."""


class _Enough(BaseException):
    pass


def main() -> None:
    """Run the script of the command line, and write what its steps took."""
    sys.path.pop(0)  # this file's folder
    answer, steps, *words = sys.argv[1:]
    import torch
    import torch.optim.optimizer as optimizers

    has_gpu = torch.cuda.is_available()
    ends: list[float] = []
    first: list[Any] = []

    def step_ended(optimizer: Any, *_: object) -> None:
        first[:] = first or [optimizer]  # of several, such as a generator's and a discriminator's
        if optimizer is not first[0]:
            return
        if has_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if len(ends) > int(steps):
            raise _Enough

    optimizers.register_optimizer_step_post_hook(step_ended)
    error = ""
    try:
        _run(words)
    except _Enough:
        pass
    except SystemExit as ended:
        error = f"exit status {ended.code}" if ended.code not in (None, 0) else ""
    took = [later - earlier for earlier, later in pairwise(ends)][-_LAST:]
    told = {
        "step_s": median(took) if took else None,
        "steps": len(ends),
        "device": torch.cuda.get_device_name() if has_gpu else "",
        "torch": str(torch.__version__),
        "error": error,
    }
    Path(answer).write_text(json.dumps(told), encoding="utf-8")


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
