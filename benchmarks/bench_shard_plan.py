"""How long it takes to plan how a model is sharded: tiny models of each architecture, and BERT-large's shape.

    python benchmarks/bench_shard_plan.py [--degree 2]
    python benchmarks/bench_shard_plan.py --wide [--degree 2]

Everything is on the meta device. Said are seconds of this process's CPU and by the clock, how many parameters are
sharded, and the bytes of parameters a rank holds.

With --wide, trials' models of well-known sizes are planned and proved, each in a process of its own, by the clock and
by that process's largest resident memory; those that are too wide to be proved themselves on a narrower model.
"""

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from dryfit.meta import build
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import proof_bytes
from dryfit.parallel.proved_plans import proved_plan
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import PlanSubject
from dryfit.settings.tables import LoraSettings, ModelSettings, TrialSettings
from dryfit.training.step_tracer import step_parts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from rank_architectures import ARCHITECTURES, on_meta

_FP32_BYTES = 4


def bert_large() -> nn.Module:
    config = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    return build(lambda: BertForSequenceClassification(config))


def measured(name: str, module: nn.Module, degree: int) -> None:
    clock, cpu = time.perf_counter(), time.process_time()
    plan = plan_shards(module, degree)
    seconds, used = time.perf_counter() - clock, time.process_time() - cpu
    sharded = sum(shard.dim is not None for shard in plan.parameters.values())
    rows = [shard for shard in plan.parameters.values() if shard.tied_to is None]
    held_bytes = _FP32_BYTES * sum(math.prod(shard.local_shape(degree)) for shard in rows)
    print(
        f"{name:24s} {used:7.1f} s CPU {seconds:7.1f} s   {sharded:4d} of {len(plan.parameters):4d} sharded   "
        f"{held_bytes / 2**20:8.1f} MiB held"
    )


# Task and rank of adapters.
WIDE = (
    ("google-bert/bert-large-uncased", BuiltInTask.CRITERIA, 0),
    ("Qwen/Qwen2.5-0.5B", BuiltInTask.CAUSAL_LM, 0),
    ("Qwen/Qwen2.5-0.5B", BuiltInTask.CAUSAL_LM, 8),
    ("meta-llama/Llama-2-7b-hf", BuiltInTask.CAUSAL_LM, 0),
    ("meta-llama/Llama-2-7b-hf", BuiltInTask.CAUSAL_LM, 8),
    ("meta-llama/Llama-3.1-8B", BuiltInTask.CAUSAL_LM, 0),
    ("meta-llama/Llama-3.1-8B", BuiltInTask.CAUSAL_LM, 8),
)


def proved(index: int, degree: int) -> None:
    """Plan and prove one of WIDE in this process."""
    name, task, rank = WIDE[index]
    subject = PlanSubject(
        task=task, settings=TrialSettings(model=ModelSettings(name=name)), lora=LoraSettings(r=rank) if rank else None
    )
    clock = time.perf_counter()
    parts = step_parts(subject, checkpointing=False, reentrant=False)
    built = time.perf_counter() - clock
    with TemporaryDirectory() as folder:
        clock = time.perf_counter()
        made = proved_plan(parts.model, parts.task, degree, Path(folder))
        seconds = time.perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    narrowed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in made.proof.narrowed.items())
    print(
        f"{name:32s} r = {rank}: built {built:5.1f} s, planned and proved {seconds:5.1f} s (of which the proof itself "
        f"{made.proof.seconds:5.1f} s), peak {peak:4.1f} GiB; at full width the proof would take "
        f"{proof_bytes(parts.model, made.plan) / 2**30:5.1f} GiB; gradients {made.proof.gradient_error:.0e}, "
        f"parameters {made.proof.parameter_error:.0e}; narrowed: {narrowed or 'nothing'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--wide", action="store_true", help="plan and prove models of well-known sizes")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    degree = asked.degree
    if asked.only is not None:
        proved(asked.only, degree)
        return
    if asked.wide:
        for index in range(len(WIDE)):
            command = [sys.executable, __file__, "--only", str(index), "--degree", str(degree)]
            subprocess.run(command, check=True)
        print("load averages of the last 1, 5 and 15 minutes:", *(f"{load:.1f}" for load in os.getloadavg()))
        return
    for name in ARCHITECTURES:
        measured(name, on_meta(name), degree)
    measured("bert-large, 24 layers", bert_large(), degree)


if __name__ == "__main__":
    main()
