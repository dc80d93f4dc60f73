"""Facts about fake CUDA tensors, found in a process of their own: the patches stay for the life of a process.

``python fake_cuda_facts.py`` reads requests, ``["NAME", "ARGUMENT"...]`` as JSON and one a line, and answers each with
a line of JSON. It imports the libraries once and touches nothing of theirs: each fact is found by a fork of it.
"""

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.device import VirtualGpu
from dryfit.gpu.events import Segment, SegmentKind, Shape
from dryfit.gpu.fake_cuda import FakeDevice, StandIns, why_not
from dryfit.gpu.recorder import StorageRecorder
from dryfit.gpu.slots import like, put_all
from dryfit.plans.timeline import compose
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.errors import TraceError
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import Confidence, DeviceKind, DeviceSpec, OptimizerImpl, StepPhase
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training import step_tracer as tracing
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.step_tracer import SubjectSteps, step_parts

AMPERE = DeviceSpec(name="made up", capacity_bytes=2**40, capability=(8, 0))
SHAPE = Shape(rows=4, length=48)


def subject(model: str, *, lora: bool = False, **tables: Any) -> PlanSubject:
    """What is to be trained."""
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": model}, **tables}))
    if not lora:
        return PlanSubject(task=BuiltInTask.CRITERIA, settings=settings)
    return PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=LoraSettings(r=128, alpha=256.0))


def selftest() -> Any:
    """Why fake tensors cannot be used here, and what torch says of CUDA all the same."""
    return {"why_not": why_not(), "available": torch.cuda.is_available(), "initialized": torch.cuda.is_initialized()}


def attention() -> Any:
    """The autograd node of attention in several situations, and whether it survives a recomputation in backward."""
    found = {}
    for capability in ((7, 0), (8, 0), (9, 0)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for masked in (False, True):
                device = FakeDevice("cuda", capability=capability)
                with device.active():
                    query, key, value = (
                        torch.empty(2, 4, 24, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
                    )
                    mask = torch.empty(2, 1, 24, 24, device="cuda", dtype=torch.bool) if masked else None
                    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)
                    out.sum().backward()
                    node: Any = out.grad_fn
                    name = "-".join((*map(str, capability), str(dtype).removeprefix("torch."), str(masked)))
                    found[name] = type(node).__name__ if query.grad is not None else "no gradient"
    return found


class Operators(TorchDispatchMode):
    """Notes the operators that make tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.prim.device.default, torch.ops.aten.detach.default):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def activations() -> Any:
    """Operators that CUDA has a kernel of its own for: activations, backwards, and a norm, both ways."""
    found: dict[str, list[str]] = {}
    for name in ("silu", "mish"):
        with FakeDevice("cuda").active():
            tensor = torch.empty(8, 8, device="cuda", requires_grad=True)
            out = getattr(nn.functional, name)(tensor)
            gradient = torch.ones_like(out)
            with Operators() as seen:
                torch.autograd.grad(out, tensor, gradient)
        found[name] = seen.names
    with FakeDevice("cuda").active():
        tensor = torch.empty(8, 8, device="cuda", requires_grad=True)
        norm = nn.RMSNorm(8, device="cuda")
        with Operators() as seen:
            torch.autograd.grad(norm(tensor), (tensor, norm.weight), torch.ones_like(tensor))
    found["rms_norm"] = [name for name in seen.names if name != "aten::ones_like"]
    return found


def composed(model: str, precision: str, checkpointing: str, optimizer: str) -> Any:
    """Peaks of two steps and a validation put together from segments, and of the same recorded in one piece."""
    asked = subject(model, train={"precision": precision}, optim={"name": optimizer})
    variant = Variant(checkpointing=checkpointing == "yes", optimizer_impl=OptimizerImpl.AUTO)
    tracer = tracing.StepTracer(asked, AMPERE)

    def segment(kind: SegmentKind) -> Segment:
        return tracer.trace(kind, variant, SHAPE if kind.has_shape else None)

    step = (SegmentKind.BATCH, SegmentKind.MICRO_FIRST, SegmentKind.MICRO_NEXT)
    first = [segment(kind) for kind in (*step, SegmentKind.UPDATE_FIRST)]
    later = [segment(kind) for kind in (*step, SegmentKind.UPDATE)]
    run = compose([[segment(SegmentKind.LOAD)], first, later, [segment(SegmentKind.EVALUATE)]])
    return {
        "composed": {phase.value: size for phase, size in run.by_phase(rounded=False).items()},
        "recorded": recorded(asked, variant),
    }


def recorded(asked: PlanSubject, variant: Variant) -> dict[str, int]:
    """The peak of each phase of two steps of two micro-batches and a validation, run one after another."""
    gpu = VirtualGpu(AMPERE, unlimited=True, constants=DeviceConstants(0, 0, Confidence.UNCALIBRATED))
    recorder = gpu.dispatch
    recorder.processors = None

    def phase(now: StepPhase) -> None:
        recorder.phase = now

    parts = step_parts(asked, checkpointing=variant.checkpointing, reentrant=False)
    with gpu.stepping():
        put_all(parts.model, lambda slot: like(slot.tensor, "cuda"))
        steps = SubjectSteps(parts, DeviceKind.CUDA, OptimizerPlan(impl=variant.optimizer_impl), phase)
        for _ in range(2):
            phase(StepPhase.FORWARD)
            batch = steps.batch(SHAPE)
            for _ in range(2):
                steps.micro(batch)
            steps.update()
            del batch
        phase(StepPhase.EVALUATE)
        steps.evaluate(steps.batch(SHAPE))
    run, live, peaks = gpu.allocations, 0, dict.fromkeys(StepPhase, 0)
    for delta, label in zip(run.deltas, run.labels, strict=True):
        live += delta
        now = run.label_table[label].phase
        peaks[now] = max(peaks[now], live)
    return {phase.value: size for phase, size in peaks.items()}


def followed(model: str) -> Any:
    """Whether a model that runs beside a trace is followed too, and whether the traced one was."""
    tracer = tracing.StepTracer(subject(model), AMPERE)
    micro = tracer.trace(SegmentKind.MICRO_FIRST, Variant(), SHAPE)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    recorder: Any = tracing._virtual_gpu(AMPERE.capability).recorder
    traced = any(label.module.startswith("encoder.") for label in micro.label_table)
    return {"traced": traced, "other": other in recorder._roots or optimizer in recorder._optimizers}


def offloaded(model: str) -> Any:
    """Sizes of what layers are recomputed from in host memory, and what the device holds as backward begins."""
    tracer = tracing.StepTracer(subject(model, train={"precision": "bf16"}), AMPERE)
    found: dict[str, Any] = {}
    for name, moved in (("kept", False), ("moved", True), ("kept again", False)):
        variant = Variant(checkpointing=True, offload_activations=moved)
        micro = tracer.trace(SegmentKind.MICRO_FIRST, variant, SHAPE)
        phases = [micro.label_table[label].phase for label in micro.labels]
        found[name] = sum(micro.deltas[: phases.index(StepPhase.BACKWARD)])
    host = tracer.trace(SegmentKind.MICRO_HOST, Variant(checkpointing=True, offload_activations=True), SHAPE)
    found["host"] = [delta for delta in host.deltas if delta > 0]
    found["left on the host"] = sum(host.deltas)
    return found


def refused(kind: str) -> Any:
    """How a model that cannot be traced is refused."""

    class Values(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return (
                tokens[tokens.flatten().bincount().numel() :] if kind == "values" else torch.ops.made_up.kernel(tokens)
            )

    with torch.library._scoped_library("made_up", "DEF") as library:
        library.define("kernel(Tensor x) -> Tensor")
        library.impl("kernel", lambda x: x + 1, "CUDA")
        device, recorder = FakeDevice("cuda"), StorageRecorder("cuda", kernels=True)
        try:
            with device.active(), StandIns(), recorder, recorder.segment():
                Values()(torch.empty(8, device="cuda"))
        except (TraceError, *tracing._FOREIGN) as error:
            return str(error)
    return "traced"


def large(model: str, rows: str, length: str, precision: str, lora: str) -> Any:
    """Peak of the second step and the resident size of this process."""
    asked = subject(model, lora=lora == "lora", train={"precision": precision})
    variant = Variant(checkpointing=lora == "lora", optimizer_impl=OptimizerImpl.AUTO)
    tracer = tracing.StepTracer(asked, AMPERE)
    shape = Shape(int(rows), int(length))
    kinds = (SegmentKind.LOAD, SegmentKind.BATCH, SegmentKind.MICRO_FIRST, SegmentKind.UPDATE_FIRST, SegmentKind.UPDATE)
    load, batch, micro, first, later = (tracer.trace(k, variant, shape if k.has_shape else None) for k in kinds)
    run = compose([[load], [batch, micro, first], [batch, micro, later]], workspace_bytes=8_519_680)
    event = run.peak()
    return {
        "peak_bytes": event.bytes_,
        "rss_bytes": most_resident_bytes(),
    }


def quantised(model: str, base: str) -> Any:
    """What products with a quantised base allocate on the way, by phase: operator and bytes, in order."""
    lora = LoraSettings(r=4, base=BaseFormat(base), double_quant=base == "nf4")
    asked = subject(model, lora=True, train={"precision": "bf16"}).model_copy(update={"lora": lora})
    micro = tracing.StepTracer(asked, AMPERE).trace(SegmentKind.MICRO_FIRST, Variant(), SHAPE)
    made: dict[str, list[tuple[str, int]]] = {}
    for delta, label in zip(micro.deltas, micro.labels, strict=True):
        facts = micro.label_table[label]
        if delta > 0 and facts.op.startswith("bitsandbytes"):
            made.setdefault(facts.phase, []).append((facts.op, delta))
    return made


def paged(model: str, optimizer: str) -> Any:
    """Bytes of an optimizer's moments on the device and on the host."""
    asked = subject(model, lora=False, optim={"name": optimizer})
    tracer = tracing.StepTracer(asked, AMPERE)
    first = tracer.trace(SegmentKind.UPDATE_FIRST, Variant(), None)
    host = tracer.trace(SegmentKind.UPDATE_HOST, Variant(), None)
    sizes = {block: delta for block, delta in zip(first.blocks, first.deltas, strict=True) if delta > 0}
    moments = [name for name in first.names.values() if name.startswith("optimizer:") and not name.endswith(":step")]
    held = sum(sizes[block] for block, name in first.names.items() if name in moments)
    return {"device": held, "host": sum(host.deltas)}


def most_resident_bytes() -> int:
    """The most this program had in memory; ``getrusage`` would count what its parent had before it became this one."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024


def serve() -> None:
    """Answer requests until there are no more; a fact that could not be found is null, with its reason on stderr."""
    for line in sys.stdin:
        name, *words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            print(json.dumps(globals()[name](*words)), flush=True)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            print("null", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve()
