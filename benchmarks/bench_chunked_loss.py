"""A language model's step with the loss of all scores, and with the loss in chunks of tokens: time, and what they take.

    python benchmarks/bench_chunked_loss.py [--repeats 7]

A model of one narrow layer, so that head and loss are nearly all of the step, in fp32 on the CPU: forward and backward
of one micro-batch, in turn with and without chunks, in one process. Times are medians of wall and CPU seconds, of each
and of the ratios of neighbours; the memory is the traced step's peak beside what lives before it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.timeline import peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training.measured_step import fill
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.step_tracer import StepTracer, SubjectSteps, step_parts

CASES = (
    # words, rows, length, rank of adapters (0: all weights are trained)
    (32_000, 8, 512, 0),
    (32_000, 8, 512, 8),
    (151_936, 4, 256, 0),
    (151_936, 4, 256, 8),
)
CPU = DeviceSpec(name="cpu", kind=DeviceKind.CPU, capacity_bytes=2**40)
MIB = 1 << 20


def subject(folder: Path, words: int, rank: int) -> PlanSubject:
    """What is trained."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=words, intermediate_size=512, pad_token_id=0, **sizes)
    config.save_pretrained(folder)
    settings = TrialSettings.model_validate({"model": {"name": str(folder)}})
    return PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=LoraSettings(r=rank) if rank else None)


def seconds(steps: SubjectSteps, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Time one micro-batch: wall, CPU."""
    steps.parts.model.zero_grad()
    wall, cpu = time.perf_counter(), time.process_time()
    steps.micro(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print a table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--repeats", type=int, default=7)
    repeats = asked.parse_args().repeats
    print("words, tokens, trained | whole: wall, CPU, MiB | in chunks: wall, CPU, MiB | ratio of wall, CPU")
    for words, rows, length, rank in CASES:
        with tempfile.TemporaryDirectory() as folder:
            what = subject(Path(folder), words, rank)
            tracer, taken, ready = StepTracer(what, CPU), list[int](), list[SubjectSteps]()
            for chunked in (False, True):
                segment = tracer.trace(SegmentKind.MICRO_FIRST, Variant(chunked_loss=chunked), Shape(rows, length))
                taken.append(peak_bytes(segment) // MIB)
                parts = step_parts(what, checkpointing=False, reentrant=False, chunked_loss=chunked)
                fill(parts.model, "cpu")
                ready.append(SubjectSteps(parts, DeviceKind.CPU, OptimizerPlan()))
        batch = {name: values.random_(0, 1000) for name, values in ready[0].batch(Shape(rows, length)).items()}
        batch["attention_mask"].fill_(1)
        for steps in ready:
            seconds(steps, batch)
        pairs = [tuple(seconds(steps, batch) for steps in ready) for _ in range(repeats)]
        of = [[statistics.median(pair[which][kind] for pair in pairs) for kind in (0, 1)] for which in (0, 1)]
        ratios = [statistics.median(after[kind] / before[kind] for before, after in pairs) for kind in (0, 1)]
        texts = [f"{wall:.2f} s, {cpu:.2f} s, {size}" for (wall, cpu), size in zip(of, taken, strict=True)]
        trained = f"adapters of rank {rank}" if rank else "all weights"
        print(
            f"{words}, {rows} x {length}, {trained} | {' | '.join(texts)} | {ratios[0]:.2f}, {ratios[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
