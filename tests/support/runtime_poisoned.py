"""Preloaded into a fork server: a stand-in for a torch that was changed. A fresh interpreter never imports this.

With ``POISON_AT=start`` every fork of the server finds it; with ``late``, only once a job has done something.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import DataError, PoisonedError
from dryfit.settings.training_messages import TrainRequest, TrainResult
from runtime_jobs import done

changed = os.environ.get("POISON_AT") == "start"


def _check_process(doing: str) -> None:
    if changed:
        raise PoisonedError(doing, "the default dtype is torch.bfloat16")


def _stand_in() -> None:
    torch = ModuleType("torch")
    vars(torch).update(set_num_threads=lambda _: None, cuda=SimpleNamespace(is_initialized=lambda: False))
    sanity = ModuleType("dryfit.meta.sanity")
    vars(sanity).update(check_process=_check_process)
    sys.modules.update({"torch": torch, "dryfit.meta.sanity": sanity})


def run_job(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Change torch, then end as asked."""
    global changed
    changed = True
    match body.config.params["job"]:
        case "raise":
            raise RuntimeError("expected Float but found BFloat16")
        case "known":
            raise DataError("reading rows", "found 3", "2", "look")
    return done()


_stand_in()
