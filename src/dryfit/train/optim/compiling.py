"""Compile a trial's layers by ``torch.compile``, and go on without where torch cannot.

What was compiled torch keeps in a folder of the machine (``TORCHINDUCTOR_CACHE_DIR``), and trials that follow find it
there.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dryfit.core.errors import DryfitError
from dryfit.core.wire import Note
from dryfit.train.run import TrialParts

# Random numbers are torch's own: dropout leaves out what it would without being compiled. Compilers run in this
# process: it has no further ones that could outlive it.
_OPTIONS: Final = {"fallback_random": True, "compile_threads": 1}
_SAID_CHARS: Final = 300


@final
class CompiledLayers:
    """The layers of a model, each compiled by itself: those that are alike share their code, whatever a batch's size.

    Only what runs in :meth:`gradients` is compiled code: a validation has too many shapes for what it takes.

    Args:
        model: On its device, ready to train. Its layers are changed in place; names of parameters are not.
        layers: Those of its modules to compile; none: it trains as it is.
        note: Told when they are not compiled any more, and why.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], note: Callable[[str], None]) -> None:
        self._model = model
        self._note = note
        self.on = bool(layers)
        for layer in layers:
            layer.compile(dynamic=True, options=_OPTIONS)
        if layers:
            torch.compiler.set_stance("force_eager")

    def gradients(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute a batch's gradients; where that fails with compiled layers, once more without, and so ever after.

        What torch cannot compile it finds out in the first forward or backward pass of each shape. Whether it was to
        blame, the second try tells: an error of the model's own comes again.

        Args:
            compute: Adds gradients to those of the model, which has none, and returns the loss.

        Raises:
            OutOfMemoryError: At once: it is no fault of the compiler's, and the second try would need more.
            DryfitError: At once: the batch or the model's outputs are wrong.
        """
        if not self.on:
            return compute()
        before = _random_state()
        try:
            with torch.compiler.set_stance("default"):
                return compute()
        except (DryfitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # compilers raise whatever they like
            said = f"{type(error).__name__}: {error}".splitlines()[0][:_SAID_CHARS]
        self.on = False
        for parameter in self._model.parameters():
            parameter.grad = None
        _set_random_state(before)
        loss = compute()
        self._note(f"the layers are not compiled from here on: {said}")
        return loss


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's pretrained parts, as transformers marks them."""
    return [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]


def compiled_layers(parts: TrialParts) -> CompiledLayers:
    """Compile a run's layers, if its plan says so.

    Not with activations on the host: their hooks stand before and behind each layer, and compiled code has no place
    for them.
    """

    def note(text: str) -> None:
        parts.channel.send(Note(text=text))

    plan, model = parts.request.plan, parts.model
    layers: Sequence[nn.Module] = ()
    if plan.compiled and not plan.offload_activations:
        layers = layers_of(model)
        if not layers:
            note(f"nothing is compiled: {type(model).__name__} has no layers that transformers marks as such")
    return CompiledLayers(model, layers, note)


def _random_state() -> list[torch.Tensor]:
    """Return the states of the generators that a step draws from: the CPU's, and its device's if there is one."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
