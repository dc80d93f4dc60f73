"""Where the host waits for its device in a step of a real trial on a virtual GPU: ``python device_waits.py``.

Reads the tables of a trial as JSON, trains it in the folder that is named, and prints as JSON what waited in its last
step but one: an operator that reads a value, has a size that depends on values, or copies between host and device
without saying that it need not be waited for.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import dryfit

_aten = torch.ops.aten
READS = frozenset({_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default})
"""Whose result the host, or the size of a tensor, depends on."""
COPIES = frozenset({_aten._to_copy.default, _aten.copy_.default})


class Waits:
    """Notes each operator that the host waits for, with the line that runs it."""

    def __init__(self, dispatch: Any) -> None:
        self.steps: list[list[list[str]]] = [[]]
        self._run = dispatch._on_device
        dispatch._on_device = self._noted

    def _noted(self, func: Any, types: Any, args: Any, kwargs: Any, device: Any) -> Any:
        if func is _aten.is_nonzero.default:  # a condition, outside of autograd
            return bool(self._noted(_aten._local_scalar_dense.default, types, args, kwargs, device))
        if _waits(func, args, kwargs, device):
            self.steps[-1].append([str(func), _place()])
        return self._run(func, types, args, kwargs, device)


def _waits(func: Any, args: Any, kwargs: Any, device: Any) -> bool:
    if func in READS:
        return args[0].device.type == "cuda"
    if func is _aten.index.Tensor:
        return any(one is not None and one.dtype is torch.bool and one.is_cuda for one in args[1])
    if func not in COPIES:
        return False
    to, source = (args[0].device, args[1]) if func is _aten.copy_.default else (device, args[0])
    if to is None or to.type == source.device.type:
        return False
    never_waits = source.device.type == "cpu" and (kwargs.get("non_blocking") or args[2:] == (True,))
    return not never_waits


def _place() -> str:
    ours = [one for one in traceback.extract_stack() if "/torch/" not in one.filename and "/gpu/" not in one.filename]
    return f"{ours[-3].filename.rpartition('/')[2]}:{ours[-3].name}"


def main(folder: Path, tables: dict[str, Any]) -> None:
    """Train on a virtual GPU and print what waited."""
    import tiny
    import tiny_lms

    # Made before: what is made on a virtual GPU has no values to be saved.
    of_words = tables.get("study", {}).get("task") == "causal-lm"
    model = tiny_lms.causal_lm(folder / "m") if of_words else tiny.model(folder / "m")
    with dryfit.virtual_gpu("24GiB") as gpu:
        from transformers import masking_utils

        from dryfit.settings.memory_terms import DeviceKind
        from dryfit.training import model as models
        from dryfit.training import trainer as loop
        from trials import small

        masking_utils.is_tracing = lambda _=None: False  # it takes fakes for a traced graph, which has no values
        waits = Waits(gpu.dispatch)
        pinned: list[bool] = []
        on_step_end, loader_of = loop.TrialCallback.on_step_end, loop.TrialTrainer.get_train_dataloader

        def end(self: Any, *args: Any, **kwargs: Any) -> None:
            on_step_end(self, *args, **kwargs)
            waits.steps.append([])

        def loader(self: Any) -> Any:
            made = loader_of(self)
            pinned.append(made.pin_memory)
            return made

        build = models.build_model

        def moved(request: Any, task: Any) -> Any:  # files are read past the virtual device
            on_host = request.plan.model_copy(update={"device": DeviceKind.CPU})
            return build(request.model_copy(update={"plan": on_host}), task).to("cuda")

        models.build_model = moved
        loop.TrialCallback.on_step_end = end
        loop.TrialTrainer.get_train_dataloader = loader
        trial = small(folder, encoder=model, **tables)
        trial.plan = trial.plan.model_copy(update={"device": DeviceKind.CUDA})
        trial.run()
        print(json.dumps({"waits": waits.steps[-3], "pinned": pinned, "micro": trial.plan.accumulation}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
