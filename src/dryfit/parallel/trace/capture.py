"""Trace a module's forward pass by ``torch.export`` on the meta device; nothing is computed."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from dryfit.core.errors import TraceError
from dryfit.core.private_names import require
from dryfit.core.sharding.shard_plan import ModuleShard
from dryfit.meta.construction.walk import Slot, SlotKind, replaced
from dryfit.meta.private_apis.torch_capture import CAPTURE, TorchDynamoException
from dryfit.meta.private_apis.torch_modes import MODES
from dryfit.meta.private_apis.torch_modules import MODULES
from dryfit.meta.private_apis.torch_operators import OPERATORS
from dryfit.parallel.trace.graph import Graph
from dryfit.parallel.trace.marks import modules_marked, numbers_of, numbers_probed, paths
from dryfit.parallel.trace.reading import read_program

Inputs = Callable[[int, int], Mapping[str, Any]]
"""Returns a module's keyword arguments, on the meta device, given rows and length."""

# What a model's own code, or torch while tracing it, may raise.
_FOREIGN: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    TorchDynamoException,
)

SMALL: Final = (3, 7)
OTHER: Final = (5, 11)
"""Rows and length that divide no usual number of heads or features, and not each other."""


class CannotFollow(Exception):  # noqa: N818 - callers make their own error of it
    """A module's code, or torch while tracing it, raised an error.

    Args:
        module: Path of the innermost module that was running; empty for the model itself.
        text: The error.
    """

    def __init__(self, module: str, text: str) -> None:
        super().__init__(f"in {module or 'the model itself'}: {text}")
        self.module = module
        self.text = text


def capture(module: nn.Module, inputs: Inputs | None = None, size: tuple[int, int] = SMALL) -> Graph:
    """Trace a module's forward pass, without dropout.

    ``torch.export`` first runs the code in Python; where that fails, it is called again in strict mode, as a compiler,
    which gives no origins of numbers.

    Args:
        module: A module whose parameters may be on the meta device.
        inputs: Returns its inputs; None: tokens and a mask.
        size: Rows and length.

    Raises:
        TraceError: Both ways failed.
        LibraryError: torch's graphs are not those that dryfit reads.
    """
    require(f"following {type(module).__name__} to shard it", CAPTURE, MODES, MODULES, OPERATORS)
    problems: list[str] = []
    for strict in (False, True):
        try:
            return follow(module, inputs, size, strict=strict)
        except CannotFollow as no:
            problems.append(str(no))
    raise TraceError(
        f"following {type(module).__name__} to shard it",
        f"torch.export gave up {problems[0]}; as a compiler, {problems[1]}",
        "a forward pass that runs on tensors without values",
        "train it on one device, or give inputs that its code can be followed with",
    )


def follow(
    module: nn.Module,
    inputs: Inputs | None,
    size: tuple[int, int],
    *,
    strict: bool = False,
    shards: Mapping[str, ModuleShard] | None = None,
    degree: int = 1,
) -> Graph:
    """Trace a module's forward pass in one of two ways.

    Args:
        module: A module, or one rank's shard of it.
        inputs: Returns its inputs.
        size: Rows and length.
        strict: Trace as a compiler does.
        shards: For a rank's shard: the boundaries that change the shapes of inputs and outputs.
        degree: Number of ranks.

    Raises:
        CannotFollow: Tracing failed.
    """
    made = dict((inputs or token_inputs(module))(*size))
    with _ready(module, shards or {}, degree, probed=not strict) as running:
        try:
            program = torch.export.export(module, (), made, strict=strict)
        except _FOREIGN as error:
            raise CannotFollow(
                running[-1] if running else "", f"{type(error).__name__}: {_first_line(error)}"
            ) from error
    numbers = {path: numbers_of(part) for path, part in paths(module)}
    return read_program(program, module, size[0] * size[1], numbers)


def token_inputs(module: nn.Module) -> Inputs:
    """Return the usual inputs of a text model: tokens and a mask."""
    config = getattr(module, "config", None)

    def made(rows: int, length: int) -> dict[str, Any]:
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
        if hasattr(config, "use_cache"):
            given["use_cache"] = False
        return given

    return made


@contextmanager
def _ready(module: nn.Module, shards: Mapping[str, ModuleShard], degree: int, *, probed: bool) -> Iterator[list[str]]:
    was_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # A model's warnings about tracing do not concern the user who plans.
            warnings.simplefilter("ignore")
            stack.enter_context(replaced(module, _without_value))
            running = stack.enter_context(modules_marked(module, shards, degree))
            stack.enter_context(numbers_probed(module) if probed else nullcontext())
            yield running
    finally:
        for part in was_training:
            part.training = True


def _without_value(slot: Slot) -> torch.Tensor | None:
    """Return a parameter or buffer on the meta device; None for what is there already, and for constants."""
    if slot.kind is SlotKind.ATTRIBUTE or slot.tensor.device.type == "meta":
        return None
    return torch.empty_like(slot.tensor, device="meta")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"
