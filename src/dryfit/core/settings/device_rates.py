"""Published peak arithmetic rates and memory bandwidth of the known GPUs.

What NVIDIA publishes, not what was measured: dense (without sparsity) and at boost clock, which no long run keeps, so
a time that is computed from them is one that the device cannot beat. A rate of half-precision products is the one with
accumulation in fp32, which is PyTorch's default; on GeForce it is half of the one with accumulation in fp16. Where a
name stands for several forms (SXM and PCIe), the figures are the fastest form's. A device that is only an amount of
memory has no rates.
"""

from dataclasses import dataclass
from enum import StrEnum

from dryfit.core.errors import ConfigError
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.settings.known_devices import parse_device

EIGHT_BIT_SPEEDUP = 4.0
"""Most by which 8-bit products are faster than half-precision ones: GeForce; data centre GPUs have 2."""

BF16_CAPABILITY = (8, 0)
"""First compute capability whose tensor cores take bfloat16; older devices compute it in fp32."""


class ProductPrecision(StrEnum):
    """What a product of matrices is computed in."""

    FP32 = "fp32"
    """And fp64, of which no device has a higher rate."""
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    EIGHT_BIT = "8-bit"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Published peaks of one GPU.

    Attributes:
        fp32_tflops: Outside of tensor cores.
        tf32_tflops: Of tensor cores; None where they do not take it.
        half_tflops: Of tensor cores in fp16, and in bf16 from compute capability 8.0; None where there are none.
        bandwidth_gb_s: Of its memory, in 1e9 bytes a second.
        source: Where the figures are published.
    """

    fp32_tflops: float
    tf32_tflops: float | None
    half_tflops: float | None
    bandwidth_gb_s: float
    source: str

    def flops_per_s(self, precision: ProductPrecision, capability: tuple[int, int]) -> float:
        """Return the peak rate of products in a precision; that of fp32 where no tensor core takes it."""
        half = self.half_tflops or self.fp32_tflops
        match precision:
            case ProductPrecision.FP32:
                tflops = self.fp32_tflops
            case ProductPrecision.TF32:
                tflops = self.tf32_tflops or self.fp32_tflops
            case ProductPrecision.FP16:
                tflops = half
            case ProductPrecision.BF16:
                tflops = half if capability >= BF16_CAPABILITY else self.fp32_tflops
            case ProductPrecision.EIGHT_BIT:
                tflops = EIGHT_BIT_SPEEDUP * half
        return tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Peak bandwidth of its memory."""
        return self.bandwidth_gb_s * 1e9


_PASCAL = "NVIDIA Tesla P100 white paper (SXM2)"
_VOLTA = "NVIDIA V100 data sheet (SXM2)"
_TURING = "NVIDIA Turing architecture white paper (reference clocks)"
_GA10X = "NVIDIA Ampere GA102 architecture white paper"
_ADA = "NVIDIA Ada architecture white paper"
_H100 = "NVIDIA H100 data sheet (SXM5), H100 architecture white paper"

# fp32, TF32, fp16/bf16 TFLOP/s, GB/s. Where a data sheet gives only figures with sparsity, they are halved.
_RATES: dict[str, DeviceRates] = {
    "p100": DeviceRates(10.6, None, None, 732, _PASCAL),
    "v100-16": DeviceRates(15.7, None, 125.0, 900, _VOLTA),
    "v100-32": DeviceRates(15.7, None, 125.0, 900, _VOLTA),
    "t4": DeviceRates(8.1, None, 65.0, 320, "NVIDIA T4 data sheet"),
    "rtx2080ti": DeviceRates(14.2, None, 56.9, 616, "NVIDIA Turing architecture white paper (Founders Edition)"),
    "titan-rtx": DeviceRates(16.3, None, 130.5, 672, "NVIDIA TITAN RTX page"),
    "quadro-rtx6000": DeviceRates(16.3, None, 130.5, 672, _TURING),
    "quadro-rtx8000": DeviceRates(16.3, None, 130.5, 672, _TURING),
    # 28 SMs at 1.777 GHz: a GeForce GA10x SM does 256 fp32 and 512 half-precision operations a cycle.
    "rtx3060": DeviceRates(12.7, 12.7, 25.5, 360, f"{_GA10X} (per SM), NVIDIA's RTX 3060 page (SMs, clock)"),
    "rtx3080": DeviceRates(29.8, 29.8, 59.5, 760, _GA10X),
    "rtx3090": DeviceRates(35.6, 35.6, 71.0, 936, _GA10X),
    "rtx4060ti-16": DeviceRates(22.1, 22.1, 44.1, 288, f"{_ADA} (per SM), NVIDIA's RTX 4060 Ti page (SMs, clock)"),
    "rtx4070": DeviceRates(29.1, 29.1, 58.3, 504, f"{_ADA} (per SM), NVIDIA's RTX 4070 page (SMs, clock)"),
    "rtx4080": DeviceRates(48.7, 48.7, 97.5, 716.8, _ADA),
    "rtx4090": DeviceRates(82.6, 82.6, 165.2, 1008, _ADA),
    "rtx5090": DeviceRates(104.8, 104.8, 209.5, 1792, "NVIDIA RTX Blackwell architecture white paper"),
    "a10": DeviceRates(31.2, 62.5, 125.0, 600, "NVIDIA A10 data sheet"),
    "a10g": DeviceRates(35.0, 35.0, 70.0, 600, "NVIDIA A10G data sheet"),
    "a30": DeviceRates(10.3, 82.0, 165.0, 933, "NVIDIA A30 data sheet"),
    "a40": DeviceRates(37.4, 74.8, 149.7, 696, "NVIDIA A40 data sheet"),
    "a5000": DeviceRates(27.8, 55.6, 111.1, 768, "NVIDIA RTX A5000 data sheet"),
    "a6000": DeviceRates(38.7, 77.4, 154.8, 768, _GA10X),
    "rtx6000ada": DeviceRates(91.1, 182.1, 364.2, 960, "NVIDIA RTX 6000 Ada data sheet"),
    "l4": DeviceRates(30.3, 60.0, 121.0, 300, "NVIDIA L4 data sheet"),
    "l40": DeviceRates(90.5, 90.5, 181.0, 864, "NVIDIA L40 data sheet"),
    "l40s": DeviceRates(91.6, 183.0, 362.0, 864, "NVIDIA L40S data sheet"),
    "a100-40": DeviceRates(19.5, 156.0, 312.0, 1555, "NVIDIA A100 data sheet"),
    "a100-80": DeviceRates(19.5, 156.0, 312.0, 2039, "NVIDIA A100 data sheet (SXM4)"),
    "h100-80": DeviceRates(66.9, 494.7, 989.4, 3352, _H100),
    "h100-nvl": DeviceRates(60.0, 417.5, 835.5, 3938, "NVIDIA H100 NVL product brief and data sheet"),
    "h200": DeviceRates(66.9, 494.7, 989.4, 4800, "NVIDIA H200 data sheet (SXM)"),
    "gh200": DeviceRates(66.9, 494.7, 989.4, 4000, "NVIDIA GH200 data sheet (96 GB)"),
    "b200": DeviceRates(80.0, 1100.0, 2250.0, 8000, "NVIDIA Blackwell architecture brief (HGX B200)"),
}


def device_rates(device: DeviceSpec) -> DeviceRates | None:
    """Return a GPU's published peaks; None for an amount of memory, the host, and a name that is not known."""
    if device.kind is not DeviceKind.CUDA:
        return None
    try:
        return _RATES.get(parse_device(device.name).name)
    except ConfigError:
        return None
