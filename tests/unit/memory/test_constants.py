import pytest

from dryfit.gpu.constants import (
    CALIBRATION_FILE,
    Calibration,
    communicator_bytes,
    device_constants,
    margin_bytes,
    read_calibrations,
    write_calibration,
)
from dryfit.settings.memory_terms import Confidence, DeviceKind, DeviceSpec

MIB = 2**20
TORCH = "2.13.0+cu130"


def device(name="NVIDIA H200", capability=(9, 0), kind=DeviceKind.CUDA):
    return DeviceSpec(name=name, kind=kind, capacity_bytes=24 * 2**30, capability=capability)


def measured(name="NVIDIA H200", capability=(9, 0), torch=TORCH, context=600 * MIB):
    return Calibration(
        device_name=name,
        capability=capability,
        torch=torch,
        context_bytes=context,
        workspace_bytes=32 * MIB,
        error_median=0.005,
        error_p95=0.02,
        runs=60,
    )


@pytest.mark.parametrize(
    "capability, workspace_bytes",
    [
        ((7, 0), 8519680),
        ((8, 0), 8519680),
        ((8, 9), 8519680),
        ((9, 0), 32 * MIB),
        ((10, 0), 32 * MIB),
        ((12, 0), 32 * MIB),
    ],
)
def test_the_workspace_is_what_cublas_is_given(capability, workspace_bytes):
    assert device_constants(device(capability=capability), TORCH).workspace_bytes == workspace_bytes


def test_without_calibration_the_published_sizes_are_exceeded():
    for capability in ((7, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        found = device_constants(device(capability=capability), TORCH)
        assert found.confidence is Confidence.UNCALIBRATED
        assert 426 * MIB < found.overhead_bytes <= 1343 * MIB
    assert device_constants(device(capability=(6, 1)), TORCH).overhead_bytes == 1343 * MIB


def test_the_same_device_and_minor_version_is_calibrated():
    found = device_constants(device(), "2.13.1", [measured()])
    assert (found.confidence, found.overhead_bytes, found.error_p95) == (Confidence.CALIBRATED, 600 * MIB, 0.02)


def test_a_relative_is_of_the_family_and_the_largest_counts():
    others = [measured(name="NVIDIA H100 PCIe"), measured(name="NVIDIA GH200", context=640 * MIB)]
    found = device_constants(device(), TORCH, others)
    assert (found.confidence, found.overhead_bytes) == (Confidence.FAMILY, 640 * MIB)
    older = device_constants(device(), TORCH, [measured(torch="2.12.0")])
    assert older.confidence is Confidence.FAMILY
    assert device_constants(device(capability=(8, 0)), TORCH, others).confidence is Confidence.UNCALIBRATED


def test_the_cpu_has_a_process_and_no_workspace():
    found = device_constants(device(kind=DeviceKind.CPU), TORCH, [measured()])
    assert found.workspace_bytes == 0
    assert 400 * MIB < found.overhead_bytes < 700 * MIB
    assert found.confidence is Confidence.UNCALIBRATED


@pytest.mark.parametrize(
    "kind, min_cap, margin",
    [
        (DeviceKind.CUDA, 10 * MIB, 300 * MIB),
        (DeviceKind.CUDA, 20000 * MIB, 400 * MIB),
        (DeviceKind.CPU, 10 * MIB, 64 * MIB),
        (DeviceKind.CPU, 2000 * MIB, 100 * MIB),
    ],
)
def test_the_margin_is_a_share_and_at_least_a_floor(kind, min_cap, margin):
    assert margin_bytes(kind, min_cap) == margin


def test_calibrations_are_kept_one_a_device_and_minor_version(tmp_path):
    folder = tmp_path / "new"
    assert read_calibrations(folder) == ()
    write_calibration(folder, measured())
    write_calibration(folder, measured(name="Tesla T4", capability=(7, 5)))
    write_calibration(folder, measured(torch="2.13.4", context=1))
    write_calibration(folder, measured(torch="2.14.0", context=2))
    kept = [(found.device_name, found.torch, found.context_bytes) for found in read_calibrations(folder)]
    assert kept == [("Tesla T4", TORCH, 600 * MIB), ("NVIDIA H200", "2.13.4", 1), ("NVIDIA H200", "2.14.0", 2)]


@pytest.mark.parametrize("text", ["", "[]", '{"v": 2, "devices": []}', '{"devices": [{"device_name": "x"}]}'])
def test_a_file_of_another_version_is_as_good_as_none(tmp_path, text):
    (tmp_path / CALIBRATION_FILE).write_text(text)
    assert read_calibrations(tmp_path) == ()


def test_communicators_take_what_was_measured_or_the_larger_end() -> None:
    def of(name: str, ranks: int) -> int:
        return communicator_bytes(DeviceSpec(name=name, capacity_bytes=80 * 2**30), ranks)

    # Four A100 with NVLink: 544 MiB for a group of two; of four, 688 MiB for rank 0, which has three connections of
    # four (NVIDIA/nccl#964).
    assert of("a100-80", 2) == 544 * MIB
    assert of("a100-80", 4) == 688 * MIB + 24 * 6 * MIB
    assert of("a100-80", 8) == of("a100-80", 4)
    assert of("rtx4090", 2) < of("rtx4090", 8) < 100 * MIB
    one = device_constants(device(), TORCH)
    two = one.communicating(device(), 2, 2)
    assert (one.nccl_bytes, one.communicating(device(), 1, 1)) == (0, one)
    assert two.overhead_bytes - one.overhead_bytes == two.nccl_bytes == 2 * communicator_bytes(device(), 2)
    assert two.communicating(device(), 2, 1).overhead_bytes == one.overhead_bytes + two.nccl_bytes // 2
