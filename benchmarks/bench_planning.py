"""What planning costs: a first plan, the same again, every fallback of the ladder, a whole space; time and memory.

    python benchmarks/bench_planning.py [--rounds 3] [--only NAME]

Each plan is made in a child forked for it from a process that has imported everything, as the fork server makes them,
one at a time. The time is that of the planner in the child, beside the CPU time it took: on a machine that does other
things, trust the second. Encoders: 16 rows of 512 tokens, bf16. Qwen2.5-7B: adapters of rank 128, 1 row x 16 of 512
tokens, fp16, checkpointing.
"""

import argparse
import gc
import importlib
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dryfit.processes.channel import ChildChannel
from dryfit.processes.child_spec import PRELOAD, SERVE
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.plan_messages import PlanRequest
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training.plan_job import plan

DEVICE = DeviceSpec(name="made up", capacity_bytes=80 * 2**30, capability=(8, 0))
BASE_S, LARGE_S, ADAPTERS_S, CACHED_S = 4.0, 7.0, 12.0, 0.05
ENCODERS = {
    "bert-base-uncased": BASE_S,
    "roberta-base": BASE_S,
    "xlm-roberta-base": BASE_S,
    "microsoft/deberta-v3-base": BASE_S,
    "bert-large-uncased": LARGE_S,
    "roberta-large": LARGE_S,
    "microsoft/deberta-v3-large": LARGE_S,
}
DECODER = "Qwen/Qwen2.5-7B"
WITH_LADDER = ("bert-base-uncased", "bert-large-uncased")
"""Whose whole ladder is timed too: some forty traces each."""


@dataclass(frozen=True)
class Cost:
    """What one plan took."""

    wall_s: float
    cpu_s: float
    rss_mib: float


def request(model: str, folder: Path, *, every_fallback: bool) -> PlanRequest:
    """What is asked; a folder's second request finds the first one's traces."""
    is_decoder = model == DECODER
    train = {"batch_size": 16, "max_length": 512, "precision": "fp16" if is_decoder else "bf16"}
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": model}, "train": train}))
    lora = LoraSettings(r=128, alpha=256.0) if is_decoder else None
    subject = PlanSubject(
        task=BuiltInTask.CAUSAL_LM if is_decoder else BuiltInTask.CRITERIA, settings=settings, lora=lora
    )
    execution = ExecutionSettings(micro_batch=1, checkpointing=True) if is_decoder else ExecutionSettings()
    return PlanRequest(
        subjects=(subject,),
        device=DEVICE,
        execution=execution,
        trace_dir=str(folder / "traces"),
        every_fallback=every_fallback,
    )


def planned(body: PlanRequest) -> Cost:
    """Plan in a child made for it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        folder = Path(body.trace_dir).parent
        channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=time.monotonic())
        began_s = time.process_time()
        result = plan(body, channel)
        cost = [sum(answer.planner_s for answer in result.answers), time.process_time() - began_s]
        cost.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        os.write(write, json.dumps(cost).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return Cost(*json.loads(text))


def line(name: str, costs: list[Cost], limit_s: float | None) -> None:
    wall_s, cpu_s = (statistics.median(values) for values in zip(*((c.wall_s, c.cpu_s) for c in costs), strict=True))
    worst_s = max(cost.wall_s for cost in costs)
    rss_mib = statistics.median(cost.rss_mib for cost in costs)
    limit = f"   target {limit_s:g} s" if limit_s else ""
    print(
        f"{name:44s} {wall_s:7.3f} s (most {worst_s:.3f})   CPU {cpu_s:7.3f} s   {rss_mib:4.0f} MiB{limit}", flush=True
    )


def measure(model: str, what: str, rounds: int, limit_s: float | None, *, every_fallback: bool) -> None:
    """Plan for the first time and again, some times."""
    first: list[Cost] = []
    again: list[Cost] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            body = request(model, Path(folder), every_fallback=every_fallback)
            first.append(planned(body))
            again.append(planned(body))
    line(f"{model}{what}, first", first, limit_s)
    line(f"{model}{what}, again", again, CACHED_S)


def space(model: str, batches: tuple[int, ...], lengths: tuple[int, ...], folder: Path) -> PlanRequest:
    """Every batch size with every length."""
    body = request(model, folder, every_fallback=False)
    subject, settings = body.subjects[0], body.subjects[0].settings
    trains = [
        settings.train.model_copy(update={"batch_size": rows, "max_length": length})
        for rows, length in product(batches, lengths)
    ]
    subjects = (
        subject.model_copy(update={"settings": settings.model_copy(update={"train": train})}) for train in trains
    )
    return body.model_copy(update={"subjects": tuple(subjects)})


def measure_space(model: str, rounds: int) -> None:
    """A space of 25 batches at once, then 20 others between them, for which nothing is traced."""
    first: list[Cost] = []
    others: list[Cost] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            first.append(planned(space(model, (16, 24, 32, 48, 64), (256, 320, 384, 448, 512), Path(folder))))
            found = planned(space(model, (18, 28, 36, 60), (264, 288, 336, 400, 432), Path(folder)))
            others.append(Cost(found.wall_s / 20, found.cpu_s / 20, found.rss_mib))
    line(f"{model}, 25 batches at once", first, None)
    line(f"{model}, each of 20 others, mean", others, CACHED_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for children that plan
    for name in PRELOAD:
        if name != SERVE:
            importlib.import_module(name)
    gc.collect()
    gc.disable()  # as the fork server does
    gc.freeze()
    for model, limit_s in {**ENCODERS, DECODER: ADAPTERS_S}.items():
        if options.only not in model:
            continue
        measure(model, "", options.rounds, limit_s, every_fallback=False)
        if model in WITH_LADDER:
            measure(model, " with every fallback", 1, None, every_fallback=True)
            measure_space(model, options.rounds)


if __name__ == "__main__":
    main()
