import pytest

from dryfit.settings.devices import LEAST_BYTES, MOST_BYTES, device_names, parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.text import parse_bytes

# What nvidia-smi calls the total, in MiB, of devices as they come (ECC on where it is by default): public listings.
DRIVER_TOTAL_MIB = {
    "t4": 15360,
    "rtx3060": 12288,
    "rtx3090": 24576,
    "rtx4070": 12282,
    "rtx4090": 24564,
    "rtx5090": 32607,
    "a10": 23028,
    "a40": 46068,
    "a6000": 49140,
    "l4": 23034,
    "l40s": 46068,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100-80": 81559,
    "h100-nvl": 95830,
    "h200": 143771,
    "gh200": 97871,
    "b200": 183359,
}


@pytest.mark.parametrize("name", device_names())
def test_every_known_name_reads_as_itself(name):
    device = parse_device(name)
    assert (device.name, device.kind) == (name, DeviceKind.CUDA)
    assert 8 * 2**30 < device.capacity_bytes < 200 * 2**30
    assert (5, 0) <= device.capability <= (12, 1)


@pytest.mark.parametrize(("name", "total_mib"), DRIVER_TOTAL_MIB.items())
def test_a_device_has_a_little_less_than_its_driver_says(name, total_mib):
    kept_mib = total_mib - parse_device(name).capacity_bytes / 2**20
    assert 0.3 * 1024 < kept_mib < 1.3 * 1024


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("geforce-rtx_2080 Ti", "rtx2080ti"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("A100-80", "a100-80"),
        ("a100-80gb", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Quadro RTX 6000", "quadro-rtx6000"),
        ("NVIDIA Quadro RTX 8000", "quadro-rtx8000"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("h100", "h100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("H100 NVL", "h100-nvl"),
        (" H200 ", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_spellings_of_people_and_drivers(text, name):
    assert parse_device(text) == parse_device(name)


@pytest.mark.parametrize(
    ("text", "kind", "size_bytes", "capability"),
    [
        ("24GiB", DeviceKind.CUDA, 24 * 2**30, (8, 0)),
        ("24 gib", DeviceKind.CUDA, 24 * 2**30, (8, 0)),
        ("80GB", DeviceKind.CUDA, 80 * 10**9, (8, 0)),
        ("3090GB", DeviceKind.CUDA, 3090 * 10**9, (8, 0)),
        ("1.5TiB", DeviceKind.CUDA, 3 * 2**39, (8, 0)),
        ("24GiB@8.9", DeviceKind.CUDA, 24 * 2**30, (8, 9)),
        ("24GiB @ 12.0", DeviceKind.CUDA, 24 * 2**30, (12, 0)),
        ("cpu:16GiB", DeviceKind.CPU, 16 * 2**30, (8, 0)),
        ("CPU: 16GiB", DeviceKind.CPU, 16 * 2**30, (8, 0)),
        ("64MiB", DeviceKind.CUDA, LEAST_BYTES, (8, 0)),
        ("1024TiB", DeviceKind.CUDA, MOST_BYTES, (8, 0)),
    ],
)
def test_amounts(text, kind, size_bytes, capability):
    device = parse_device(text)
    assert (device.name, device.kind, device.capacity_bytes, device.capability) == (text, kind, size_bytes, capability)


@pytest.mark.parametrize(
    ("text", "found", "way_out"),
    [
        ("a100", "different memories", "a100-40 or a100-80"),
        ("NVIDIA V100", "different memories", "v100-16 or v100-32"),
        ("rtx4091", "no device of that name", "did you mean rtx4090"),
        ("a1000-80", "no device of that name", "did you mean a100-80"),
        ("a10080x", "no device of that name", "a100-80"),
        ("hopper", "no device of that name", "known: p100"),
        ("", "no device of that name", "known: p100"),
        ("rtx4060ti", "no device of that name", "rtx4060ti-16"),
        ("h200@9.0", "h200 has its own capability", "write h200"),
        ("h201@9.0", "no device of that name", "did you mean h200"),
        ("mps", "devices of Apple are not simulated", "rtx4090"),
        ("M3 Max", "devices of Apple", "24GiB"),
        ("mi300x", "devices of AMD", "24GiB"),
        ("RX 7900 XTX", "devices of AMD", "24GiB"),
        ("tpu-v5e", "devices of Google", "24GiB"),
        ("cpu", "no amount", "cpu:16GiB"),
        ("cpu:", "no amount", "cpu:16GiB"),
        ("cpu:much", "'much' is no amount", "with its unit"),
        ("cpu:16GiB@8.0", "is no amount", "with its unit"),
        ("24", "'24' is no amount", "with its unit: 24GiB"),
        ("0GiB", "'0GiB' is no amount", "above zero"),
        ("-5GiB", "'-5GiB' is no amount", "above zero"),
        ("1e3GiB", "is no amount", "with its unit"),
        ("9" * 400 + "GiB", "is no amount", "with its unit"),
        ("63MiB", "no device has 63MiB", "64MiB to 1024TiB"),
        ("1B", "no device has 1B", "64MiB to 1024TiB"),
        ("cpu:1KiB", "no device has 1KiB", "64MiB to 1024TiB"),
        ("1025TiB", "no device has 1025TiB", "64MiB to 1024TiB"),
        ("9" * 30 + "TiB", "no device has", "64MiB to 1024TiB"),
        ("24GiB@", "is no compute capability", "leave it out"),
        ("24GiB@ada", "is no compute capability", "leave it out"),
        ("24GiB@8.5", "'8.5' is no compute capability", "8.6"),
        ("24GiB@0.0", "is no compute capability", "8.9"),
    ],
)
def test_what_is_no_device_says_what_is(text, found, way_out):
    with pytest.raises(ConfigError) as caught:
        parse_device(text)
    error = caught.value
    assert all((error.doing, error.found, error.allowed, error.hint))
    assert found in error.found
    assert way_out in f"{error.allowed}; {error.hint}"


def test_amounts_are_exact():
    assert parse_bytes("0.1GB") == 10**8
    assert parse_bytes("16383.999TiB") == 16383999 * 2**40 // 1000
