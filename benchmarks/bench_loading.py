"""What giving a model its weights costs, checks included: mapped against safetensors, private against a raw read.

    python benchmarks/bench_loading.py [--rounds 15] [--layers 24]

BERT-large in fp32, one file. Each variant of each round runs in a child forked for it, so that its peak of memory is
its own; the rounds take turns, so that a busy machine is busy for all. Every page is touched: what is only promised
costs at the first step instead. The empty models are built before the clock starts; what that takes is printed last.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from measured import spread
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from dryfit.meta.construction import build
from dryfit.meta.filling import materialise
from dryfit.meta.reading import ReadMode

PAGE_FLOATS = 4096 // 4


@dataclass(frozen=True)
class Run:
    wall_s: float
    cpu_s: float
    added_bytes: int


def touch(module: nn.Module) -> float:
    return sum(float(tensor.detach().view(-1)[::PAGE_FLOATS].sum()) for tensor in module.parameters())


def library_mapped(module: BertModel, path: Path) -> object:
    module.load_state_dict(load_file(path), assign=True, strict=False)
    return touch(module)


def ours_mapped(module: BertModel, path: Path) -> object:
    materialise(module, path, mode=ReadMode.MAPPED)
    return touch(module)


def raw_private(_: BertModel, path: Path) -> object:
    buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
    memory, done = buffer.numpy().data, 0
    with path.open("rb", buffering=0) as file:
        while done < len(memory):
            done += file.readinto(memory[done:])
    return buffer


def ours_private(module: BertModel, path: Path) -> object:
    materialise(module, path)
    return touch(module)


VARIANTS: dict[str, Callable[[BertModel, Path], object]] = {
    "a  load_file + assign": library_mapped,
    "b  dryfit, mapped": ours_mapped,
    "c  raw read, private": raw_private,
    "d  dryfit, private": ours_private,
}


def empty_model(variant: Callable[..., object], config: BertConfig) -> BertModel:
    if variant is library_mapped:
        with torch.device("meta"):
            return BertModel(config)
    return build(lambda: BertModel(config))


def resident_bytes(field: str) -> int:
    """A line of /proc/self/status; where there is none (macOS), the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measure(variant: Callable[[BertModel, Path], object], config: BertConfig, path: Path) -> Run:
    """Run a variant in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            module = empty_model(variant, config)
            before_bytes = resident_bytes("VmRSS")
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            kept = variant(module, path)
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
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child forked from a process with a pool of threads would wait for them
    with tempfile.TemporaryDirectory() as temporary:
        config = BertConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=options.layers, num_attention_heads=16
        )
        BertModel(config).save_pretrained(temporary)
        path = Path(temporary) / "model.safetensors"
        size_bytes = path.stat().st_size
        for variant in VARIANTS.values():  # the page cache, and code that loads at its first use
            measure(variant, config, path)
        runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
        for _ in range(options.rounds):
            for name, variant in VARIANTS.items():
                runs[name].append(measure(variant, config, path))
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
    print_builds()


def print_builds() -> None:
    """What models without memory take."""
    bert = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
    llama = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    for cls, config in ((BertModel, bert), (LlamaForCausalLM, llama)):
        times, before_bytes = [], resident_bytes("VmRSS")
        for _ in range(5):
            began_s = time.perf_counter()
            model = build(partial(cls, config))
            times.append(time.perf_counter() - began_s)
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
        added_mb = (resident_bytes("VmRSS") - before_bytes) / 1e6
        print(
            f"build {cls.__name__}, {count:.2f} billion parameters: {spread(times, ' s')}, added RSS {added_mb:.1f} MB"
        )


if __name__ == "__main__":
    main()
