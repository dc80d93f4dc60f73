"""Refuse models and optimizers whose weights lie elsewhere (disk, host, meta) and could not be trained exactly.

Weights that are streamed in for each forward (offloading to CPU memory or disk) get no gradient, or a wrong one, and an
optimizer that was built before the weights came keeps updating unused tensors. Neither raises by itself.
"""

import gc
import sys
from collections import Counter
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dryfit.core.errors import LoadError
from dryfit.core.text.units import gib
from dryfit.core.text.words import few
from dryfit.meta.construction.walk import SlotKind, leaks, slots
from dryfit.meta.private_apis.torch_modules import parameters_of


def refuse_offload(module: nn.Module, *, doing: str) -> None:
    """Refuse a model whose weights are not all where they are trained.

    Args:
        module: The model about to be trained.
        doing: The first part of the message: ``"training trial 7"``.

    Raises:
        LoadError: Part of it is on meta (where accelerate leaves weights that it streams in from elsewhere), or
            on the host while the rest is on a device. The message has a plan that trains it.
    """
    lost, places = leaks(module), {parameter.device.type for parameter in module.parameters()} - {"meta"}
    problems = [f"{len(lost)} tensors are on meta ({few(lost)})"] if lost else []
    if len(places) > 1:
        problems.append(f"its parameters lie on {' and '.join(sorted(places))}")
    if not problems:
        return
    raise LoadError(
        doing,
        "; ".join(problems) + ": their gradients would be missing or wrong",
        allowed="a model whose every tensor is on the device that trains it",
        hint=f"load it without device_map and offloading, onto one device: its parameters take "
        f"{gib(sum(parameter.nbytes for parameter in module.parameters()))} there; to make room for gradients and "
        "activations, turn on activation checkpointing and lower the micro-batch, with more accumulation steps in "
        "exchange",
    )


def refuse_early_optimizer(module: nn.Module, optimizer: Optimizer, *, doing: str = "checking the optimizer") -> None:
    """Refuse an optimizer that does not hold exactly the parameters the model trains.

    Frozen parameters may be in it or not.

    Raises:
        LoadError: It holds parameters on meta or some that are not the model's, or lacks trainable ones.
    """
    names = {id(slot.tensor): slot.name for slot in reversed(slots(module)) if slot.kind is SlotKind.PARAMETER}
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    on_meta = [names.get(key, "a foreign one") for key, parameter in held.items() if parameter.is_meta]
    foreign = [f"of shape {tuple(parameter.shape)}" for key, parameter in held.items() if key not in names]
    lacking = [names[id(parameter)] for parameter in module.parameters() if _lacks(parameter, held)]
    problems = [
        f"{len(listed)} {what} ({few(listed)})"
        for listed, what in (
            (on_meta, "of its parameters are on meta"),
            (foreign, "of its parameters are not the model's"),
            (lacking, "trainable parameters of the model are not in it"),
        )
        if listed
    ]
    if problems:
        raise LoadError(
            doing,
            f"{type(optimizer).__name__} and the model do not belong together: " + "; ".join(problems),
            allowed="an optimizer of exactly the parameters the model trains",
            hint="build the optimizer after the model has its weights and adapters; freeze what it leaves out",
        )


def early_optimizers(module: nn.Module) -> list[str]:
    """Describe the optimizers alive in this process that hold parameters of a module that are still on meta.

    Costs some milliseconds while nobody besides the module refers to those parameters. Otherwise every object of the
    garbage collector is checked: 0.2 s for a million.

    Returns:
        One phrase for each optimizer: ``"AdamW, which holds 38 of these 39 parameters"``.
    """
    if not _held_elsewhere(module):
        return []
    wanted = {id(parameter) for parameter in module.parameters() if parameter.is_meta}
    if not _holders(wanted):
        return []
    # A dropped optimizer may still be in a reference cycle (with its scheduler); it does no harm.
    gc.collect()
    return [
        f"{type(optimizer).__name__}, which holds {count} of these {len(wanted)} parameters"
        for optimizer, count in _holders(wanted)
    ]


def refuse_early_optimizers(module: nn.Module, *, doing: str) -> None:
    """Refuse to give a module its weights while an optimizer holds its empty parameters.

    Raises:
        LoadError: There is such an optimizer.
    """
    optimizers = early_optimizers(module)
    if optimizers:
        raise LoadError(
            doing,
            f"an optimizer was built too early: {'; '.join(optimizers)} on meta, and would go on updating those",
            allowed="optimizers built after the weights are there",
            hint="delete the optimizer (and its scheduler), give the model its weights, then build it",
        )


def _lacks(parameter: nn.Parameter, held: dict[int, Any]) -> bool:
    return parameter.requires_grad and id(parameter) not in held


def _held_elsewhere(module: nn.Module) -> bool:
    """Whether anything besides the module may refer to one of its parameters on meta."""
    # References to a parameter in one table, here and on this version of Python.
    probe = nn.Module()
    probe.register_parameter("only", nn.Parameter(torch.empty(0, device="meta")))
    ((_, alone),) = _references(probe).values()
    counts = _references(module)
    if all(count <= alone - 1 + places for places, count in counts.values()):
        return False
    own = Counter(id(slot.tensor) for slot in slots(module))  # slower: in lists and attributes too, as an LSTM's
    return any(count > alone - 1 + own[key] for key, (_, count) in counts.items())


def _references(module: nn.Module) -> dict[int, tuple[int, int]]:
    """Count, for each parameter on meta by id, the tables it is in and the references to it."""
    counts: dict[int, tuple[int, int]] = {}
    for part in module.modules():
        for parameter in parameters_of(part).values():
            if parameter is not None and parameter.is_meta:
                places = counts.get(id(parameter), (0, 0))[0]
                counts[id(parameter)] = (places + 1, sys.getrefcount(parameter))
    return counts


def _holders(wanted: set[int]) -> list[tuple[Optimizer, int]]:
    kinds, classes = {id(Optimizer)}, [Optimizer]
    while classes:
        below = classes.pop().__subclasses__()
        kinds.update(map(id, below))
        classes.extend(below)
    holders: list[tuple[Optimizer, int]] = []
    objects = gc.get_objects()
    # In C, without a Python step for each: there may be a million.
    for optimizer in compress(objects, map(kinds.__contains__, map(id, map(type, objects)))):
        groups = vars(optimizer).get("param_groups", ())
        count = sum(id(parameter) in wanted for group in groups for parameter in group["params"])
        if count:
            holders.append((optimizer, count))
    return holders
