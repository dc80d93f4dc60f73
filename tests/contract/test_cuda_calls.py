"""torch.cuda and torch.accelerator on a virtual GPU: every public function is there, as it is called."""

from typing import Any

import pytest

from dryfit.settings.devices import device_names, driver_name, parse_device
from rehearsed import facts_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return facts_of("cuda_calls.py")


def test_no_function_changes_its_signature(facts: dict[str, Any]) -> None:
    assert facts["changed"] == {}


def test_every_public_function_takes_its_arguments_by_name(facts: dict[str, Any]) -> None:
    assert facts["failed"] == []
    assert facts["called"] > 150


def test_memory_that_is_no_tensor_counts_until_it_is_freed(facts: dict[str, Any]) -> None:
    assert facts["held"] == [0, 2**20, 0]


def test_a_stream_is_the_current_one_inside_of_its_block(facts: dict[str, Any]) -> None:
    assert facts["current"] == [True, False, True]


def test_old_types_name_the_device(facts: dict[str, Any]) -> None:
    assert facts["typed"] == ["torch.cuda.FloatTensor", "torch.float16", "cuda:0"]


def test_random_numbers_go_on_from_a_state_of_a_device(facts: dict[str, Any]) -> None:
    assert facts["state"] == [16, 11]


def test_the_device_has_the_name_that_the_driver_gives_it(facts: dict[str, Any]) -> None:
    assert facts["name"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "name", [name for name in device_names() if name != "rtx4060ti-16"]
)  # there is one of 8 GB too
def test_a_device_is_found_by_its_drivers_name(name: str) -> None:
    assert parse_device(driver_name(name)).name == name
