"""Train a tiny trial on a real device and print what was seen, as JSON: ``python device_steps.py FOLDER TABLES``."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import tiny
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.wire import Note
from dryfit.training import trainer as loop
from trials import small


def main(folder: Path, tables: dict[str, Any], device: DeviceKind = DeviceKind.CUDA) -> None:
    """Count torch's warnings of operators that wait, from the start of each step to the end of its update."""
    waits: list[int] = []
    pinned: list[bool] = []
    training_step, on_step_end = loop.TrialTrainer.training_step, loop.TrialCallback.on_step_end
    watching = warnings.catch_warnings(record=True)

    def begin(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        nonlocal watching
        pinned.append(all(values.is_pinned() for values in inputs.values()))
        watching = warnings.catch_warnings(record=True)
        seen.append(watching.__enter__())
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return training_step(self, model, inputs, *rest)

    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        watching.__exit__(None, None, None)
        waits.append(sum("synchronizing" in str(one.message) for one in seen.pop() or ()))
        on_step_end(self, *args, **kwargs)

    seen: list[Any] = []
    loop.TrialTrainer.training_step, loop.TrialCallback.on_step_end = begin, end
    folder.mkdir(parents=True, exist_ok=True)
    trial = small(folder, encoder=tiny.model(folder / "m"), **tables)
    trial.plan = trial.plan.model_copy(update={"device": device})
    result, channel = trial.run()
    found = {
        "waits": waits,
        "pinned": all(pinned),
        "micro": trial.plan.accumulation,
        "products": torch.get_float32_matmul_precision(),
        "value": result.value,
        "allocated": result.peak_allocated_bytes,
        "notes": [message.text for message in channel.messages() if isinstance(message, Note)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), DeviceKind(sys.argv[3] if sys.argv[3:] else "cuda"))
