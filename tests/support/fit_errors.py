"""How far segments from a few traces are from traces, found in a process of its own: the patches of torch stay.

``python fit_errors.py MODEL ROWS,... LENGTH,... ROWSxLENGTH,... [any]`` takes the rows and the lengths of the
traces that make the fit and the shapes to compare at, and prints JSON: for each shape the relative errors of peak
allocated and of peak reserved (native and expandable segments) over two steps, or null where the fit does not speak
for the shape. ``any`` makes it speak for every shape.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from unittest import mock

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import replay
from dryfit.gpu.events import Segment, SegmentKind, Shape
from dryfit.plans.timeline import compose
from dryfit.plans.trace_store import FitPlan, SegmentFit, fit
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training.step_tracer import StepTracer

AMPERE = DeviceSpec(name="made up", capacity_bytes=2**40, capability=(8, 0))
WORKSPACE_BYTES = 8_519_680
Errors = dict[str, tuple[float, float, float] | None]


def subject(model: str) -> PlanSubject:
    """A decoder gets adapters, an encoder a head."""
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": model}, "train": {"precision": "bf16"}}))
    is_decoder = "Qwen" in model
    lora = LoraSettings(r=16) if is_decoder else None
    return PlanSubject(task=BuiltInTask.CAUSAL_LM if is_decoder else BuiltInTask.CRITERIA, settings=settings, lora=lora)


def sizes(tracer: StepTracer, micro: Segment, shape: Shape) -> tuple[int, int, int]:
    """Peaks of two steps: allocated, reserved in native and in expandable segments."""

    def traced(kind: SegmentKind) -> Segment:
        return tracer.trace(kind, Variant(), shape if kind.has_shape else None)

    steps = [[traced(SegmentKind.BATCH), micro, traced(k)] for k in (SegmentKind.UPDATE_FIRST, SegmentKind.UPDATE)]
    run = compose([[traced(SegmentKind.LOAD)], *steps], workspace_bytes=WORKSPACE_BYTES)
    blocks, deltas = run.blocks.tolist(), run.deltas.tolist()
    native, expandable = (replay(blocks, deltas, AllocatorSettings(expandable_segments=grow)) for grow in (False, True))
    return native.peak_allocated_bytes, native.peak_reserved_bytes, expandable.peak_reserved_bytes


def errors(model: str, rows: Sequence[int], lengths: Sequence[int], shapes: Sequence[Shape]) -> Errors:
    """Errors at each shape."""
    tracer = StepTracer(subject(model), AMPERE)

    def micro(shape: Shape) -> Segment:
        return tracer.trace(SegmentKind.MICRO_FIRST, Variant(), shape)

    plan = FitPlan(tuple(rows), tuple(lengths), ())
    made = fit(plan, {node: micro(node) for node in plan.nodes})
    assert made is not None, "the traces of the nodes differ in more than sizes"
    found: Errors = {}
    for shape in shapes:
        guess = made.at(shape)
        if guess is None:
            found[f"{shape.rows}x{shape.length}"] = None
            continue
        pairs = zip(sizes(tracer, guess, shape), sizes(tracer, micro(shape), shape), strict=True)
        allocated, native, expandable = (guessed / true - 1 for guessed, true in pairs)
        found[f"{shape.rows}x{shape.length}"] = (allocated, native, expandable)
    return found


def main() -> None:
    model, rows, lengths, shapes, *rest = sys.argv[1:]
    asked = [Shape(*map(int, shape.split("x"))) for shape in shapes.split(",")]
    nodes = [[int(number) for number in numbers.split(",")] for numbers in (rows, lengths)]
    if rest == ["any"]:
        with mock.patch.object(SegmentFit, "covers", return_value=True):
            print(json.dumps(errors(model, *nodes, asked)))
    else:
        print(json.dumps(errors(model, *nodes, asked)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
