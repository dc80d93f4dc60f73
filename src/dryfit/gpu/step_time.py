"""The time of a step on a GPU that is not there: one formula for each kind of operator, by what GPUs reach.

The formulas and their constants were settled with public measurements (kernels of NVIDIA's aiconfigurator and of
NeuSight, norms of Liger-Kernel): see docs/step-time.md. All peaks are published ones, in operations and bytes a second.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, exp, sqrt
from typing import Final

from dryfit.gpu.kinds import Kind
from dryfit.settings.device_reach import DeviceLink, DeviceReach, ReachLevel
from dryfit.settings.devices import KnownGpu, ProductPrecision
from dryfit.settings.memory_terms import StepPhase
from dryfit.settings.rehearsal_messages import FittedReach, StepTime

_LAUNCH_S: Final = 3.1e-6
"""From one kernel's begin to the next one's, at least."""
_TILES: Final = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (256, 64, 0.97), (64, 256, 0.97)),
    *((128, 64, 0.957), (64, 128, 0.957), (64, 64, 0.93)),
)
"""Rows and columns of a tile of the result that one processor computes, and what it reaches beside the largest."""
_SPLITS: Final = (1, 2, 4, 16, 64)
_LEAST_SPLIT: Final = 256
_SLICE: Final = 32
_FIRST_TERMS: Final = {True: 128, False: 10}
"""Terms' worth of time before a tile's first, on tensor cores or outside of them."""
_SPLIT_S: Final = 2e-6
_SHORT_KEYS: Final = 500
_NARROW_HEAD: Final = 0.85
_QUERIES: Final = 128
"""Queries that one processor takes at once."""
_DEPTHWISE: Final = 0.45
_CHANNELS: Final = 32
"""cuDNN computes so many channels of a group at least."""

_SHARES: Final[Mapping[Kind, float]] = {
    Kind.ELEMENTWISE: 0.98,
    Kind.OPTIMIZER: 0.95,
    Kind.CAST: 0.90,
    Kind.REDUCE: 0.90,
    Kind.SOFTMAX_BACKWARD: 0.95,
    Kind.SOFTMAX: 0.80,
    Kind.COPY: 0.75,
    Kind.STRIDED: 0.60,
    Kind.NORM: 0.62,
    Kind.NORM_BACKWARD: 0.47,
    Kind.LOG_SOFTMAX: 0.47,
    Kind.GATHER: 0.33,
    Kind.EMBEDDING_BACKWARD: 0.16,
}
"""Bandwidth that a kind reaches beside large contiguous element-wise kernels."""
_HOST_S: Final = {StepPhase.FORWARD: 10e-6, StepPhase.BACKWARD: 7e-6, StepPhase.OPTIMIZER: 8e-6}
"""Time that the host needs to start an operator; of other phases as forward."""
_VIEW_S: Final = 1.5e-6

_UNSURE: Final[Mapping[Kind, float]] = {
    Kind.MATMUL: 0.08,
    Kind.OPTIMIZER: 0.08,
    Kind.ELEMENTWISE: 0.10,
    Kind.REDUCE: 0.15,
    Kind.ATTENTION: 0.20,
    Kind.CONVOLUTION: 0.20,
    Kind.SOFTMAX: 0.20,
    Kind.SOFTMAX_BACKWARD: 0.20,
    Kind.LOG_SOFTMAX: 0.20,
    Kind.CAST: 0.20,
    Kind.STRIDED: 0.25,
    Kind.COPY: 0.25,
    Kind.NORM: 0.35,
    Kind.NORM_BACKWARD: 0.35,
    Kind.GATHER: 0.40,
    Kind.EMBEDDING_BACKWARD: 0.40,
    Kind.VIEW: 0.0,
    Kind.HOST_COPY: 0.50,
    Kind.COLLECTIVE: 0.50,
}
"""Standard deviation of the logarithm of a kind's time."""
_UNSURE_GROUPS: Final = 0.45
"""The same of grouped and depthwise convolutions."""
_UNSURE_DEVICE: Final = {
    ReachLevel.MEASURED: 0.08,
    ReachLevel.POWER_LIMITED: 0.15,
    ReachLevel.GUESSED: 0.20,
    ReachLevel.CALIBRATED: 0.05,
}
_MOST_GUESSED: Final = 0.2
"""Share of the time in which products in a precision that was not measured make the whole a guess."""
_EIGHTY_PERCENT: Final = 1.28
"""Standard deviations on either side that hold 80 % of a normal distribution."""
_SLOW_HOST: Final = 5.0
"""How many times longer a host may need: 4.6 times on the machine of an H200, where scripts of small kernels ran."""
_FUSED: Final = frozenset({Kind.ELEMENTWISE, Kind.CAST, Kind.STRIDED, Kind.REDUCE, Kind.COPY})
"""Kinds that ``torch.compile`` fuses."""
_FUSED_BYTES: Final = 0.35
"""Share of their bytes that fused kernels move."""
_UNSURE_FUSED: Final = 0.25
_UNSURE_RANKS: Final = 0.15
_HOST_BYTES_PER_S: Final = 10e9
"""Of copies between host and device: between pageable and page-locked memory on PCIe 4."""
_PASSES: Final = (StepPhase.FORWARD, StepPhase.BACKWARD)
"""Phases in which collectives run beside kernels; in the others the step waits for them."""
_FUSED_TEXT: Final = "of compiled code what fuses moves 35 % of its bytes"
_ALIKE_TEXT: Final = "collectives as fast as on another card with such links"
_PRODUCTS: Final = (Kind.MATMUL, Kind.CONVOLUTION, Kind.ATTENTION)
_RANKS_TEXT: Final = "collectives of passes run beside their kernels"
_SHARES_TRIED: Final = (0.02, 1.5)
"""Least and most of a published peak that a device may reach: cards that clock above their rate exceed it."""
_SOME: Final = 0.5
"""A share to begin with where none is known."""
_LEAST_BUSY: Final = 0.8
_HALVINGS: Final = 40
_NOT_COUNTED: Final = ("data loading", "evaluation", "checkpoints", "a first slow step")


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operator with what its time depends on; each is one object, compared by identity.

    Attributes:
        flops: That its kernel cannot leave out.
        bytes: That it reads and writes.
        sizes: See :func:`dryfit.gpu.kinds.sizes_of`.
        element_bytes: Of its first matrix.
        counted_flops: As everybody counts them, of causal attention the whole square.
    """

    kind: Kind
    phase: StepPhase
    flops: int
    bytes: int
    precision: ProductPrecision
    sizes: tuple[int, ...] = ()
    element_bytes: int = 4
    is_backward: bool = False
    counted_flops: int = 0

    def least_s(self, rates: KnownGpu, capability: tuple[int, int]) -> float:
        """Return the least time at published peaks: the longer of arithmetic and traffic."""
        return max(self.flops / rates.flops_per_s(self.precision, capability), self.bytes / rates.bytes_per_s)


class Timing:
    """Times of operators on one GPU.

    Args:
        rates: Its published peaks.
        reach: How much of them it reaches.
        capability: Its compute capability.
        link: To the GPUs of other ranks; None: there are none, or nothing is known.
        is_compiled: Whether the passes are compiled.
    """

    def __init__(
        self,
        rates: KnownGpu,
        reach: DeviceReach,
        capability: tuple[int, int],
        link: DeviceLink | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        self._rates = rates
        self.reach = reach
        self._capability = capability
        self.link = link
        self.is_compiled = is_compiled
        self._bytes_per_s = reach.bandwidth * rates.bytes_per_s

    def knows(self, precision: ProductPrecision) -> bool:
        """Whether its reach in a precision is known, or can be guessed."""
        return not self.on_tensor_cores(precision) or self.reach.tensor is not None

    def guesses(self, precision: ProductPrecision) -> bool:
        """Whether nobody measured its reach in a precision."""
        return self.reach.guessed == ("tensor" if self.on_tensor_cores(precision) else "simt")

    def seconds(self, one: Operation) -> float:
        """Return the time of a kernel."""
        match one.kind:
            case Kind.VIEW:
                return 0.0
            case Kind.HOST_COPY:
                return _LAUNCH_S + one.bytes / _HOST_BYTES_PER_S
            case Kind.COLLECTIVE:
                return self.link.latency_s + one.sizes[0] / self.link.bytes_per_s if self.link else 0.0
            case Kind.MATMUL if len(one.sizes) == 5:
                return self._matmul(one, *one.sizes[:4])
            case Kind.CONVOLUTION if len(one.sizes) == 5:
                return self._convolution(one)
            case Kind.ATTENTION if len(one.sizes) == 4:
                return self._attention(one)
            case Kind.MATMUL | Kind.CONVOLUTION | Kind.ATTENTION:
                return _LAUNCH_S + max(one.flops / self._flops_per_s(one.precision), one.bytes / self._bytes_per_s)
            case _:
                return self._memory_bound(one)

    def on_tensor_cores(self, precision: ProductPrecision) -> bool:
        """Whether products in a precision run there."""
        peak = self._rates.flops_per_s(precision, self._capability)
        return peak > self._rates.flops_per_s(ProductPrecision.FP32, self._capability)

    def _flops_per_s(self, precision: ProductPrecision) -> float:
        share = self.reach.tensor if self.on_tensor_cores(precision) else self.reach.simt
        return (share or self.reach.simt) * self._rates.flops_per_s(precision, self._capability)

    def _matmul(self, one: Operation, batch: int, rows: int, columns: int, terms: int) -> float:
        """Return the time of a product: waves of tiles, and traffic, the longer of which decides."""
        processors = self.reach.processors
        on_tensor_cores = self.on_tensor_cores(one.precision)
        each = self._flops_per_s(one.precision) / processors
        moved_s = batch * one.element_bytes * (rows * terms + terms * columns + rows * columns) / self._bytes_per_s
        best = float("inf")
        for tile_rows, tile_columns, share in _TILES:
            tiles = batch * ceil(rows / tile_rows) * ceil(columns / tile_columns)
            for split in _SPLITS:
                if split > 1 and (terms / split < _LEAST_SPLIT or tiles * split > 4 * processors):
                    continue
                length = _SLICE * ceil(terms / split / _SLICE) + _FIRST_TERMS[on_tensor_cores]
                spent = ceil(tiles * split / processors) * 2 * tile_rows * tile_columns * length / (each * share)
                if split > 1:
                    spent += _SPLIT_S + 8 * split * batch * rows * columns / self._bytes_per_s
                best = min(best, spent)
        return _LAUNCH_S + (best**4 + moved_s**4) ** 0.25

    def _convolution(self, one: Operation) -> float:
        groups, places, channels, terms, _ = one.sizes
        products = one.counted_flops / (2 * groups * places * channels * terms)
        if groups > 1 and channels == 1:
            return _LAUNCH_S + one.bytes / (_DEPTHWISE * self._bytes_per_s)
        padded = _CHANNELS * ceil(channels / _CHANNELS) if groups > 1 else channels
        return products * self._matmul(one, groups, places, padded, terms)

    def _attention(self, one: Operation) -> float:
        heads, queries, keys, width = one.sizes
        reach = self.reach.attention_backward if one.is_backward else self.reach.attention_forward
        reach *= (1.0 if width >= _QUERIES else _NARROW_HEAD) / (1 + _SHORT_KEYS / max(1, keys))
        waves = heads * ceil(queries / _QUERIES) / self.reach.processors
        quantised = ceil(waves) / waves if waves >= 1 else 1 / waves
        peak = self._rates.flops_per_s(one.precision, self._capability)
        return _LAUNCH_S + max(one.flops * quantised / (peak * reach), one.bytes / self._bytes_per_s)

    def fuses(self, one: Operation) -> bool:
        """Whether an operator is a part of a fused kernel."""
        return self.is_compiled and one.kind in _FUSED and one.phase in _PASSES

    def _memory_bound(self, one: Operation) -> float:
        if self.fuses(one):
            return _FUSED_BYTES * one.bytes / (self._bytes_per_s * _SHARES[one.kind])
        gain = self.reach.l2_gain if one.bytes < self.reach.l2_bytes / 2 else 1.0
        return _LAUNCH_S + one.bytes / (self._bytes_per_s * _SHARES[one.kind] * gain)


@dataclass(slots=True)
class _Spent:
    """Seconds of a step.

    Attributes:
        busy: Of the device, by phase.
        host: Of the host, by phase.
        kinds: Of the device, by kind of operator.
        sides: Of products on tensor cores, and in fp32 outside of them.
        sent: Of collectives, by phase; what kernels do not hide of them is in ``busy`` too.
        grouped_s: Of grouped and depthwise convolutions.
        guessed_s: Of products in a precision that nobody measured on the device.
    """

    busy: dict[StepPhase, float] = field(default_factory=lambda: defaultdict[StepPhase, float](float))
    host: dict[StepPhase, float] = field(default_factory=lambda: defaultdict[StepPhase, float](float))
    kinds: dict[Kind, float] = field(default_factory=lambda: defaultdict[Kind, float](float))
    sides: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    sent: dict[StepPhase, float] = field(default_factory=lambda: defaultdict[StepPhase, float](float))
    grouped_s: float = 0.0
    guessed_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Of the device."""
        return sum(self.busy.values())

    @property
    def decides(self) -> str:
        """Which of the device's shares most of it depends on."""
        most = max(self.sides, key=self.sides.__getitem__, default="")
        return most if sum(self.sides.values()) >= self.busy_s / 2 else "bandwidth"

    def add(self, one: Operation, times: int, timing: Timing) -> None:
        """Add an operator that ran some times."""
        spent = timing.seconds(one) * times
        if one.kind is Kind.COLLECTIVE:
            self.sent[one.phase] += spent
            return
        if one.kind in _PRODUCTS:
            self.sides["tensor" if timing.on_tensor_cores(one.precision) else "simt"] += spent
            self.guessed_s += spent if timing.guesses(one.precision) else 0.0
        self.busy[one.phase] += spent
        self.kinds[one.kind] += spent
        if one.kind is Kind.CONVOLUTION and one.sizes and one.sizes[-1] > 1:
            self.grouped_s += spent
        if not timing.fuses(one):
            each_s = _VIEW_S if one.kind is Kind.VIEW else _HOST_S.get(one.phase, _HOST_S[StepPhase.FORWARD])
            self.host[one.phase] += times * each_s

    def show_collectives(self) -> None:
        """Let the device wait for what kernels do not hide of collectives."""
        for phase, spent in self.sent.items():
            hidden = min(spent, self.busy[phase]) if phase in _PASSES else 0.0
            self.kinds[Kind.COLLECTIVE] += spent - hidden
            self.busy[phase] += spent - hidden

    def spread(self, level: ReachLevel, timing: Timing) -> float:
        """Return by what the median is divided and multiplied for an interval of 80 %."""
        busy_s = self.busy_s
        variance = _UNSURE_DEVICE[level] ** 2
        variance += sum((spent / busy_s * _UNSURE[kind]) ** 2 for kind, spent in self.kinds.items())
        variance += (self.grouped_s / busy_s * _UNSURE_GROUPS) ** 2
        variance += _UNSURE_FUSED**2 if timing.is_compiled else 0.0
        variance += _UNSURE_RANKS**2 if self.sent else 0.0
        return exp(_EIGHTY_PERCENT * sqrt(variance))

    def known(self, timing: Timing) -> tuple[ReachLevel, str]:
        """Return how well the device's reach is known where the step needs it, and by whom."""
        reach = timing.reach
        if reach.level is ReachLevel.CALIBRATED and self.decides not in reach.calibrated:
            return ReachLevel.GUESSED, reach.basis
        if self.guessed_s > _MOST_GUESSED * self.busy_s:
            unit = "in 16 bits" if reach.guessed == "tensor" else "in fp32"
            return ReachLevel.GUESSED, f"nobody measured it {unit}; guessed"
        return reach.level, reach.basis

    def assumed(self, timing: Timing) -> tuple[str, ...]:
        """Return what no measurement was held against."""
        is_alike = bool(self.sent) and timing.link is not None and not timing.link.is_measured
        texts = ((_FUSED_TEXT, timing.is_compiled), (_RANKS_TEXT, bool(self.sent)), (_ALIKE_TEXT, is_alike))
        return tuple(text for text, holds in texts if holds)


def step_time(step: Iterable[tuple[Operation, int]], timing: Timing, least_s: float) -> StepTime | None:
    """Return the time of a step, with its 80 % interval; None where the device's reach in a precision is not known.

    Host and device work side by side: in each phase the slower of both decides, and the device waits for the host of a
    phase that begins.

    Args:
        step: The operators of a step, and how often each ran.
        timing: Of the device.
        least_s: What the step takes at least, at the device's published peaks.
    """
    spent = _Spent()
    for one, times in step:
        if one.kind in _PRODUCTS and not timing.knows(one.precision):
            return None
        spent.add(one, times, timing)
    spent.show_collectives()
    busy_s = spent.busy_s
    if not busy_s:
        return None
    estimate_s = max(_pipelined(spent.busy, spent.host), least_s)
    level, basis = spent.known(timing)
    spread = spent.spread(level, timing)
    launch_bound_s = _SLOW_HOST * sum(spent.host.values())
    is_launch_bound = launch_bound_s > busy_s
    largest = sorted(spent.kinds.items(), key=lambda item: -item[1])
    return StepTime(
        estimate_s=estimate_s,
        low_s=max(estimate_s / spread, least_s),
        high_s=max(estimate_s * spread, launch_bound_s if is_launch_bound else 0.0),
        level=str(level),
        busy_share=min(1.0, busy_s / estimate_s),
        launch_bound_high_s=launch_bound_s if is_launch_bound else None,
        by_kind={str(kind): share / busy_s for kind, share in largest if kind is not Kind.VIEW},
        basis=basis,
        not_counted=_NOT_COUNTED,
        decides=spent.decides,
        assumed=spent.assumed(timing),
        optimizer_s=min(estimate_s, spent.busy[StepPhase.CLIP] + spent.busy[StepPhase.OPTIMIZER]),
    )


def fitted_reach(
    step: Collection[tuple[Operation, int]],
    timing: Callable[[DeviceReach], Timing],
    reach: DeviceReach,
    least_s: float,
    measured_s: float,
    batch_share: float,
) -> FittedReach:
    """Return the one number of a device with which a step takes as long as it was measured.

    Args:
        step: As of :func:`step_time`, as ``least_s``.
        timing: Gives the times of a device that reaches so much.
        batch_share: Elements of the mean batch, which was measured, where those of the step's are 1.
    """
    reach = reach if reach.tensor is not None else replace(reach, tensor=_SOME)
    told = step_time(step, timing(reach), least_s)
    if told is None:
        return FittedReach(quantity="", value=None, before=None, why="the step does nothing on the device")
    if told.busy_share < _LEAST_BUSY:
        why = f"the GPU is busy for {told.busy_share:.0%} of the step, the host decides: take a larger batch"
        return FittedReach(quantity=told.decides, value=None, before=None, why=why)

    def seconds(value: float) -> float:
        one = step_time(step, timing(replace(reach, **{told.decides: value})), least_s)
        assert one is not None
        return one.optimizer_s + (one.estimate_s - one.optimizer_s) * batch_share

    low, high = _SHARES_TRIED
    longest_s, shortest_s = seconds(low), seconds(high)
    before = getattr(reach, told.decides)
    if not shortest_s <= measured_s <= longest_s:
        why = f"a step would take {shortest_s:.3g} to {longest_s:.3g} s whatever the device reaches"
        return FittedReach(quantity=told.decides, value=None, before=before, why=why)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    return FittedReach(quantity=told.decides, value=(low + high) / 2, before=before)


def _pipelined(busy: Mapping[StepPhase, float], host: Mapping[StepPhase, float]) -> float:
    """Return when both are done, phase after phase in the order of a step."""
    host_s = device_s = 0.0
    for phase in StepPhase:
        if phase in busy:
            begins_s = max(device_s, host_s)
            host_s += host[phase]
            device_s = begins_s + busy[phase] if busy[phase] >= host[phase] else max(device_s + busy[phase], host_s)
    return max(host_s, device_s)
