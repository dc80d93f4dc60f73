"""What a rank of a language model takes and sends with its scores sharded, put together, and with its vocabulary whole.

    python benchmarks/bench_sharded_scores.py [--rows 4] [--length 512]

Nothing is computed: one rank's step is traced on a device that is not there, in bf16 with frozen weights in fp16 beside
adapters or with all weights trained, without checkpointing. A row "whole" is the plan that is made where the loss needs
all scores at once; "put together" shards the vocabulary all the same; "stay sharded" is what a trial does.
"""

import argparse
import tempfile
from pathlib import Path
from unittest import mock

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.parallel import proved_plans as sharding
from dryfit.parallel.proved_plans import ShardPlans
from dryfit.plans.timeline import end_bytes, peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.sharding import ShardPlan
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training.step_tracer import StepTracer, whole_model
from dryfit.training.trainer import evaluation_rows

MODELS = (
    # name, rank of adapters
    ("Qwen/Qwen2.5-0.5B", 0),
    ("meta-llama/Llama-2-7b-hf", 8),
)
DEVICE = DeviceSpec(name="24 GiB", kind=DeviceKind.CUDA, capacity_bytes=24 << 30, capability=(8, 0))
MIB = 1 << 20


def subject(name: str, rank: int) -> PlanSubject:
    """What is trained."""
    settings = TrialSettings.model_validate({"model": {"name": name}, "train": {"precision": "bf16"}}, strict=False)
    lora = LoraSettings(r=rank, base=BaseFormat.FP16) if rank else None
    return PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=lora)


def plans(what: PlanSubject, folder: Path) -> dict[str, ShardPlan]:
    """The plan of a trial, the same with its scores put together, and one that is made without its loss."""
    apart = ShardPlans(folder, whole_model).plan(what, 2)
    with mock.patch.object(sharding, "over_tokens", return_value=None):
        before = ShardPlans(folder, whole_model).plan(what, 2)
    together = apart.model_copy(update={"scores": None})
    if apart.scores is None:
        raise SystemExit(f"the scores of {what.settings.model.name} do not stay sharded")
    is_whole = before.parameters[f"{apart.scores}.weight"].dim is None
    return ({"whole": before} if is_whole else {}) | {"put together": together, "stay sharded": apart}


def main() -> None:
    """Print a table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--rows", type=int, default=4)
    asked.add_argument("--length", type=int, default=512)
    given = asked.parse_args()
    micro = Shape(given.rows, given.length)
    validated = Shape(evaluation_rows(given.rows), given.length)
    print(f"2 ranks; a micro-batch of {micro.rows} x {micro.length}, a validation batch of {validated.rows} rows; MiB")
    print("| model | vocabulary | weights | micro-batch | validation | sent forward | sent backward |")
    print("|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, rank in MODELS:
            what = subject(name, rank)
            for how, plan in plans(what, Path(folder)).items():
                tracer = StepTracer(what, DEVICE, plan=plan)
                found = (
                    end_bytes(tracer.trace(SegmentKind.LOAD, Variant(), None), ""),
                    peak_bytes(tracer.trace(SegmentKind.MICRO_FIRST, Variant(), micro)),
                    peak_bytes(tracer.trace(SegmentKind.EVALUATE, Variant(), validated)),
                )
                sent = tracer.sent(Variant(), micro)
                figures = " | ".join(f"{one / MIB:,.1f}" for one in (*found, sent.forward_bytes, sent.backward_bytes))
                print(f"| {name}{f', adapters of rank {rank}' if rank else ''} | {how} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
