"""What of the nodes trials get, and how many of them there are side by side."""

from functools import partial

import pytest

import instant
from dryfit.processes.node import DeviceFacts, NodeFacts
from dryfit.settings.errors import MachineError
from dryfit.settings.memory_terms import DeviceKind
from dryfit.study.context import choose_place, devices_without_torch, most_on_node, parallelism


def test_where_trials_run() -> None:
    assert devices_without_torch("auto", 0) == (DeviceKind.CPU, 1)
    assert devices_without_torch("auto", 2) == (DeviceKind.CUDA, 2)
    assert devices_without_torch("cpu", 2) == (DeviceKind.CPU, 1)
    assert devices_without_torch("cuda", 1) == (DeviceKind.CUDA, 1)
    with pytest.raises(MachineError, match="nvidia-smi finds no GPU"):
        devices_without_torch("cuda", 0)


@pytest.mark.parametrize(
    ("device", "cores", "execution", "most", "reason"),
    [
        (DeviceKind.CPU, 16, {}, 4, "16 core(s), 4 for each trial"),
        (DeviceKind.CPU, 16, {"tp": 2}, 2, "16 core(s), 4 for each of a trial's 2 processes"),
        (DeviceKind.CPU, 16, {"dp": 8}, 1, "16 core(s), 4 for each of a trial's 8 processes"),
        (DeviceKind.CPU, 16, {"tp": 2, "threads": 1, "loader_workers": 1}, 4, "16 core(s), 2 for each of a trial's 2"),
        (DeviceKind.CPU, 3, {}, 1, "3 core(s)"),
        (DeviceKind.CPU, 4096, {"threads": 1}, 256, ""),
        (DeviceKind.CUDA, 2, {}, 8, "2 core(s), 2 for each trial"),
        (DeviceKind.CUDA, 2, {"tp": 3}, 2, "2 core(s), 2 for each of a trial's 3 processes"),
        (DeviceKind.CUDA, 32, {"tp": 4}, 4, "32 core(s), 2 for each of a trial's 4 processes"),
    ],
)
def test_how_many_trials_the_cores_and_devices_allow(
    device: DeviceKind, cores: int, execution: dict[str, int], most: int, reason: str
) -> None:
    config = instant.config(execution=execution, runtime={"parallel": "auto"})
    nodes = instant.one_node(cores, *map(DeviceFacts, "01234567"))
    allowed = parallelism(config, device, nodes.values())
    assert allowed.most == most and allowed.reason.startswith(reason)
    fixed = instant.config(execution=execution, runtime={"parallel": 3})
    assert parallelism(fixed, device, nodes.values()).most == 3, "trials are asked for, not processes"


def test_each_node_has_as_many_trials_as_it_has_cores_and_devices_for() -> None:
    config = instant.config(runtime={"parallel": "auto"})
    nodes = {"n1": NodeFacts(8, 2**30), "n2": NodeFacts(2, 2**30), "n3": NodeFacts(4, 2**30, (DeviceFacts("0"),) * 3)}
    assert parallelism(config, DeviceKind.CPU, nodes.values()).most == 2 + 1 + 1
    assert [most_on_node(config, DeviceKind.CPU, nodes, name) for name in nodes] == [2, 1, 1]
    assert [most_on_node(config, DeviceKind.CUDA, nodes, name) for name in nodes] == [4, 1, 3]
    fixed = instant.config(runtime={"parallel": 4})
    assert parallelism(fixed, DeviceKind.CPU, nodes.values()).most == 4
    assert [most_on_node(fixed, DeviceKind.CPU, nodes, name) for name in nodes] == [2, 2, 2]


def test_a_group_is_chosen_as_a_device_is() -> None:
    nodes = {
        "n1": NodeFacts(1, 1, tuple(map(DeviceFacts, ["GPU-a", "GPU-b", "GPU-c"]))),
        "n2": NodeFacts(1, 1, tuple(map(DeviceFacts, ["0", "1"]))),
    }
    on_cuda = partial(choose_place, DeviceKind.CUDA, nodes)
    assert on_cuda(processes=1) == "n1/GPU-a"
    assert on_cuda(["n1/GPU-a", "n1/cpu"], processes=1) == "n1/GPU-b"
    assert on_cuda(processes=2) == "n1/GPU-a,n1/GPU-b"
    assert on_cuda(["n1/GPU-a,n1/GPU-b"], processes=2) == "n2/0,n2/1", "a group is on one node"
    assert on_cuda(["n1/GPU-a,n1/GPU-b", "n2/0,n2/1"], processes=2) == "n1/GPU-a,n1/GPU-b"
    with pytest.raises(MachineError, match="each of a trial's 4 processes"):
        on_cuda(processes=4)
    assert choose_place(DeviceKind.CPU, nodes, processes=6) == "n1/cpu"
    assert choose_place(DeviceKind.CPU, nodes, ["n1/cpu"], processes=6) == "n2/cpu"
