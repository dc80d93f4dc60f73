"""What loading code is known to leave behind is noticed, and nothing is noticed where nothing was changed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_tie_weights

from dryfit.meta.sanity import check_process
from dryfit.processes.child import describe_fault
from dryfit.processes.failures import classify
from dryfit.settings.errors import Evidence, FailureKind, PoisonedError
from dryfit.settings.jobs import ChildResult


@pytest.fixture(autouse=True)
def healed() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    check_process("after the test")


def test_an_untouched_process_is_in_order_and_no_random_number_is_used_up() -> None:
    before = torch.random.get_rng_state()
    check_process("looking")
    assert torch.equal(torch.random.get_rng_state(), before)


SWITCHES: dict[str, Callable[[], Any]] = {
    "the default dtype is torch.bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "a new torch.nn.Linear has no memory": lambda: torch.set_default_device("meta"),
    "the default device is meta": lambda: torch.set_default_device("meta"),
    "gradients are switched off": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("said", SWITCHES)
def test_a_switch_that_stayed_is_told(said: str) -> None:
    SWITCHES[said]()
    with pytest.raises(PoisonedError, match=said) as caught:
        check_process("starting")
    failure = classify(Evidence(exit_code=1), ChildResult(fault=describe_fault(caught.value)))
    assert failure.kind is FailureKind.POISONED
    assert said in failure.sentence


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (nn.Module, "register_parameter", "torch.nn.modules.module.Module.register_parameter is .*patched"),
        (PreTrainedModel, "tie_weights", "transformers.modeling_utils.PreTrainedModel.tie_weights is .*patched"),
        (torch, "linspace", "torch.linspace is .*patched"),
        (nn.init, "kaiming_uniform_", "torch.nn.init.kaiming_uniform_ is .*patched"),
    ],
)
def test_a_function_that_was_replaced_is_told_with_its_replacement(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, said: str
) -> None:
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)
    with pytest.raises(PoisonedError, match=rf"{said} \(.*test_sanity\.py:\d+\)"):
        check_process("starting")


@pytest.mark.parametrize("swap", [guard_torch_init_functions, no_tie_weights])
def test_what_transformers_swaps_while_it_loads_is_told_if_it_stays(swap: Callable[[], Any]) -> None:
    """Two loads that overlap leave the first one's swap behind: its way back is never taken."""
    with swap():
        with pytest.raises(PoisonedError, match="transformers.initialization|empty_func"):
            check_process("starting")
    check_process("afterwards")
