"""Settings of PyTorch's CUDA caching allocator, and the text of ``PYTORCH_ALLOC_CONF`` they are read from.

Options and their limits are those of torch 2.11 to 2.13: ``c10/core/AllocatorConfig.{h,cpp}`` and
``c10/cuda/CUDAAllocatorConfig.{h,cpp}``. A contract test asks the installed torch whether it still agrees.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import Allocator

MIB = 2**20
MIN_BLOCK_BYTES = 512
"""Every size is rounded up to a multiple of it (``kMinBlockSize``)."""
SMALL_BYTES = MIB
"""The largest request that is served from the pool of small blocks (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Small blocks are cut from segments of this size (``kSmallBuffer``)."""
LARGE_REQUEST_BYTES = 10 * MIB
"""From here on a request gets a segment of its own (``kMinLargeAlloc``)."""
LARGE_ROUNDING_BYTES = 2 * MIB
"""The size of such a segment is a multiple of it (``kRoundLarge``)."""
INTERVALS = 16
"""Powers of two from 1 MiB on, each with its own count of divisions (``kRoundUpPowerOfTwoIntervals``)."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user says how the device's allocator works; the first one that is set counts."""

_DOING = "reading allocator settings"
_LARGE_SEGMENT = "large_segment_size_mb"
_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_ACTING = (
    "backend",
    "expandable_segments",
    _LARGE_SEGMENT,
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
_SWITCHES = (
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_free_catch_all",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)
_COUNTS = (
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings that decide where the caching allocator puts a block.

    Attributes:
        expandable_segments: Segments grow page by page instead of being taken from the driver whole.
        max_split_bytes: Free blocks from this size on are never cut; None where all may be.
        roundup_power2_divisions: Into how many steps a request is rounded between two powers of two: the first
            entry below 2 MiB, the next below 4 MiB, and so on. 0 and 1 leave the rounding to 512 bytes.
        gc_threshold: Share of the capacity above which cached segments are given back by age; None for never.
        large_segment_bytes: Segment (or page, where they expand) of requests above 1 and below 10 MiB.
        max_non_split_rounding_bytes: A block that must not be cut serves requests smaller than it by less than this.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    gc_threshold: float | None = None
    large_segment_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int = 20 * MIB

    @staticmethod
    def of(allocator: Allocator) -> "AllocatorSettings":
        """Return the settings of a trial's process whose user has set none."""
        return AllocatorSettings(expandable_segments=allocator is Allocator.EXPANDABLE)

    @staticmethod
    def of_environment(environment: Mapping[str, str], default: "AllocatorSettings") -> "AllocatorSettings":
        """Return the settings that a user's variables ask for, or others where none is set.

        Raises:
            ConfigError: As :meth:`parse`.
        """
        text = next((environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)), None)
        return default if text is None else AllocatorSettings.parse(text)

    @staticmethod
    def parse(text: str) -> "AllocatorSettings":
        """Read the text of ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``.

        Options that only concern pinned memory, locks or CUDA graphs are checked and have no effect here.

        Raises:
            ConfigError: An option is unknown, or its value is one that torch refuses, or the backend is one
                that has no caching allocator of torch's.
        """
        settings = AllocatorSettings()
        # As in torch, the size of large segments is read first: other limits depend on it.
        for name, value in sorted(_options(text), key=lambda option: option[0] != _LARGE_SEGMENT):
            settings = _apply(settings, name, value)
        return settings

    def round_request(self, requested_bytes: int) -> int:
        """Return the bytes that a request is rounded up to (``round_size``)."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(requested_bytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            # As in roundup_power2_next_division: powers of two are steps themselves.
            step = 1 << (requested_bytes.bit_length() - divisions.bit_length())
            return -(-requested_bytes // step) * step
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, rounded_bytes: int) -> int:
        """Return the size of the segment for a rounded request without a cached block (``get_allocation_size``)."""
        if rounded_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < LARGE_REQUEST_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


def _options(text: str) -> list[tuple[str, list[str]]]:
    """Split a text into names and the tokens of their values; blanks mean nothing, as in torch's tokenizer."""
    options: list[tuple[str, list[str]]] = []
    depth = 0
    pending: list[str] = []
    for token in [*_TOKEN.findall("".join(text.split())), ","]:
        depth += (token == "[") - (token == "]")
        if token != "," or depth > 0:
            pending.append(token)
            continue
        if pending:
            if len(pending) < 3 or pending[1] != ":" or depth < 0:
                raise ConfigError(
                    _DOING, f"{''.join(pending)!r}", "name:value pairs with commas between", "max_split_size_mb:512"
                )
            options.append((pending[0], pending[2:]))
        pending = []
    if pending:
        raise ConfigError(_DOING, f"{''.join(pending)!r}", "a bracket that is opened is closed")
    return options


def _apply(settings: AllocatorSettings, name: str, value: list[str]) -> AllocatorSettings:
    match name:
        case "backend":
            _check_backend(name, value)
        case "expandable_segments":
            return replace(settings, expandable_segments=_switch(name, value))
        case "large_segment_size_mb":
            size_bytes = _count(name, value) * MIB
            if size_bytes <= LARGE_REQUEST_BYTES:
                raise _refuse(name, value, f"more than {LARGE_REQUEST_BYTES // MIB}")
            return replace(settings, large_segment_bytes=size_bytes, max_non_split_rounding_bytes=size_bytes)
        case "max_split_size_mb":
            return replace(settings, max_split_bytes=_at_least_a_segment(settings, name, value))
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=_at_least_a_segment(settings, name, value))
        case "garbage_collection_threshold":
            share = _fraction(name, value)
            if not 0 < share < 1:
                raise _refuse(name, value, "a number above 0 and below 1")
            return replace(settings, gc_threshold=share)
        case "per_process_memory_fraction":
            share = _fraction(name, value)
            if not 0 <= share <= 1:
                raise _refuse(name, value, "a number from 0 to 1")
        case "roundup_power2_divisions":
            return replace(settings, roundup_power2_divisions=_divisions(name, value))
        case _ if name in _SWITCHES:
            _switch(name, value)
        case _ if name in _COUNTS:
            _count(name, value)
        case _:
            known = sorted({*_ACTING, *_SWITCHES, *_COUNTS})
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise ConfigError(_DOING, f"the option {name!r}", ", ".join(known), hint)
    return settings


def _refuse(name: str, value: list[str], allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(_DOING, f"{name}:{''.join(value)}", allowed, hint)


def _switch(name: str, value: list[str]) -> bool:
    if value not in (["True"], ["False"]):
        raise _refuse(name, value, "True or False, written like this")
    return value == ["True"]


def _count(name: str, value: list[str], part: str | None = None) -> int:
    """Read a value, or a part of it, as a number."""
    text = "".join(value) if part is None else part
    if re.fullmatch(r"\d{1,15}", text) is None:
        raise _refuse(name, value, "a whole number")
    return int(text)


def _fraction(name: str, value: list[str]) -> float:
    try:
        return float("".join(value))
    except ValueError:
        raise _refuse(name, value, "a number between 0 and 1") from None


def _check_backend(name: str, value: list[str]) -> None:
    match value:
        case ["native"]:
            return
        case ["cudaMallocAsync" | "hipMallocAsync"]:
            hint = "plan with backend:native; the driver's own allocator does not publish how it places memory"
            raise _refuse(name, value, "native, which can be simulated", hint)
        case _:
            raise _refuse(name, value, "native or cudaMallocAsync")


def _at_least_a_segment(settings: AllocatorSettings, name: str, value: list[str]) -> int:
    size_bytes = _count(name, value) * MIB
    if size_bytes < settings.large_segment_bytes:
        raise _refuse(name, value, f"at least {settings.large_segment_bytes // MIB}, the size of a large segment")
    return size_bytes


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _divisions(name: str, value: list[str]) -> tuple[int, ...]:
    """Read one count for all intervals, or a table such as ``[256:1,512:2,>:8]``."""
    if value[0] != "[":
        divisions = _count(name, value)
        if not _is_power_of_two(divisions):
            raise _refuse(name, value, "a power of two, or a table such as [256:1,512:2,>:8]")
        return (divisions,) * INTERVALS
    table = [0] * INTERVALS
    last = 0
    first = True
    for entry in "".join(value[1:-1]).split(","):
        bound, _, count = entry.partition(":")
        divisions = _count(name, value, count)
        if divisions != 0 and not _is_power_of_two(divisions):
            raise _refuse(name, value, "divisions that are 0 or a power of two")
        if bound == ">":
            table[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        megabytes = _count(name, value, bound)
        if not _is_power_of_two(megabytes):
            raise _refuse(name, value, "intervals that are a power of two, in MB, or > for all above")
        index = min(megabytes.bit_length() - 1, INTERVALS - 1)
        if first:
            table[:index] = [divisions] * index
            first = False
        table[index] = divisions
        last = index
    return tuple(table)
