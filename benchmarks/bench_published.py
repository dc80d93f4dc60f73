"""Planned memory beside published measurements of real GPUs, without one.

    python benchmarks/bench_published.py

Nine rows of Hugging Face's guide to training on one GPU (bert-large-uncased, 512 tokens, V100, January 2022), the
Trainer's own memory metrics of an XLM-R-base question answerer (16 rows of 384 tokens, 2021), and what two question
answerers take once loaded. All are older than torch 1.11, so here for every row, and for none alone:

* attention is matrix products, and softmax keeps its input for the backward pass (pytorch#64000 ended that);
* ``zero_grad`` fills gradients with zeros and keeps them;
* AdamW is transformers' own, one parameter after another; checkpointing is reentrant;
* the caching allocator's segments are native, and the guide's 1343 MiB for context and kernels come on top.

Everything else is that of the installed torch and transformers. A step is run as the Trainer of that time ran it, on
fake tensors, and recorded whole.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers.optimization import Adafactor

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import Replay, replay
from dryfit.gpu.constants import device_constants
from dryfit.gpu.events import Segment
from dryfit.gpu.fake_cuda import FakeDevice, StandIns
from dryfit.gpu.recorder import StorageRecorder
from dryfit.gpu.slots import put, slots
from dryfit.meta.configs import catalogue_config
from dryfit.meta.construction import build
from dryfit.meta.pretrained import Kind, make_model
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, StepPhase

MIB = 2**20
V100 = DeviceSpec(name="V100", kind=DeviceKind.CUDA, capacity_bytes=16160 * MIB, capability=(7, 0))
CONTEXT_MIB = 1343
STEPS = 2
BLOCK = 2048
LEAST_8BIT = 4096

Groups = list[dict[str, Any]]
State = dict[str, torch.Tensor]


class _LoopOptimizer(torch.optim.Optimizer):
    """One parameter after another."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, defaults={"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            if parameter not in self.state:
                self.state[parameter] = self.new_state(parameter)
            # A name of a loop lives until it is given anew: while a temporary is made, so does the one before.
            _temporary = self.update(self.state[parameter])

    def new_state(self, parameter: torch.Tensor) -> State:
        raise NotImplementedError

    def update(self, state: State) -> torch.Tensor | None:
        raise NotImplementedError


class OldAdamW(_LoopOptimizer):
    """The memory of transformers' AdamW: two moments and a temporary."""

    def new_state(self, parameter: torch.Tensor) -> State:
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def update(self, state: State) -> torch.Tensor | None:
        return state["exp_avg_sq"].sqrt()


class EightBitAdam(_LoopOptimizer):
    """The memory of bitsandbytes' Adam8bit as it was: a byte an element and moment, a scale for each block of 2048."""

    def new_state(self, parameter: torch.Tensor) -> State:
        if parameter.numel() < LEAST_8BIT:
            return {name: torch.zeros_like(parameter) for name in ("state1", "state2")}
        moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        blocks = -(-parameter.numel() // BLOCK)
        return moments | {name: torch.zeros(blocks, device=parameter.device) for name in ("absmax1", "absmax2")}

    def update(self, state: State) -> torch.Tensor | None:
        """One kernel, in place."""
        return None


def adafactor(groups: Groups) -> torch.optim.Optimizer:
    """As the Trainer sets it."""
    return Adafactor(groups, lr=5e-5, scale_parameter=False, relative_step=False)


@dataclass(frozen=True)
class Run:
    """What was trained, and how."""

    name: str
    measured_mib: float
    rows: int
    accumulation: int = 1
    checkpointing: bool = False
    fp16: bool = False
    optimizer: Callable[[Groups], torch.optim.Optimizer] = OldAdamW
    length: int = 512
    model: str = "bert-large-uncased"
    kind: Kind = Kind.SEQUENCE_CLASSIFICATION


GUIDE = (
    Run("fp32, 4 rows", 14949, 4),
    Run("1 row x 4", 8681, 1, 4),
    Run("1 row x 4, checkpointing", 6775, 1, 4, checkpointing=True),
    Run("fp16, 4 rows", 13939, 4, fp16=True),
    Run("fp16, 1 row x 4, checkpointing", 7275, 1, 4, checkpointing=True, fp16=True),
    Run("Adafactor, 4 rows", 12295, 4, optimizer=adafactor),
    Run("Adafactor, fp16, 1 row x 4, checkpointing", 4847, 1, 4, True, True, adafactor),
    Run("8-bit Adam, 4 rows", 13085, 4, optimizer=EightBitAdam),
    Run("8-bit Adam, fp16, 1 row x 4, checkpointing", 5363, 1, 4, True, True, EightBitAdam),
)
XLMR = "xlm-roberta-base"
SQUAD = Run("XLM-R-base, SQuAD", 12_727_233_536 / MIB, 16, length=384, model=XLMR, kind=Kind.QUESTION_ANSWERING)
LOADED = (("xlm-roberta-base", 1_109_893_120), ("bert-large-uncased", 1_337_192_960))


class _Softmax(torch.autograd.Function):
    """Softmax that keeps its input beside its output."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(scores, probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        scores, probabilities = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], probabilities, -1, scores.dtype)


def old_softmax(scores: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``nn.functional.softmax`` of torch before 1.11."""
    return _Softmax.apply(scores.float() if torch.is_autocast_enabled("cuda") else scores)


class Trace:
    """The Trainer's loop on fake tensors, recorded."""

    def __init__(self, model: str, kind: Kind) -> None:
        config = catalogue_config(model)
        assert config is not None
        config._attn_implementation = "eager"
        self.model: Any = build(lambda: make_model(config, kind)).train()
        self.recorder = StorageRecorder("cuda", kernels=True)
        self.answers = StandIns()

    @contextmanager
    def recording(self) -> Iterator[Any]:
        """Record everything inside the block, the model's arrival on the device first."""
        device = FakeDevice("cuda", capability=V100.capability)
        old = mock.patch.object(nn.functional, "softmax", old_softmax)
        with old, device.active(), self.answers, self.recorder, self.recorder.segment() as record:
            for slot in slots(self.model):
                fake: Any = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device="cuda")
                put(slot, nn.Parameter(fake) if isinstance(slot.tensor, nn.Parameter) else fake)
                del fake
            yield record

    def phase(self, now: StepPhase) -> None:
        self.recorder.phase = now
        # The loss scaler asks whether a gradient is infinite: no.
        self.answers.number = 0 if now is StepPhase.OPTIMIZER else 1


def loaded(model: str) -> int:
    """Bytes allocated once a question answerer is on the device."""
    trace = Trace(model, Kind.QUESTION_ANSWERING)
    with trace.recording() as record:
        pass
    return played(record.result).peak_allocated_bytes


def trained(run: Run) -> Segment:
    """Two steps; the first makes gradients and the optimizer's state, which stay."""
    trace = Trace(run.model, run.kind)
    model = trace.model
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with trace.recording() as record:
        scaler: Any = torch.amp.GradScaler("cuda", enabled=run.fp16)  # pyright: ignore
        optimizer = run.optimizer(parameter_groups(model))
        for _ in range(STEPS):
            for _ in range(run.accumulation):
                trace.phase(StepPhase.FORWARD)
                inputs = batch(run)
                with torch.autocast("cuda", dtype=torch.float16, enabled=run.fp16):
                    loss = model(**inputs).loss
                trace.phase(StepPhase.BACKWARD)
                scaler.scale(loss / run.accumulation).backward()
            trace.phase(StepPhase.OPTIMIZER)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)
    return record.result


def parameter_groups(model: nn.Module) -> Groups:
    """The Trainer's two: what decays, and biases and norms."""
    named = list(model.named_parameters())
    plain = [one for name, one in named if name.endswith("bias") or "LayerNorm" in name]
    kept = {id(one) for one in plain}
    return [{"params": [one for _, one in named if id(one) not in kept]}, {"params": plain}]


def batch(run: Run) -> dict[str, torch.Tensor]:
    """The guide's data set has no masks; transformers makes them itself."""
    tokens = (run.rows, run.length)
    if run.kind is Kind.QUESTION_ANSWERING:
        sizes = {"input_ids": tokens, "attention_mask": tokens, "start_positions": (run.rows,)}
        sizes["end_positions"] = (run.rows,)
    else:
        sizes = {"input_ids": tokens, "attention_mask": tokens, "labels": (run.rows,)}
    return {name: torch.empty(size, dtype=torch.int64, device="cuda") for name, size in sizes.items()}


def played(segment: Segment) -> Replay:
    """What the allocator of that time makes of it; cuBLAS took its workspace itself, about as much."""
    return replay(segment.blocks, segment.deltas, AllocatorSettings())


def line(name: str, predicted: float, measured: float, unit: str) -> None:
    print(
        f"{name:48s} {measured:14,.0f} {predicted:14,.0f} {unit}  {100 * (predicted / measured - 1):+.2f} %", flush=True
    )


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a device that is there cannot be faked
    print(f"torch {torch.__version__}; measured, predicted, error")
    workspaces_mib = 2 * device_constants(V100, torch.__version__).workspace_bytes / MIB
    for run in GUIDE:
        found = played(trained(run))
        line(run.name, found.peak_reserved_bytes / MIB + workspaces_mib + CONTEXT_MIB, run.measured_mib, "MiB")
    line(SQUAD.name, played(trained(SQUAD)).peak_allocated_bytes / MIB, SQUAD.measured_mib, "MiB")
    for model, measured_bytes in LOADED:
        line(f"{model}, question answering, loaded", loaded(model), measured_bytes, "B")


if __name__ == "__main__":
    main()
