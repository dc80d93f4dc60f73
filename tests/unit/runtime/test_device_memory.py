"""What torch says of a device's memory is read as it is meant."""

import pytest

from dryfit.processes.evidence import DeviceMemory, known_device_memory, memory_text, parse_oom_message
from dryfit.settings.errors import ChildFault, Evidence

GIB, MIB = 2**30, 2**20

ALONE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 242.69 MiB is "
    "free. Including non-PyTorch memory, this process has 23.26 GiB memory in use. Of the allocated memory 22.19 GiB "
    "is allocated by PyTorch, and 656.69 MiB is reserved by PyTorch but unallocated."
)
IN_A_CONTAINER = (
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 47.53 GiB of which 16.88 MiB is "
    "free. Process 3652628 has 47.51 GiB memory in use. Of the allocated memory 47.14 GiB is allocated by PyTorch, and "
    "57.79 MiB is reserved by PyTorch but unallocated."
)
WITHOUT_NVML = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 0 bytes is "
    "free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 15.90 MiB is reserved by PyTorch but "
    "unallocated."
)
FENCED = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 18.00 GiB is "
    "free. Including non-PyTorch memory, this process has 6.00 GiB memory in use. 6.00 GiB allowed; Of the allocated "
    "memory 5.20 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "own_gib", "others_gib"),
    [(ALONE, 23.26, 0.0), (IN_A_CONTAINER, 47.51, 0.0), (WITHOUT_NVML, 4.02, 18.98), (FENCED, 6.0, 0.0)],
)
def test_whose_memory_it_is(text, own_gib, others_gib):
    found = parse_oom_message(text)
    assert found.own_bytes is not None and found.others_bytes is not None
    assert found.own_bytes / GIB == pytest.approx(own_gib, abs=0.01)
    assert found.others_bytes / GIB == pytest.approx(others_gib, abs=0.01)


def test_what_was_asked_for_and_what_was_free():
    found = parse_oom_message(ALONE)
    assert (found.asked_bytes, found.free_bytes) == (20 * MIB, pytest.approx(242.69 * MIB, rel=1e-6))


@pytest.mark.parametrize("text", ["", "CUDA out of memory", "Tried to allocate nothing. total capacity of x GiB"])
def test_any_other_text_says_nothing(text):
    assert parse_oom_message(text) == DeviceMemory()
    assert memory_text(parse_oom_message(text)) == ""


def test_what_was_said_comes_before_what_was_measured():
    fault = ChildFault(("torch.OutOfMemoryError",), "", ALONE)
    measured = Evidence(device_total_bytes=1, device_free_bytes=2, peak_bytes=3, neighbour_bytes=4, planned_bytes=5)
    found = known_device_memory(measured, fault)
    assert (found.total_bytes, found.planned_bytes, found.others_bytes) == (parse_oom_message(ALONE).total_bytes, 5, 4)
    assert known_device_memory(measured, None) == DeviceMemory(None, 1, 2, 3, 4, 5)
