"""Trace a trial's training step on tensors that take no memory."""

import traceback
from contextlib import ExitStack
from functools import cached_property
from typing import final

import torch
import transformers
from torch import nn

from dryfit.core.errors import ConfigError, InternalError, TraceError
from dryfit.core.jobs.memory import MemoryCategory, StepPhase
from dryfit.core.settings.execution import DeviceKind, DeviceSpec, PlanSubject
from dryfit.core.settings.memory_key import any_shape, memory_key
from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.core.sharding.shard_summary import Sent
from dryfit.core.wire import canonical_json
from dryfit.memory.tracing.events import Segment, SegmentKind, Shape
from dryfit.memory.tracing.fake_cuda import FakeDevice
from dryfit.memory.tracing.recorder import StorageRecorder
from dryfit.memory.tracing.stand_ins import StandIns
from dryfit.memory.tracing.tracer import Variant
from dryfit.meta.construction.walk import SlotKind, like, put_all
from dryfit.meta.loading.catalogue import planning_config
from dryfit.parallel.layout.layout import OneProcess
from dryfit.parallel.layout.tensor_parallel import TensorParallel
from dryfit.parallel.ranks.collectives import AbsentRanks
from dryfit.parallel.ranks.counted import CountedRanks
from dryfit.train.activation_offload import offload_layer_inputs
from dryfit.train.optim.optimizer import OptimizerPlan
from dryfit.train.rehearsal.step_rehearsal import Rehearsal, no_collection
from dryfit.train.rehearsal.subjects import StepParts, step_parts, subject_task

_TINY = Shape(rows=2, length=16)
_FORMAT = 5


@final
class StepTracer:
    """Traces the segments of one subject. While it traces, every new tensor of the process is a fake.

    Args:
        subject: What is to be trained; its batch size and length do not matter here.
        device: The device; for CUDA the operators and kernels are those of its compute capability.
        reentrant: Whether checkpointing is by reentrant autograd.
        plan: Shards the model over ranks; the step is then rank 0's.
    """

    def __init__(
        self, subject: PlanSubject, device: DeviceSpec, *, reentrant: bool = False, plan: ShardPlan | None = None
    ) -> None:
        self._subject = subject
        self._spec = device
        self._reentrant = reentrant
        self._plan = plan
        self._fakes: FakeDevice | None = None
        self._stages: dict[tuple[bool, bool], _Stage] = {}

    @property
    def key(self) -> str:
        """Key of everything that a segment depends on besides its arguments."""
        return self._key

    @cached_property
    def _key(self) -> str:
        sources = subject_task(self._subject).sources()
        configs = {part: planning_config(source) for part, source in sources.items()}
        facts = {
            "format": _FORMAT,
            "step": memory_key(any_shape(self._subject)),
            **{f"config {part}".rstrip(): config.to_json_string(use_diff=False) for part, config in configs.items()},
            "device": [self._spec.kind, *self._spec.capability],
            "reentrant": self._reentrant,
            # The plan follows from the degree and the other facts.
            "ranks": self._plan.degree if self._plan is not None else 1,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return canonical_json(facts)

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        """Trace one segment; see :meth:`dryfit.memory.tracing.tracer.Tracer.trace`."""
        if (shape is not None) != kind.has_shape:
            raise InternalError("tracing a segment", f"{kind} with shape {shape}")
        if self._fakes is None:
            self._fakes = FakeDevice(self._spec.kind, capability=self._spec.capability)
        try:
            with self._fakes.active(), no_collection():
                return self._stage(variant).trace(kind, variant, shape)
        except _FOREIGN as error:
            raise TraceError(
                f"tracing the training step of {self._subject.settings.model.name}",
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no message'}",
                hint=f"at {_place(error)}: code that asks for real values, or calls a kernel that torch cannot fake",
            ) from error

    def sent(self, variant: Variant, shape: Shape) -> Sent:
        """Return what a rank sends while it computes one micro-batch; zeros for a whole model.

        Raises:
            TraceError: The model's code cannot be traced.
        """
        self.trace(SegmentKind.MICRO_FIRST, variant, shape)
        return self._stage(variant).sent

    def _stage(self, variant: Variant) -> "_Stage":
        built = variant.checkpointing, variant.chunked_loss
        if built not in self._stages:
            ranks = CountedRanks(AbsentRanks(0, self._plan.degree if self._plan is not None else 1))
            layout = OneProcess() if self._plan is None else TensorParallel(self._plan, ranks)
            parts = step_parts(
                self._subject,
                checkpointing=variant.checkpointing,
                reentrant=self._reentrant,
                chunked_loss=variant.chunked_loss,
                layout=layout,
            )
            self._stages[built] = _Stage(parts, self._spec.kind, ranks)
        return self._stages[built]


# What a model's own code may raise when it meets a tensor without values.
_FOREIGN = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _place(error: BaseException) -> str:
    """Return the last line of code outside torch and dryfit that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "/torch/" not in frame.filename and "/dryfit/" not in frame.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


class _Stage:
    """A model on the fake device.

    Attributes:
        sent: What was sent in the micro-batch that was traced last.
    """

    def __init__(self, parts: StepParts, device: DeviceKind, ranks: CountedRanks) -> None:
        self._model = parts.model
        self._recorder = StorageRecorder(device, kernels=device is DeviceKind.CUDA)
        self._host = StorageRecorder("cpu", kernels=False)
        self._stand_ins = StandIns()
        self._ranks = ranks
        self.sent = Sent()
        with self._stand_ins, self._recorder, self._recorder.segment() as record:
            self._place(device)
        self._load = record.result
        # Not before: sums of gradients hang on the parameters themselves.
        self._rehearsal = Rehearsal(parts.connected(), device, OptimizerPlan(modelled=True))
        self._trained: tuple[str, ...] | None = None
        self._has_state = False

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        if kind is SegmentKind.LOAD:
            return self._load
        plan = OptimizerPlan(impl=variant.optimizer_impl, offload=variant.offload_optimizer, modelled=True)
        if plan != self._rehearsal.plan:
            self._forget_state()
            self._rehearsal.plan = plan
        with ExitStack() as offloaded:
            if variant.offload_activations:
                try:
                    handles = offload_layer_inputs(self._model)
                except ConfigError as error:  # this fallback is none of the model's; others are
                    raise TraceError(error.doing, error.found) from error
                for handle in handles:
                    offloaded.callback(handle.remove)
            return self._traced(kind, shape)

    def _traced(self, kind: SegmentKind, shape: Shape | None) -> Segment:
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
                case SegmentKind.MICRO_HOST, Shape():
                    return self._micro_host(shape)
                case SegmentKind.UPDATE_FIRST, None:
                    self._forget_state()
                    return self._update()
                case SegmentKind.UPDATE_HOST, None:
                    return self._update_host()
                case SegmentKind.UPDATE, None:
                    if not self._has_state:
                        self._update()
                    return self._update()
                case SegmentKind.EVALUATE, Shape():
                    return self._evaluate(shape)
                case SegmentKind.MEASURE, Shape():
                    return self._measure(shape)
                case SegmentKind.SAVE, None:
                    return self._save()
                case _:
                    raise InternalError("tracing a segment", f"{kind} with shape {shape}")

    def _phase(self, phase: StepPhase) -> None:
        self._recorder.phase = phase
        self._ranks.backward = phase is StepPhase.BACKWARD
        # The number that fake tensors give: 0 for the scaler's count of infinite gradients, 1 for sizes in models.
        self._stand_ins.number = 0 if phase in (StepPhase.CLIP, StepPhase.OPTIMIZER) else 1

    def _place(self, device: str) -> None:
        """Put fake tensors of the device in all places; ties stay."""
        self._phase(StepPhase.LOAD)
        for slot, tensor in put_all(self._model, lambda slot: like(slot.tensor, device)):
            is_adapter = slot.kind is SlotKind.PARAMETER and tensor.requires_grad and "lora_" in slot.name
            category = MemoryCategory.ADAPTERS if is_adapter else MemoryCategory.WEIGHTS
            self._recorder.name(tensor, f"weight:{slot.name}", category)

    def _batch(self, shape: Shape) -> Segment:
        self._phase(StepPhase.FORWARD)
        with self._recorder.segment() as record:
            batch = self._rehearsal.batch(shape)
            for name, tensor in batch.items():
                self._recorder.name(tensor, f"input:{name}", MemoryCategory.INPUTS)
        return record.result

    def _micro(self, shape: Shape) -> Segment:
        batch = self._rehearsal.batch(shape)
        self._ranks.sent = Sent()
        for name, tensor in batch.items():
            self._recorder.adopt(tensor, f"input:{name}", MemoryCategory.INPUTS)
        with self._recorder.segment() as record:
            self._rehearsal.micro(batch, self._phase)
            self.sent = self._ranks.sent
            graded = [(name, one.grad) for name, one in self._named() if one.grad is not None]
            for name, gradient in graded:
                self._recorder.name(gradient, f"gradient:{name}", MemoryCategory.GRADIENTS)
        self._trained = tuple(name for name, _ in graded)
        return record.result

    def _micro_host(self, shape: Shape) -> Segment:
        """Record the host tensors of a micro-batch; its gradients are forgotten."""
        batch = self._rehearsal.batch(shape)
        self._forget_gradients()

        def phase(began: StepPhase) -> None:
            self._phase(began)
            self._host.phase = began

        with self._host, self._host.segment() as record:
            self._rehearsal.micro(batch, phase)
        self._forget_gradients()
        return record.result

    def _update(self) -> Segment:
        self._make_gradients()
        with self._recorder.segment() as record:
            self._rehearsal.update(self._phase)
            self._name_state(self._recorder)
        self._has_state = True
        return record.result

    def _update_host(self) -> Segment:
        """Record the host tensors that an optimizer's first step makes and keeps."""
        self._make_gradients()
        self._forget_state()
        with self._host, self._host.segment() as record:
            self._rehearsal.update(self._phase)
            self._name_state(self._host)
        self._forget_state()
        return record.result

    def _evaluate(self, shape: Shape) -> Segment:
        self._phase(StepPhase.EVALUATE)
        with self._recorder.segment() as record:
            self._rehearsal.evaluate(self._rehearsal.batch(shape))
        return record.result

    def _measure(self, shape: Shape) -> Segment:
        self._phase(StepPhase.EVALUATE)
        with self._recorder.segment() as record:
            self._rehearsal.measure(shape)
        return record.result

    def _save(self) -> Segment:
        if not self._has_state:
            self._update()
        self._phase(StepPhase.SAVE)
        with self._recorder.segment() as record:
            self._rehearsal.save()
        return record.result

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._model.named_parameters())

    def _forget_gradients(self) -> None:
        self._model.zero_grad()

    def _make_gradients(self) -> None:
        """Make gradients as a backward pass leaves them, for the parameters that get one."""
        if self._trained is None:
            self._micro(_TINY)
        trained = set(self._trained or ())
        for name, parameter in self._named():
            if name in trained and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self._recorder.adopt(parameter.grad, f"gradient:{name}", MemoryCategory.GRADIENTS)

    def _forget_state(self) -> None:
        self._rehearsal.optimizer = None
        self._has_state = False

    def _name_state(self, recorder: StorageRecorder) -> None:
        optimizer = self._rehearsal.optimizer
        if optimizer is None:
            return
        names = {id(parameter): name for name, parameter in self._named()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    name = f"optimizer:{names[id(parameter)]}:{key}"
                    recorder.name(value, name, MemoryCategory.OPTIMIZER)
