"""The table of published rates: every known GPU has its row, and no row contradicts its architecture."""

import pytest

from dryfit.settings.devices import ProductPrecision, device_names, device_rates, parse_device
from dryfit.settings.memory_terms import DeviceSpec


@pytest.mark.parametrize("name", device_names())
def test_every_known_device_has_rates_that_fit_its_architecture(name: str):
    device = parse_device(name)
    rates = device_rates(device)
    assert rates.source
    assert 100 <= rates.bandwidth_gb_s <= 8000
    assert (rates.half_tflops is not None) == (device.capability >= (7, 0))
    assert (rates.tf32_tflops is not None) == (device.capability >= (8, 0))
    fp32, tf32, half = (
        rates.flops_per_s(precision, device.capability)
        for precision in (ProductPrecision.FP32, ProductPrecision.TF32, ProductPrecision.FP16)
    )
    assert fp32 <= tf32 <= half
    if rates.tf32_tflops is not None:
        assert half == pytest.approx(2 * tf32, rel=0.03)


def test_bfloat16_is_fp32_before_its_tensor_cores():
    volta, ampere = parse_device("v100-32"), parse_device("a100-80")
    old, new = device_rates(volta), device_rates(ampere)
    assert old.flops_per_s(ProductPrecision.BF16, volta.capability) == old.flops_per_s(
        ProductPrecision.FP32, volta.capability
    )
    assert new.flops_per_s(ProductPrecision.BF16, ampere.capability) == 312e12


def test_a_drivers_name_has_rates_and_an_amount_has_none():
    driver = DeviceSpec(name="NVIDIA A100-SXM4-80GB", capacity_bytes=85 * 10**9)
    rates = device_rates(driver)
    assert rates.bytes_per_s == 2039e9
    assert device_rates(parse_device("24GiB")) is None
    assert device_rates(parse_device("cpu:16GiB")) is None
    assert device_rates(DeviceSpec(name="a card of tomorrow", capacity_bytes=10**10)) is None
