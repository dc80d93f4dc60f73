"""GPUs by name, their memory and rates, and groups of devices that a trial runs on."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.older_python import StrEnum
from dryfit.settings.text import parse_bytes

# Known GPUs by name, with memory, compute capability and published rates, to plan for without having the device.
#
# Memory is what PyTorch calls ``total_memory``: what the driver leaves to programs, and what its out-of-memory errors
# print ("GPU 0 has a total capacity of 23.52 GiB"). The figures come from such messages in public reports, from Linux
# machines with ECC in its default state; the lowest common one was taken, so that a plan made for a name is valid on
# most machines with that GPU. They have two decimals of a GiB. Drivers differ by up to 0.2 GiB: newer ones keep more.
# ``nvidia-smi`` shows 0.3 to 1.1 GiB more than is usable: 24 564 MiB for an RTX 4090 (usable 24 084), 143 771 MiB for
# an H200 (143 073). On a machine that has the device, the driver's number is used, not this table.
#
# Rates are what NVIDIA publishes, not what was measured: dense (without sparsity) and at boost clock, which no long
# run keeps, so a time that is computed from them is one that the device cannot beat. A rate of half-precision
# products is the one with accumulation in fp32, which is PyTorch's default; on GeForce it is half of the one with
# accumulation in fp16. Where a name stands for several forms (SXM and PCIe), the figures are the fastest form's. A
# device that is only an amount of memory has no rates.


LEAST_BYTES = 64 * 2**20
"""Below this no CUDA context, and no model, fits."""

MOST_BYTES = 2**50

TF32_CAPABILITY = (8, 0)
"""The first compute capability with TF32 (CUDA C++ programming guide, arithmetic instructions)."""

AMOUNT_CAPABILITY = (8, 0)
"""Compute capability of a device that is only an amount: bf16 and flash attention, small cuBLAS workspaces."""

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
class KnownGpu:
    """A GPU by name, with its published peaks.

    Attributes:
        gib: Usable memory.
        capability: Compute capability, of NVIDIA's list of CUDA GPUs.
        name: The driver's name of its commonest form.
        fp32_tflops: Outside of tensor cores.
        tf32_tflops: Of tensor cores; None where they do not take it.
        half_tflops: Of tensor cores in fp16, and in bf16 from compute capability 8.0; None where there are none.
        bandwidth_gb_s: Of its memory, in 1e9 bytes a second.
        source: Where the figures are published.
    """

    gib: float
    capability: tuple[int, int]
    name: str
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

_RTX2080TI = "NVIDIA Turing architecture white paper (Founders Edition)"
_RTX3060 = f"{_GA10X} (per SM), NVIDIA's RTX 3060 page (SMs, clock)"
_RTX4060TI_16 = f"{_ADA} (per SM), NVIDIA's RTX 4060 Ti page (SMs, clock)"
_RTX4070 = f"{_ADA} (per SM), NVIDIA's RTX 4070 page (SMs, clock)"
_RTX5090 = "NVIDIA RTX Blackwell architecture white paper"
_RTX6000ADA = "NVIDIA RTX 6000 Ada data sheet"
_A100_80 = "NVIDIA A100 data sheet (SXM4)"
_H100_NVL = "NVIDIA H100 NVL product brief and data sheet"
_B200 = "NVIDIA Blackwell architecture brief (HGX B200)"

# Rates: fp32, TF32, fp16/bf16 TFLOP/s, GB/s. Where a data sheet gives only figures with sparsity, they are halved.
_GPUS: dict[str, KnownGpu] = {
    "p100": KnownGpu(15.89, (6, 0), "Tesla P100-PCIE-16GB", 10.6, None, None, 732, _PASCAL),
    "v100-16": KnownGpu(15.77, (7, 0), "Tesla V100-SXM2-16GB", 15.7, None, 125.0, 900, _VOLTA),
    "v100-32": KnownGpu(31.73, (7, 0), "Tesla V100-SXM2-32GB", 15.7, None, 125.0, 900, _VOLTA),
    "t4": KnownGpu(14.56, (7, 5), "Tesla T4", 8.1, None, 65.0, 320, "NVIDIA T4 data sheet"),
    "rtx2080ti": KnownGpu(10.57, (7, 5), "NVIDIA GeForce RTX 2080 Ti", 14.2, None, 56.9, 616, _RTX2080TI),
    "titan-rtx": KnownGpu(23.65, (7, 5), "NVIDIA TITAN RTX", 16.3, None, 130.5, 672, "NVIDIA TITAN RTX page"),
    # with ECC, as in servers; without it 23.65
    "quadro-rtx6000": KnownGpu(22.16, (7, 5), "Quadro RTX 6000", 16.3, None, 130.5, 672, _TURING),
    # with ECC, as in servers
    "quadro-rtx8000": KnownGpu(44.48, (7, 5), "Quadro RTX 8000", 16.3, None, 130.5, 672, _TURING),
    # 28 SMs at 1.777 GHz: a GeForce GA10x SM does 256 fp32 and 512 half-precision operations a cycle.
    "rtx3060": KnownGpu(11.63, (8, 6), "NVIDIA GeForce RTX 3060", 12.7, 12.7, 25.5, 360, _RTX3060),
    "rtx3080": KnownGpu(9.64, (8, 6), "NVIDIA GeForce RTX 3080", 29.8, 29.8, 59.5, 760, _GA10X),
    "rtx3090": KnownGpu(23.56, (8, 6), "NVIDIA GeForce RTX 3090", 35.6, 35.6, 71.0, 936, _GA10X),
    "rtx4060ti-16": KnownGpu(15.57, (8, 9), "NVIDIA GeForce RTX 4060 Ti", 22.1, 22.1, 44.1, 288, _RTX4060TI_16),
    "rtx4070": KnownGpu(11.62, (8, 9), "NVIDIA GeForce RTX 4070", 29.1, 29.1, 58.3, 504, _RTX4070),
    "rtx4080": KnownGpu(15.57, (8, 9), "NVIDIA GeForce RTX 4080", 48.7, 48.7, 97.5, 716.8, _ADA),
    "rtx4090": KnownGpu(23.52, (8, 9), "NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 1008, _ADA),
    "rtx5090": KnownGpu(31.36, (12, 0), "NVIDIA GeForce RTX 5090", 104.8, 104.8, 209.5, 1792, _RTX5090),
    "a10": KnownGpu(22.05, (8, 6), "NVIDIA A10", 31.2, 62.5, 125.0, 600, "NVIDIA A10 data sheet"),
    "a10g": KnownGpu(22.05, (8, 6), "NVIDIA A10G", 35.0, 35.0, 70.0, 600, "NVIDIA A10G data sheet"),
    "a30": KnownGpu(23.50, (8, 0), "NVIDIA A30", 10.3, 82.0, 165.0, 933, "NVIDIA A30 data sheet"),
    "a40": KnownGpu(44.34, (8, 6), "NVIDIA A40", 37.4, 74.8, 149.7, 696, "NVIDIA A40 data sheet"),
    "a5000": KnownGpu(23.56, (8, 6), "NVIDIA RTX A5000", 27.8, 55.6, 111.1, 768, "NVIDIA RTX A5000 data sheet"),
    "a6000": KnownGpu(47.40, (8, 6), "NVIDIA RTX A6000", 38.7, 77.4, 154.8, 768, _GA10X),
    "rtx6000ada": KnownGpu(47.40, (8, 9), "NVIDIA RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 960, _RTX6000ADA),
    "l4": KnownGpu(22.03, (8, 9), "NVIDIA L4", 30.3, 60.0, 121.0, 300, "NVIDIA L4 data sheet"),
    "l40": KnownGpu(44.39, (8, 9), "NVIDIA L40", 90.5, 90.5, 181.0, 864, "NVIDIA L40 data sheet"),
    "l40s": KnownGpu(44.39, (8, 9), "NVIDIA L40S", 91.6, 183.0, 362.0, 864, "NVIDIA L40S data sheet"),
    "a100-40": KnownGpu(39.38, (8, 0), "NVIDIA A100-SXM4-40GB", 19.5, 156.0, 312.0, 1555, "NVIDIA A100 data sheet"),
    "a100-80": KnownGpu(79.14, (8, 0), "NVIDIA A100-SXM4-80GB", 19.5, 156.0, 312.0, 2039, _A100_80),
    "h100-80": KnownGpu(79.10, (9, 0), "NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4, 3352, _H100),
    "h100-nvl": KnownGpu(93.01, (9, 0), "NVIDIA H100 NVL", 60.0, 417.5, 835.5, 3938, _H100_NVL),
    "h200": KnownGpu(139.72, (9, 0), "NVIDIA H200", 66.9, 494.7, 989.4, 4800, "NVIDIA H200 data sheet (SXM)"),
    "gh200": KnownGpu(94.50, (9, 0), "NVIDIA GH200 480GB", 66.9, 494.7, 989.4, 4000, "NVIDIA GH200 data sheet (96 GB)"),
    "b200": KnownGpu(178.34, (10, 0), "NVIDIA B200", 80.0, 1100.0, 2250.0, 8000, _B200),
}
_ALIASES = {
    "h100": "h100-80",
    "rtx8000": "quadro-rtx8000",
    "rtxa5000": "a5000",
    "rtxa6000": "a6000",
    "p10016": "p100",
    "gh200480": "gh200",  # the driver's name counts the host's half
    "gh20096": "gh200",
}
_SEVERAL = {"a100": ("a100-40", "a100-80"), "v100": ("v100-16", "v100-32"), "rtx6000": ("quadro-rtx6000", "rtx6000ada")}
_CAPABILITIES = frozenset(
    (major, minor)
    for major, minors in {5: "023", 6: "012", 7: "025", 8: "0679", 9: "0", 10: "013", 11: "0", 12: "01"}.items()
    for minor in map(int, minors)
)
# Parts of drivers' names that distinguish nothing here: maker, form factor, kind of memory, unit.
_SILENT = re.compile(r"nvidia|geforce|tesla|generation|pcie|sxm\d?|hbm\d?e?|(?<=\d)gb|[\s_-]+")
_NO_CUDA = {
    "Apple": re.compile(r"mps|metal|(apple)?m[1-9](pro|max|ultra)?"),
    "AMD": re.compile(r"amd.*|instinct.*|radeon.*|rocm|hip|mi\d{2,3}[a-z]*|rx\d{4}.*"),
    "Intel": re.compile(r"intel.*|xpu|arc.*|gaudi.*|hpu"),
    "Google": re.compile(r"(google)?tpu.*"),
}
"""How devices without CUDA are spelt, by who makes them."""
_ALL: Final = "all"
_AMOUNT = re.compile(r"[-+.\d]+\s*[kmgt]?i?b", re.IGNORECASE)
_ALLOWED = "a name (rtx4090, a100-80, h200, ...), an amount (24GiB, 24GiB@8.9) or the host's memory (cpu:16GiB)"


def device_names() -> tuple[str, ...]:
    """Return the names of known devices, by generation."""
    return tuple(_GPUS)


def driver_name(name: str) -> str:
    """Return the driver's name of a device; an unknown device keeps its name."""
    return _GPUS[name].name if name in _GPUS else name


def parse_device(text: str) -> DeviceSpec:
    """Parse the device that a user wants to plan for.

    Args:
        text: A name of :func:`device_names`, in any spelling (``RTX 4090``, ``NVIDIA A100-SXM4-80GB``); an amount of
            usable GPU memory, ``24GiB``, with a compute capability if it matters, ``24GiB@8.9`` (else 8.0 is taken); or
            an amount of host memory, ``cpu:16GiB``.

    Returns:
        The device. Its name is the known one, or the amount as written.

    Raises:
        ConfigError: The name is unknown or stands for several devices, or the size is impossible.
    """
    text = text.strip()
    if text.lower() == "cpu" or text.lower().startswith("cpu:"):
        size_bytes = _amount(text, text[4:])
        return DeviceSpec(name=text, kind=DeviceKind.CPU, capacity_bytes=size_bytes)
    spelling = _plain(text)
    if spelling in _SEVERAL:
        raise ConfigError(
            _doing(text),
            "there are several with different memories",
            " or ".join(_SEVERAL[spelling]),
            "name the one you mean",
        )
    known = _spellings().get(spelling)
    if known is not None and not _AMOUNT.match(text):
        gpu = _GPUS[known]
        return DeviceSpec(name=known, capacity_bytes=round(gpu.gib * 2**30), capability=gpu.capability)
    amount, at, capability = text.partition("@")
    if re.match(r"[-+.\d]", text) is None or (at and _plain(amount) in _spellings()):
        raise _unknown(text, amount)
    return DeviceSpec(
        name=text,
        capacity_bytes=_amount(text, amount),
        capability=_capability(text, capability) if at else AMOUNT_CAPABILITY,
    )


def parse_devices(texts: Iterable[str]) -> tuple[DeviceSpec, ...]:
    """Parse several devices, each text with one or more between commas; ``all`` stands for every known one.

    Raises:
        ConfigError: As of :func:`parse_device`; one is empty, or named twice.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    found: dict[str, DeviceSpec] = {}
    for name in names:
        if not name:
            raise ConfigError(f"reading the devices {','.join(texts)!r}", "one has no name", _ALLOWED)
        for one in device_names() if name.lower() == _ALL else (name,):
            device = parse_device(one)
            if device.name in found:
                raise ConfigError(_doing(name), f"{device.name} is named twice", "each device once")
            found[device.name] = device
    return tuple(found.values())


def _doing(text: str) -> str:
    return f"reading the device {text!r}"


def _plain(text: str) -> str:
    return _SILENT.sub("", text.lower())


def _spellings() -> dict[str, str]:
    """Return every plain spelling with the known name it stands for: ``4090`` is ``rtx4090``."""
    spellings = {_plain(name): name for name in _GPUS}
    spellings |= {name.removeprefix("rtx"): known for name, known in spellings.items()}
    return spellings | _ALIASES


def _amount(text: str, amount: str) -> int:
    if not amount:
        raise ConfigError(_doing(text), "no amount of memory", "cpu:16GiB", "say how much memory it has")
    try:
        size_bytes = parse_bytes(amount)
    except ConfigError as error:
        hint = "write a number above zero with its unit: 24GiB, 512MiB, 80GB"
        raise ConfigError(_doing(text), f"{amount!r} is no amount of memory", _ALLOWED, hint) from error
    if not LEAST_BYTES <= size_bytes <= MOST_BYTES:
        raise ConfigError(
            _doing(text), f"no device has {amount.strip()}", "64MiB to 1024TiB", "check the number and its unit"
        )
    return size_bytes


def _capability(text: str, capability: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", capability.strip())
    version = (int(match[1]), int(match[2])) if match else None
    if version not in _CAPABILITIES:
        raise ConfigError(
            _doing(text),
            f"{capability!r} is no compute capability of a GPU",
            ", ".join(f"{major}.{minor}" for major, minor in sorted(_CAPABILITIES)),
            "leave it out to plan for 8.0",
        )
    return version


def _unknown(text: str, name: str) -> ConfigError:
    spellings = _spellings()
    known = spellings.get(_plain(name))
    if known is not None:
        return ConfigError(_doing(text), f"{known} has its own capability", _ALLOWED, f"write {known}")
    for maker, spelt in _NO_CUDA.items():
        if spelt.fullmatch(_plain(name)):
            found = f"devices of {maker} are not simulated: they have no CUDA"
            return ConfigError(_doing(text), found, _ALLOWED, "known: " + ", ".join(_GPUS))
    near = difflib.get_close_matches(_plain(name), [*spellings, *_SEVERAL], n=3)
    suggested = dict.fromkeys(
        known for spelling in near for known in _SEVERAL.get(spelling, (spellings.get(spelling, ""),))
    )
    hint = f"did you mean {' or '.join(suggested)}?" if suggested else "known: " + ", ".join(_GPUS)
    return ConfigError(_doing(text), "no device of that name is known", _ALLOWED, hint)


def device_rates(device: DeviceSpec) -> KnownGpu | None:
    """Return a GPU's published peaks; None for an amount of memory, the host, and a name that is not known."""
    return _GPUS.get(known_name(device)) if device.kind is DeviceKind.CUDA else None


def known_name(device: DeviceSpec) -> str:
    """Return the name of :func:`device_names` for a GPU as its driver spells it; its own name where none is known."""
    try:
        return parse_device(device.name).name
    except ConfigError:
        return device.name


# Where a trial runs: a device of a node, a group of them, or a node's CPU: ``here/0``, ``n1/0,n1/1``, ``here/cpu``.
#
# All these are called places. A node is a machine, and a group never spans two of them. Rank ``r`` of a trial gets
# the ``r``-th device. On its node a device has the name that ``CUDA_VISIBLE_DEVICES`` takes, which is all that a
# child sees.


HERE: Final = "here"
"""The node that the control process itself runs on."""

_SEPARATOR: Final = ","
_OF_NODE: Final = "/"
_CPU: Final = "cpu"
_MIG: Final = "MIG-"
"""Names of MIG instances may contain the sign that ends a node's name."""


def cpu_of(node: str) -> str:
    """Return the place that is the CPU of a node."""
    return f"{node}{_OF_NODE}{_CPU}"


def place_on(node: str, visible: str) -> str:
    """Return the place of some devices of a node, named as ``CUDA_VISIBLE_DEVICES`` takes them there."""
    return place_of([f"{node}{_OF_NODE}{device}" for device in devices_of(visible)])


def node_of(place: str) -> str:
    """Return the node of a place; empty where its name has none."""
    node, sign, _ = place.partition(_OF_NODE)
    return node if sign else ""


def visible_devices(place: str) -> str | None:
    """Return a place as ``CUDA_VISIBLE_DEVICES`` takes it on its node; None: the CPU."""
    return None if on_cpu(place) else place_of([device.partition(_OF_NODE)[2] for device in devices_of(place)])


def on_cpu(place: str) -> bool:
    """Whether a place is the CPU of its node."""
    return place.partition(_OF_NODE)[2] == _CPU


def with_node(place: str) -> str:
    """Return a place from a ledger; those of older versions name no node, as there was one only."""
    named = _OF_NODE in place and not place.startswith(_MIG)
    return place if named else place_on(HERE, place)


def device_in_words(device: str) -> str:
    """Return a device's name for a person, who need not read of a node where it is this machine."""
    return device.removeprefix(f"{HERE}{_OF_NODE}")


def devices_of(place: str) -> tuple[str, ...]:
    """Return the devices of a place, by rank."""
    return tuple(place.split(_SEPARATOR))


def place_of(devices: Sequence[str]) -> str:
    """Return the place of some devices."""
    return _SEPARATOR.join(devices)


def place_in_words(place: str) -> str:
    """Return a place in words: ``device 0``, ``devices n1/0, n1/1``, or ``the CPU``."""
    if on_cpu(place):
        return "the CPU" if node_of(place) == HERE else f"the CPU of {node_of(place)}"
    devices = [device_in_words(device) for device in devices_of(place)]
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(devices)}"


def overlap(one: str, other: str) -> bool:
    """Whether two places have a device, or a node's CPU, in common."""
    return one == other or not set(devices_of(one)).isdisjoint(devices_of(other))


def places_of(
    devices: Sequence[str], size: int, *, set_aside: Collection[str] = (), taken: Collection[str] = ()
) -> list[str]:
    """Divide devices into places of ``size`` on one node each that have no device in common.

    Neighbours in ``devices`` form a place. Where one of them is missing, the others are combined with the remaining
    devices of other places. Places where trials run stay as they are until they are free.

    Args:
        devices: All devices, in their order.
        size: Devices per place.
        set_aside: Devices that are not used.
        taken: Places where trials run; one with a device that is set aside is not returned.

    Returns:
        The places, by their first device; remaining devices are in none.
    """
    busy = {device for place in taken for device in devices_of(place)}
    whole = [devices_of(place) for place in dict.fromkeys(taken)]
    places = [place for place in whole if len(place) == size and set(place) <= set(devices) - set(set_aside)]
    free = [device for device in devices if device not in busy and device not in set_aside]
    kept = [place for place in _chunks(devices, size) if set(place) <= set(free)]
    rest = [device for device in free if not any(device in place for place in kept)]
    every = [*places, *kept, *_chunks(rest, size)]
    return [place_of(place) for place in sorted(every, key=lambda place: devices.index(place[0]))]


def left_over(devices: Sequence[str], size: int, *, set_aside: Collection[str] = ()) -> tuple[str, ...]:
    """Return the devices that remain because they are too few for another place."""
    places = places_of(devices, size, set_aside=set_aside)
    used = {device for place in places for device in devices_of(place)}
    return tuple(device for device in devices if device not in used and device not in set_aside)


def most_on_a_node(devices: Iterable[str]) -> int:
    """Return how many devices the node with the most of them has."""
    return max((len(list(same)) for _, same in groupby(devices, node_of)), default=0)


def check_enough(count: int, together: int) -> None:
    """Refuse trials of more processes than there are devices.

    Args:
        count: Number of CUDA devices.
        together: Processes of a trial, each of which needs a device.

    Raises:
        MachineError: There are too few.
    """
    if together <= max(1, count):
        return
    raise MachineError(
        f"giving each of a trial's {together} processes a device of its own",
        f"there {'is' if count == 1 else 'are'} {count} CUDA device(s), by CUDA_VISIBLE_DEVICES where that is set",
        f"execution.tp or execution.dp of at most {count}",
        'lower it, show more devices, or set execution.device = "cpu": all processes then share the cores',
    )


def _chunks(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return as many groups of neighbours on one node as there are, the devices of a node standing together."""
    nodes = [list(same) for _, same in groupby(devices, node_of)]
    return [tuple(same[at : at + size]) for same in nodes for at in range(0, len(same) - size + 1, size)]
