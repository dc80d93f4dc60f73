"""How much of their published peaks GPUs reach: facts that step times are estimated with.

Measured with kernels of others, who published their latencies: NVIDIA's aiconfigurator (commit 095f58a51, Apache-2.0)
and NeuSight (commit 6945927, MIT); NOTICE names both. Where nothing was measured, the shares are guesses, by the kind
of memory and of cooling, and estimates with them have a wider interval.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from dryfit.settings.older_python import StrEnum


class ReachLevel(StrEnum):
    """How well a GPU's reach is known."""

    MEASURED = "measured"
    POWER_LIMITED = "power-limited"
    """Measured, on a GPU whose clock its power limit decides."""
    GUESSED = "guessed"
    CALIBRATED = "calibrated"
    """By a step that the user measured."""


@dataclass(frozen=True, slots=True)
class DeviceReach:
    """Shares of a GPU's published peaks that kernels reach, and what decides on tiles and caches.

    Attributes:
        processors: Streaming multiprocessors.
        tensor: Of matrix products on tensor cores, in 16 bits or TF32; None: not measured, and no guess is sound.
        simt: Of matrix products in fp32 outside of tensor cores.
        bandwidth: Of the memory's bandwidth, by large contiguous element-wise kernels.
        l2_bytes: The second-level cache; 0 where its gain is not known.
        l2_gain: How many times faster memory-bound kernels are that move less than half of the cache.
        attention_forward: Of attention with heads of 128 over long sequences, forward.
        attention_backward: The same, backward.
        level: How well this is known.
        basis: Who measured it.
        guessed: What was not measured of a card that was: ``tensor`` or ``simt``.
        calibrated: Fields that a measurement of the user's own has set.
    """

    processors: int
    tensor: float | None
    simt: float
    bandwidth: float
    l2_bytes: int
    l2_gain: float
    attention_forward: float
    attention_backward: float
    level: ReachLevel
    basis: str
    guessed: Literal["", "tensor", "simt"] = ""
    calibrated: frozenset[str] = frozenset()


_AIC: Final = "NVIDIA aiconfigurator"
_NEUSIGHT: Final = "NeuSight"
_MIB: Final = 1 << 20
_MEASURED, _LIMITED, _GUESSED = ReachLevel.MEASURED, ReachLevel.POWER_LIMITED, ReachLevel.GUESSED

_KNOWN: Final[dict[str, DeviceReach]] = {
    "a100-80": DeviceReach(108, 0.82, 0.86, 0.90, 40 * _MIB, 2.0, 0.62, 0.55, _MEASURED, _AIC),
    "a100-40": DeviceReach(
        108, 0.74, 0.84, 0.90, 40 * _MIB, 2.0, 0.60, 0.53, _MEASURED, f"{_NEUSIGHT} (PCIe)", "tensor"
    ),
    "h100-80": DeviceReach(132, 0.845, 0.76, 0.90, 50 * _MIB, 1.8, 0.62, 0.42, _MEASURED, f"{_AIC}, {_NEUSIGHT}"),
    "h200": DeviceReach(132, 0.82, 0.76, 0.90, 50 * _MIB, 1.5, 0.62, 0.42, _MEASURED, _AIC),
    "b200": DeviceReach(148, 0.74, 0.75, 0.88, 126 * _MIB, 1.5, 0.45, 0.35, _MEASURED, _AIC, "simt"),
    "l40s": DeviceReach(142, 0.615, 0.60, 0.82, 96 * _MIB, 4.0, 0.54, 0.46, _LIMITED, _AIC, "simt"),
    "v100-16": DeviceReach(80, 0.80, 0.93, 0.90, 6 * _MIB, 1.0, 0.40, 0.30, _MEASURED, f"{_NEUSIGHT} (fp32)", "tensor"),
    "v100-32": DeviceReach(80, 0.80, 0.93, 0.90, 6 * _MIB, 1.0, 0.40, 0.30, _MEASURED, f"{_NEUSIGHT} (fp32)", "tensor"),
    "p100": DeviceReach(56, None, 0.72, 0.75, 4 * _MIB, 1.0, 0.40, 0.30, _MEASURED, _NEUSIGHT),
    # Under 150 W the clock is so far below the rated one that nothing but a measurement in the precision tells a rate.
    "t4": DeviceReach(40, None, 0.46, 0.76, 4 * _MIB, 1.0, 0.30, 0.25, _LIMITED, f"{_NEUSIGHT} (fp32)"),
    "l4": DeviceReach(58, None, 0.31, 0.80, 48 * _MIB, 4.0, 0.35, 0.30, _LIMITED, f"{_NEUSIGHT} (fp32)"),
}
_DATA_CENTRE: Final = DeviceReach(
    0, 0.85, 0.80, 0.90, 0, 1.0, 0.60, 0.50, _GUESSED, "nobody measured it; guessed by its kind of memory, HBM"
)
_BOARD: Final = replace(
    _DATA_CENTRE, tensor=0.75, bandwidth=0.82, basis="nobody measured it; guessed by its kind of memory, GDDR"
)
_GEFORCE: Final = replace(
    _BOARD, tensor=1.0, basis="nobody measured it; guessed as of cards that clock above their rate"
)

_GUESSES: Final[dict[str, tuple[DeviceReach, int]]] = {
    "a30": (_DATA_CENTRE, 56),
    "h100-nvl": (_DATA_CENTRE, 132),
    "gh200": (_DATA_CENTRE, 132),
    "a10": (_BOARD, 72),
    "a10g": (_BOARD, 80),
    "a40": (_BOARD, 84),
    "a5000": (_BOARD, 64),
    "a6000": (_BOARD, 84),
    "rtx6000ada": (_BOARD, 142),
    "l40": (_BOARD, 142),
    "quadro-rtx6000": (_BOARD, 72),
    "quadro-rtx8000": (_BOARD, 72),
    "titan-rtx": (_GEFORCE, 72),
    "rtx2080ti": (_GEFORCE, 68),
    "rtx3060": (_GEFORCE, 28),
    "rtx3080": (_GEFORCE, 68),
    "rtx3090": (_GEFORCE, 82),
    "rtx4060ti-16": (_GEFORCE, 34),
    "rtx4070": (_GEFORCE, 46),
    "rtx4080": (_GEFORCE, 76),
    "rtx4090": (_GEFORCE, 128),
    "rtx5090": (_GEFORCE, 170),
}
"""The guess for a card that nobody measured, and its streaming multiprocessors (NVIDIA's pages of the cards)."""


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """What collectives of NCCL reach between the GPUs of one machine.

    Attributes:
        latency_s: Of one collective.
        bytes_per_s: Of each GPU's bus: an all-reduce of n GPUs moves 2 (n - 1) / n of its bytes.
        is_measured: On this card; else those of a card with the same kind of link.
    """

    latency_s: float
    bytes_per_s: float
    is_measured: bool = True


_LINKS: Final[dict[str, dict[int, tuple[float, float]]]] = {
    "a100-80": {2: (10.0, 193), 4: (14.5, 217), 8: (22.6, 222)},
    "h100-80": {2: (6.2, 320), 4: (9.4, 349), 8: (15.5, 445)},
    "h200": {2: (6.1, 319), 4: (9.3, 349), 8: (16.0, 460)},
    "l40s": {2: (7.7, 20.1), 4: (11.9, 5.2), 8: (22.6, 1.4)},
}
"""Microseconds and GB/s of all-reduces by number of GPUs (aiconfigurator; L40S over PCIe)."""
_BY_PCIE: Final = "l40s"
_ALIKE: Final = {"a100-40": "a100-80", "v100-16": "a100-80", "v100-32": "a100-80", "gh200": "h100-80", "b200": "h200"}


def has_nvlink(name: str) -> bool:
    """Whether GPUs of a kind are connected by NVLink in the machines that they are sold in."""
    return name in _ALIKE or (name in _LINKS and name != _BY_PCIE)


def device_link(name: str, ranks: int) -> DeviceLink | None:
    """Return what collectives reach between GPUs of a kind; of those without NVLink as on PCIe. None beyond 8."""
    known = _LINKS[name if name in _LINKS else _ALIKE.get(name, _BY_PCIE)]
    least = next((count for count in known if count >= ranks), None)
    if least is None:
        return None
    microseconds, gigabytes = known[least]
    return DeviceLink(microseconds * 1e-6, gigabytes * 1e9, name in _LINKS)


def device_reach(name: str) -> DeviceReach | None:
    """Return the reach of a known device; None of an amount of memory."""
    if name in _GUESSES:
        guess, processors = _GUESSES[name]
        return replace(guess, processors=processors)
    return _KNOWN.get(name)
