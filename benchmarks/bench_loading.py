"""What reading a checkpoint costs, checks included: mapped against safetensors, private copies against a raw read.

    python benchmarks/bench_loading.py [--rounds 15] [--size-mb 1300]

One file of fp32 weights in the shapes of BERT-large. Each variant of each round runs in a child forked for it, so
that its peak of memory is its own; the rounds take turns, so that a busy machine is busy for all. Every page is
touched: what is only promised costs at the first step instead.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measured import spread
from safetensors.torch import load_file, save_file

from dryfit.meta.checkpoint import open_checkpoint
from dryfit.meta.reading import CheckpointReader, ReadMode

PAGE_FLOATS = 4096 // 4
WIDTH, VOCABULARY, POSITIONS = 1024, 30522, 512


@dataclass(frozen=True)
class Run:
    wall_s: float
    cpu_s: float
    added_bytes: int


def weights(size_mb: int) -> dict[str, torch.Tensor]:
    """As many layers of BERT-large as fit; the whole model is 1 300 MB."""
    shapes = {"embeddings.words": (VOCABULARY, WIDTH), "embeddings.positions": (POSITIONS, WIDTH)}
    layer = {f"attention.{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    layer |= {f"attention.{name}.bias": (WIDTH,) for name in ("query", "key", "value", "output")}
    layer |= {"up.weight": (4 * WIDTH, WIDTH), "up.bias": (4 * WIDTH,)}
    layer |= {"down.weight": (WIDTH, 4 * WIDTH), "down.bias": (WIDTH,)}
    layer |= {f"{norm}.{name}": (WIDTH,) for norm in ("norm1", "norm2") for name in ("weight", "bias")}
    layer_mb = sum(torch.Size(shape).numel() for shape in layer.values()) * 4 / 1e6
    for number in range(max(1, round((size_mb - 127) / layer_mb))):
        shapes |= {f"layer.{number}.{name}": shape for name, shape in layer.items()}
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


def touch(tensors: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.view(-1)[::PAGE_FLOATS].sum()) for tensor in tensors.values())


def library_mapped(path: Path) -> object:
    tensors = load_file(path)
    touch(tensors)
    return tensors


def ours(path: Path, mode: ReadMode) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    with CheckpointReader(checkpoint, mode) as reader:
        tensors = dict(reader.tensors(checkpoint.tensors))
    reader.guard().check()
    return tensors


def ours_mapped(path: Path) -> object:
    tensors = ours(path, ReadMode.MAPPED)
    touch(tensors)
    return tensors


def raw_private(path: Path) -> object:
    buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
    memory, done = buffer.numpy().data, 0
    with path.open("rb", buffering=0) as file:
        while done < len(memory):
            done += file.readinto(memory[done:])
    return buffer


def ours_private(path: Path) -> object:
    tensors = ours(path, ReadMode.PRIVATE)
    touch(tensors)
    return tensors


VARIANTS: dict[str, Callable[[Path], object]] = {
    "a  safetensors.load_file": library_mapped,
    "b  dryfit, mapped": ours_mapped,
    "c  raw read, private": raw_private,
    "d  dryfit, private": ours_private,
}


def resident_bytes(field: str) -> int:
    """A line of /proc/self/status; where there is none (macOS), the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(variant: Callable[[Path], object], path: Path) -> Run:
    """Run a variant in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before_bytes = resident_bytes("VmRSS")
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            kept = variant(path)
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            added_bytes = resident_bytes("VmHWM") - before_bytes
            os.write(writing, f"{wall_s} {cpu_s} {added_bytes}".encode())
            del kept
        finally:
            os._exit(0)  # what failed has written nothing
    os.close(writing)
    with os.fdopen(reading) as answer:
        words = answer.read().split()
    os.waitpid(child, 0)
    if not words:
        raise RuntimeError(f"{variant.__name__} failed")
    return Run(float(words[0]), float(words[1]), int(words[2]))


def ratio(upper: list[Run], lower: list[Run], field: str) -> float:
    medians = [statistics.median(getattr(run, field) for run in runs) for runs in (upper, lower)]
    return medians[0] / medians[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size-mb", type=int, default=1300)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child forked from a process with a pool of threads would wait for them
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.safetensors"
        save_file(weights(options.size_mb), path)
        size_bytes = path.stat().st_size
        for variant in VARIANTS.values():  # the page cache, and code that loads at its first use
            measure(variant, path)
        runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
        for _ in range(options.rounds):
            for name, variant in VARIANTS.items():
                runs[name].append(measure(variant, path))
    print(
        f"{size_bytes / 1e9:.2f} GB, {options.rounds} rounds, page cache warm, every page touched; median (min to max)"
    )
    for name, of in runs.items():
        wall = spread([run.wall_s for run in of], " s")
        cpu = spread([run.cpu_s for run in of], " s")
        peak = statistics.median(run.added_bytes for run in of) / size_bytes
        print(f"{name:26} wall {wall:24} cpu {cpu:24} peak added RSS {peak:.3f} of the file")
    a, b, c, d = runs.values()
    for name, upper, lower in (("mapped / load_file (b / a)", b, a), ("private / raw read (d / c)", d, c)):
        print(f"{name}: wall {ratio(upper, lower, 'wall_s'):.2f}, cpu {ratio(upper, lower, 'cpu_s'):.2f} (target 1.2)")


if __name__ == "__main__":
    main()
