"""Know the steps of a script that changes its weights by hand, without any optimizer of torch.

Such a step begins where a weight is written to for the first time after a backward pass, outside of every module, and
ends where a model runs again, or a backward pass where there is none.
"""

from typing import Any

import torch

from dryfit.meta.private_apis.torch_modes import schema_of
from dryfit.meta.private_apis.torch_recording import running_node_number
from dryfit.virtual.recorder import ScriptRecorder
from dryfit.virtual.script.optimizer_steps import OptimizerSteps


class StepsByHand:
    """Counts them.

    Args:
        steps: Told of each.
        recorder: Knows which module runs, and what is a weight.
    """

    def __init__(self, steps: OptimizerSteps, recorder: ScriptRecorder) -> None:
        self._steps = steps
        self._recorder = recorder
        self._has_gradients = self._in_step = False

    def note(self, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
        """Look at an operator on the device that has just run."""
        if self._steps.has_optimizer:
            return
        if running_node_number() is not None:
            self._has_gradients = True
            if self._in_step:  # without a module
                self._end()
        elif self._in_step and self._recorder.in_module:
            self._end()
        elif self._has_gradients and schema_of(func).is_mutable and self._writes_weight(args[0]):
            self._has_gradients, self._in_step = False, True
            self._steps.begins_by_hand()

    def _end(self) -> None:
        self._in_step = False
        self._recorder.trains()
        self._steps.ends_by_hand()

    def _writes_weight(self, written: Any) -> bool:
        first = written[0] if isinstance(written, list | tuple) and written else written
        return isinstance(first, torch.Tensor) and not self._recorder.in_module and self._recorder.is_weight(first)
