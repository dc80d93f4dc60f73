"""Known GPUs by name, with memory and compute capability, to plan for without having the device.

Memory is what PyTorch calls ``total_memory``: what the driver leaves to programs, and what its out-of-memory errors
print ("GPU 0 has a total capacity of 23.52 GiB"). The figures come from such messages in public reports, from Linux
machines with ECC in its default state; the lowest common one was taken, so that a plan made for a name is valid on most
machines with that GPU. They have two decimals of a GiB. Drivers differ by up to 0.2 GiB: newer ones keep more.
``nvidia-smi`` shows 0.3 to 1.1 GiB more than is usable: 24 564 MiB for an RTX 4090 (usable 24 084), 143 771 MiB for an
H200 (143 073). On a machine that has the device, the driver's number is used, not this table.
"""

import difflib
import re

from dryfit.core.errors import ConfigError
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.text.units import parse_bytes

LEAST_BYTES = 64 * 2**20
"""Below this no CUDA context, and no model, fits."""

MOST_BYTES = 2**50

TF32_CAPABILITY = (8, 0)
"""The first compute capability with TF32 (CUDA C++ programming guide, arithmetic instructions)."""

AMOUNT_CAPABILITY = (8, 0)
"""Compute capability of a device that is only an amount: bf16 and flash attention, small cuBLAS workspaces."""

# Usable GiB, compute capability from NVIDIA's list of CUDA GPUs, and the driver's name of the commonest form.
_GPUS: dict[str, tuple[float, tuple[int, int], str]] = {
    "p100": (15.89, (6, 0), "Tesla P100-PCIE-16GB"),
    "v100-16": (15.77, (7, 0), "Tesla V100-SXM2-16GB"),
    "v100-32": (31.73, (7, 0), "Tesla V100-SXM2-32GB"),
    "t4": (14.56, (7, 5), "Tesla T4"),
    "rtx2080ti": (10.57, (7, 5), "NVIDIA GeForce RTX 2080 Ti"),
    "titan-rtx": (23.65, (7, 5), "NVIDIA TITAN RTX"),
    "quadro-rtx6000": (22.16, (7, 5), "Quadro RTX 6000"),  # with ECC, as in servers; without it 23.65
    "quadro-rtx8000": (44.48, (7, 5), "Quadro RTX 8000"),  # with ECC, as in servers
    "rtx3060": (11.63, (8, 6), "NVIDIA GeForce RTX 3060"),
    "rtx3080": (9.64, (8, 6), "NVIDIA GeForce RTX 3080"),
    "rtx3090": (23.56, (8, 6), "NVIDIA GeForce RTX 3090"),
    "rtx4060ti-16": (15.57, (8, 9), "NVIDIA GeForce RTX 4060 Ti"),
    "rtx4070": (11.62, (8, 9), "NVIDIA GeForce RTX 4070"),
    "rtx4080": (15.57, (8, 9), "NVIDIA GeForce RTX 4080"),
    "rtx4090": (23.52, (8, 9), "NVIDIA GeForce RTX 4090"),
    "rtx5090": (31.36, (12, 0), "NVIDIA GeForce RTX 5090"),
    "a10": (22.05, (8, 6), "NVIDIA A10"),
    "a10g": (22.05, (8, 6), "NVIDIA A10G"),
    "a30": (23.50, (8, 0), "NVIDIA A30"),
    "a40": (44.34, (8, 6), "NVIDIA A40"),
    "a5000": (23.56, (8, 6), "NVIDIA RTX A5000"),
    "a6000": (47.40, (8, 6), "NVIDIA RTX A6000"),
    "rtx6000ada": (47.40, (8, 9), "NVIDIA RTX 6000 Ada Generation"),
    "l4": (22.03, (8, 9), "NVIDIA L4"),
    "l40": (44.39, (8, 9), "NVIDIA L40"),
    "l40s": (44.39, (8, 9), "NVIDIA L40S"),
    "a100-40": (39.38, (8, 0), "NVIDIA A100-SXM4-40GB"),
    "a100-80": (79.14, (8, 0), "NVIDIA A100-SXM4-80GB"),
    "h100-80": (79.10, (9, 0), "NVIDIA H100 80GB HBM3"),
    "h100-nvl": (93.01, (9, 0), "NVIDIA H100 NVL"),
    "h200": (139.72, (9, 0), "NVIDIA H200"),
    "gh200": (94.50, (9, 0), "NVIDIA GH200 480GB"),
    "b200": (178.34, (10, 0), "NVIDIA B200"),
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
_AMOUNT = re.compile(r"[-+.\d]+\s*[kmgt]?i?b", re.IGNORECASE)
_ALLOWED = "a name (rtx4090, a100-80, h200, ...), an amount (24GiB, 24GiB@8.9) or the host's memory (cpu:16GiB)"


def device_names() -> tuple[str, ...]:
    """Return the names of known devices, by generation."""
    return tuple(_GPUS)


def driver_name(name: str) -> str:
    """Return the driver's name of a device; an unknown device keeps its name."""
    return _GPUS[name][2] if name in _GPUS else name


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
        size_gib, capability, _ = _GPUS[known]
        return DeviceSpec(name=known, capacity_bytes=round(size_gib * 2**30), capability=capability)
    amount, at, capability = text.partition("@")
    if re.match(r"[-+.\d]", text) is None or (at and _plain(amount) in _spellings()):
        raise _unknown(text, amount)
    return DeviceSpec(
        name=text,
        capacity_bytes=_amount(text, amount),
        capability=_capability(text, capability) if at else AMOUNT_CAPABILITY,
    )


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
    near = difflib.get_close_matches(_plain(name), [*spellings, *_SEVERAL], n=3)
    suggested = dict.fromkeys(
        known for spelling in near for known in _SEVERAL.get(spelling, (spellings.get(spelling, ""),))
    )
    hint = f"did you mean {' or '.join(suggested)}?" if suggested else "known: " + ", ".join(_GPUS)
    return ConfigError(_doing(text), "no device of that name is known", _ALLOWED, hint)
