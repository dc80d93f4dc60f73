"""dryfit: dry-fit every trial before it touches the GPU.

The public names. They are imported on first use, so that ``import dryfit`` costs nothing and the control plane
never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dryfit.core.platforms import refuse_unsupported_platform
from dryfit.core.version import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from dryfit.api import (
        Study,
        TuneAllResult,
        TuneResult,
        bug_report,
        calibrate,
        check,
        compare,
        doctor,
        export,
        import_rows,
        init,
        init_rows,
        init_script,
        open_study,
        plan,
        plan_space,
        predict,
        push,
        rehearse,
        resume,
        status,
        status_all,
        stop,
        train,
        train_top,
        tune,
        tune_all,
        write_report,
    )
    from dryfit.core.errors import DryfitError, LoadError
    from dryfit.jobs.own.objective_trial import Trial
    from dryfit.jobs.predictor import Predictor
    from dryfit.jobs.script.current import checkpointed, current_trial, report
    from dryfit.store import event_types as events
    from dryfit.study.loop.observers import Observer
    from dryfit.tasks.saved.saved_model import load
    from dryfit.virtual.gpu import virtual_gpu

_HOMES = {
    "DryfitError": "dryfit.core.errors",
    "LoadError": "dryfit.core.errors",
    "Observer": "dryfit.study.loop.observers",
    "Predictor": "dryfit.jobs.predictor",
    "Trial": "dryfit.jobs.own.objective_trial",
    "checkpointed": "dryfit.jobs.script.current",
    "current_trial": "dryfit.jobs.script.current",
    "report": "dryfit.jobs.script.current",
    "load": "dryfit.tasks.saved.saved_model",
    "virtual_gpu": "dryfit.virtual.gpu",
}
"""Modules of the public names that are not in ``dryfit.api``."""

_MODULES = {"events": "dryfit.store.event_types", "meta": "dryfit.meta"}
"""Public names that are modules."""

__all__ = [
    "DryfitError",
    "LoadError",
    "Observer",
    "Predictor",
    "Study",
    "Trial",
    "TuneAllResult",
    "TuneResult",
    "__version__",
    "bug_report",
    "calibrate",
    "check",
    "checkpointed",
    "compare",
    "current_trial",
    "doctor",
    "events",
    "export",
    "import_rows",
    "init",
    "init_rows",
    "init_script",
    "load",
    "open_study",
    "plan",
    "plan_space",
    "predict",
    "push",
    "rehearse",
    "report",
    "resume",
    "status",
    "status_all",
    "stop",
    "train",
    "train_top",
    "tune",
    "tune_all",
    "virtual_gpu",
    "write_report",
]


_GONE = {
    "train_ensemble": "dryfit.train each of the best trials, predict with each model, and average the probabilities",
}
"""Public names of earlier versions, each with what to do instead."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in __all__:
        instead = f" any more: {_GONE[name]}" if name in _GONE else ""
        raise AttributeError(f"module 'dryfit' has no attribute {name!r}{instead}")
    refuse_unsupported_platform()
    return getattr(import_module(_HOMES.get(name, "dryfit.api")), name)
