"""Traces a trial's training step on tensors that take no memory; :class:`dryfit.memory.tracer.Tracer` says for whom."""

import gc
import json
from contextlib import ExitStack
from typing import Any, Self, final

import torch
import transformers
from torch import nn

from dryfit.core.errors import InternalError
from dryfit.core.memory import MemoryCategory, StepPhase
from dryfit.core.plan import DeviceKind, DeviceSpec
from dryfit.core.wire import PlanSubject, canonical_json
from dryfit.memory.events import Segment, SegmentKind, Shape
from dryfit.memory.fake_cuda import fake_device
from dryfit.memory.recorder import Recorder
from dryfit.memory.standins import StandIns
from dryfit.memory.tracer import Variant
from dryfit.meta.walk import SlotKind, put, slots
from dryfit.train.rehearsal import Rehearsal
from dryfit.train.subjects import step_parts

_TINY = Shape(rows=2, length=16)
_FORMAT = 1


@final
class StepTracer:
    """Traces the segments of one subject.

    A context manager: inside of it every new tensor of the device is fake, so the process does nothing else.

    Args:
        subject: What is to be trained.
        device: Where; for a CUDA device the operators and kernels are those of its compute capability.
        reentrant: Checkpointing by reentrant autograd.
    """

    def __init__(self, subject: PlanSubject, device: DeviceSpec, *, reentrant: bool = False) -> None:
        self._subject = subject
        self._device = device
        self._reentrant = reentrant
        self._stack = ExitStack()
        self._stages: dict[Variant, _Stage] = {}

    def __enter__(self) -> Self:
        """Switch to fakes.

        Raises:
            TraceError: This build of torch cannot fake the device.
        """
        self._stack.enter_context(fake_device(self._device.kind, capability=self._device.capability))
        gc.collect()
        gc.disable()  # an object dies when its last name goes, in every trace at the same place
        self._stack.callback(gc.enable)
        return self

    def __exit__(self, *details: object) -> None:
        """Switch back."""
        self._stages.clear()
        self._stack.close()

    @property
    def key(self) -> str:
        """Everything a segment depends on besides its arguments."""
        facts = {
            "format": _FORMAT,
            "subject": json.loads(self._subject.model_dump_json()),
            "device": [self._device.kind, *self._device.capability],
            "reentrant": self._reentrant,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return canonical_json(facts)

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        """Trace one segment; see :meth:`dryfit.memory.tracer.Tracer.trace`."""
        if (shape is not None) != kind.has_shape:
            raise InternalError("tracing a segment", f"{kind} with shape {shape}")
        stage = self._stages.get(variant)
        if stage is None:
            # One model at a time: the fakes of a large one are small, not nothing.
            self._stages.clear()
            stage = self._stages[variant] = _Stage(self._subject, variant, self._device, reentrant=self._reentrant)
        return stage.load if kind is SegmentKind.LOAD else stage.trace(kind, shape)


class _Stage:
    """One variant's model on the fake device."""

    def __init__(self, subject: PlanSubject, variant: Variant, device: DeviceSpec, *, reentrant: bool) -> None:
        parts = step_parts(subject, variant, reentrant=reentrant)
        self._model = parts.model
        self._recorder = Recorder(device.kind, kernels=device.kind is DeviceKind.CUDA)
        self._stand_ins = StandIns()
        with self._stand_ins, self._recorder, self._recorder.segment() as record:
            self._place(device.kind)
        self.load = record.result
        self.rehearsal = Rehearsal(parts, device.kind)
        self._trained: tuple[str, ...] | None = None
        self._has_state = False

    def trace(self, kind: SegmentKind, shape: Shape | None) -> Segment:
        with self._stand_ins, self._recorder, self._recorder.watching(self._model):
            match kind, shape:
                case SegmentKind.BATCH, Shape():
                    return self._batch(shape)
                case SegmentKind.MICRO_FIRST, Shape():
                    self._forget_gradients()
                    return self._micro(shape)
                case SegmentKind.MICRO_NEXT, Shape():
                    self._make_gradients()
                    return self._micro(shape)
                case SegmentKind.UPDATE_FIRST, None:
                    self._forget_state()
                    return self._update()
                case SegmentKind.UPDATE, None:
                    if not self._has_state:
                        self._update()
                    return self._update()
                case SegmentKind.EVALUATE, Shape():
                    return self._evaluate(shape)
                case SegmentKind.SAVE, None:
                    return self._save()
                case _:
                    raise InternalError("tracing a segment", f"{kind} with shape {shape}")

    def _phase(self, phase: StepPhase) -> None:
        self._recorder.phase = phase
        # The loss scaler asks whether it found an infinite gradient: no. Models ask for sizes: at least one.
        self._stand_ins.number = 0 if phase in (StepPhase.CLIP, StepPhase.OPTIMIZER) else 1

    def _place(self, device: str) -> None:
        """Put a fake tensor of the device in every place; ties stay ties."""
        self._phase(StepPhase.LOAD)
        placed: dict[int, torch.Tensor] = {}
        for slot in slots(self._model):
            old = slot.tensor
            if id(old) not in placed:
                placed[id(old)] = _like(old, device)
            put(slot, placed[id(old)])
            category = MemoryCategory.WEIGHTS
            if slot.kind is SlotKind.PARAMETER and old.requires_grad and "lora_" in slot.name:
                category = MemoryCategory.ADAPTERS
            self._recorder.name(placed[id(old)], f"weight:{slot.name}", category)

    def _batch(self, shape: Shape) -> Segment:
        self._phase(StepPhase.FORWARD)
        with self._recorder.segment() as record:
            batch = self.rehearsal.batch(shape)
            for name, tensor in batch.items():
                self._recorder.name(tensor, f"input:{name}", MemoryCategory.INPUTS)
        return record.result

    def _micro(self, shape: Shape) -> Segment:
        batch = self.rehearsal.batch(shape)
        for name, tensor in batch.items():
            self._recorder.adopt(tensor, f"input:{name}", MemoryCategory.INPUTS)
        with self._recorder.segment() as record:
            self.rehearsal.micro(batch, self._phase)
            graded = [(name, one.grad) for name, one in self._named() if one.grad is not None]
            for name, gradient in graded:
                self._recorder.name(gradient, f"gradient:{name}", MemoryCategory.GRADIENTS)
        self._trained = tuple(name for name, _ in graded)
        return record.result

    def _update(self) -> Segment:
        self._make_gradients()
        with self._recorder.segment() as record:
            self.rehearsal.update(self._phase)
            self._name_state()
        self._has_state = True
        return record.result

    def _evaluate(self, shape: Shape) -> Segment:
        self._phase(StepPhase.EVALUATE)
        with self._recorder.segment() as record:
            self.rehearsal.evaluate(shape)
        return record.result

    def _save(self) -> Segment:
        if not self._has_state:
            self._update()
        self._phase(StepPhase.SAVE)
        with self._recorder.segment() as record:
            self.rehearsal.save()
        return record.result

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._model.named_parameters())

    def _forget_gradients(self) -> None:
        self._model.zero_grad()

    def _make_gradients(self) -> None:
        """Gradients as a backward pass leaves them, for the parameters that get one."""
        if self._trained is None:
            self._micro(_TINY)
        trained = set(self._trained or ())
        for name, parameter in self._named():
            if name in trained and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self._recorder.adopt(parameter.grad, f"gradient:{name}", MemoryCategory.GRADIENTS)

    def _forget_state(self) -> None:
        self.rehearsal.optimizer = None
        self._has_state = False

    def _name_state(self) -> None:
        optimizer = self.rehearsal.optimizer
        if optimizer is None:
            return
        names = {id(parameter): name for name, parameter in self._named()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    name = f"optimizer:{names[id(parameter)]}:{key}"
                    self._recorder.name(value, name, MemoryCategory.OPTIMIZER)


def _like(old: torch.Tensor, device: str) -> torch.Tensor:
    fake: Any = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
    return nn.Parameter(fake, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else fake
