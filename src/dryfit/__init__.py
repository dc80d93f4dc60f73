"""dryfit: dry-fit every trial before it touches the GPU.

The public names. They are imported on first use, so that ``import dryfit`` costs nothing and the control plane
never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dryfit.older_names import find_older_names
from dryfit.settings.version import VERSION as __version__  # noqa: N811
from dryfit.settings.version import refuse_unsupported_platform

if TYPE_CHECKING:
    from dryfit.gpu.custom_operators import register
    from dryfit.gpu.device import virtual_gpu
    from dryfit.ledger import event_types as events
    from dryfit.settings.errors import DryfitError, LoadError
    from dryfit.study.estimates import estimate, fits
    from dryfit.study.functions import (
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
    from dryfit.study.memory_checks import check_memory
    from dryfit.study.observers import Observer
    from dryfit.study.rehearsals import rehearse
    from dryfit.tasks.saved_models import load
    from dryfit.training.current_trial import Trial, checkpointed, current_trial, report
    from dryfit.training.prediction import Predictor

_HOMES = {
    "DryfitError": "dryfit.settings.errors",
    "LoadError": "dryfit.settings.errors",
    "Observer": "dryfit.study.observers",
    "Predictor": "dryfit.training.prediction",
    "Trial": "dryfit.training.current_trial",
    "check_memory": "dryfit.study.memory_checks",
    "estimate": "dryfit.study.estimates",
    "fits": "dryfit.study.estimates",
    "checkpointed": "dryfit.training.current_trial",
    "current_trial": "dryfit.training.current_trial",
    "register": "dryfit.gpu.custom_operators",
    "rehearse": "dryfit.study.rehearsals",
    "report": "dryfit.training.current_trial",
    "load": "dryfit.tasks.saved_models",
    "virtual_gpu": "dryfit.gpu.device",
}
"""Modules of the public names that are not in ``dryfit.study.functions``."""

_MODULES = {"events": "dryfit.ledger.event_types", "meta": "dryfit.meta"}
"""Public names that are modules."""

find_older_names()

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
    "check_memory",
    "checkpointed",
    "compare",
    "current_trial",
    "doctor",
    "estimate",
    "events",
    "export",
    "fits",
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
    "register",
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
    try:
        return getattr(import_module(_HOMES.get(name, "dryfit.study.functions")), name)
    except ModuleNotFoundError as error:
        raise import_module("dryfit.settings.installed").missing_package(error) or error from error
