"""Private names of torch that following a module by ``torch.export`` needs."""

from typing import Final

import torch

from dryfit.settings.private_names import PrivateNames, importing

with importing("torch", "following a module's forward pass"):
    from torch._dynamo.exc import TorchDynamoException
    from torch._ops import HigherOrderOperator

NAMES: Final = (
    # telling that torch cannot follow a model's code from a fault of ours; until: torch.export documents what
    # it raises
    "torch._dynamo.exc.TorchDynamoException",
    # finding the graphs within a graph: code with gradients or autocast switched; until: torch.export documents
    # the members of a graph
    "torch._ops.HigherOrderOperator",
)


def _misbehaves() -> str:
    if not issubclass(TorchDynamoException, Exception):
        return "torch._dynamo.exc.TorchDynamoException is no exception"
    if not isinstance(torch.ops.higher_order.wrap_with_set_grad_enabled, HigherOrderOperator):
        return "torch._ops.HigherOrderOperator is not the class of wrap_with_set_grad_enabled"
    return ""


CAPTURE: Final = PrivateNames("torch", NAMES, _misbehaves)
