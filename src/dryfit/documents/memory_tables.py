"""Memory at its peak, and what is required of a device, as tables."""

from typing import Final

from dryfit.settings.execution import MemoryPlan
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, Effect, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalMemory
from dryfit.settings.text import Table, gib

EFFECTS = {
    Effect.EXACT: "exact",
    Effect.NUMERICS: "equal up to rounding",
    Effect.SEMANTICS: "changes the experiment; never automatic",
}

VERDICT_STYLES: Final = {
    VerdictKind.FITS: "green",
    VerdictKind.FITS_WITH: "green",
    VerdictKind.REFUSED: "red",
    VerdictKind.UNKNOWN: "yellow",
}


def memory_table(memory: MemoryPlan | RehearsalMemory) -> Table:
    """Return the memory by category at the peak, and the peak of each phase."""
    largest_first = sorted(memory.by_category.items(), key=lambda item: -item[1])
    rows = [("at the peak", str(name), gib(size)) for name, size in largest_first if size]
    rows += [("peak of phase", str(name), gib(size)) for name, size in memory.by_phase.items() if size]
    return Table(("what", "of", "memory"), tuple(rows))


def requirement_table(device: DeviceSpec, memory: MemoryPlan | RehearsalMemory) -> Table:
    """Return the steps from the memory of tensors to the memory required of the device."""
    rows = [("peak allocated", memory.peak_allocated_bytes, "tensors")]
    if device.kind is DeviceKind.CUDA:
        outside, total = "CUDA context and libraries", "smallest cap + overhead + margin"
        rows += [
            ("peak reserved", memory.peak_reserved_bytes, "by the caching allocator where memory is plenty"),
            ("fragmented", memory.fragmented_bytes, "reserved but not allocated, at worst"),
            ("smallest cap", memory.min_cap_bytes, "the least the caching allocator gets through with"),
        ]
    else:
        outside, total = "Python, torch and transformers", "peak allocated + overhead + margin"
    nccl_bytes = memory.nccl_bytes if isinstance(memory, RehearsalMemory) else 0
    rows += [("NCCL", nccl_bytes, "buffers of its communicators, in the overhead")] if nccl_bytes else []
    rows += [
        ("overhead", memory.overhead_bytes, outside),
        ("margin", memory.margin_bytes, "kept free"),
        ("required", memory.required_bytes, total),
        ("device", device.capacity_bytes, device.name),
    ]
    if isinstance(memory, MemoryPlan) and memory.host_bytes:
        rows.append(("host", memory.host_bytes, "tensors kept off the device"))
    return Table(("what", "memory", "meaning"), tuple((name, gib(size), meaning) for name, size, meaning in rows))
