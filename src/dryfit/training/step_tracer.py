"""A trial's training step traced on tensors that take no memory."""

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast, final

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from dryfit.gpu import kernels
from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.device import VirtualGpu
from dryfit.gpu.events import Label, Segment, SegmentKind, Shape
from dryfit.gpu.fake_cuda import FakeDevice, StandIns
from dryfit.gpu.recorder import StorageRecorder
from dryfit.gpu.script_recorder import LiveAllocations, Places, ScriptRecorder
from dryfit.gpu.slots import SlotKind, like, put_all
from dryfit.gpu.work import WorkCounter
from dryfit.meta.configs import check_stored_format, planning_config, set_dropouts
from dryfit.meta.construction import build
from dryfit.meta.pretrained import STACKS, Kind, empty_frozen, make_model, one_stack
from dryfit.parallel.collectives import AbsentRanks, CountedRanks
from dryfit.parallel.layout import Layout, OneProcess, whole_state
from dryfit.parallel.tensor_parallel import TensorParallel
from dryfit.plans.tracer import Variant
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError, InternalError, TraceError
from dryfit.settings.execution import ExecutionPlan, PlanSubject, WeightFormat
from dryfit.settings.memory_key import any_shape, memory_key
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, MemoryCategory, StepPhase
from dryfit.settings.sharding import Sent, ShardPlan
from dryfit.settings.tables import DataSettings, LoraSettings, ModelSettings, RegularizationSettings
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import TrialConfig
from dryfit.settings.wire import canonical_json
from dryfit.tasks.base import Batch, MakeBase, Task, TaskContext, TaskModel
from dryfit.tasks.heads import freeze
from dryfit.tasks.own import make_task
from dryfit.tasks.tokens import TokenSet
from dryfit.training.model import cannot_chunk_loss, enable_checkpointing, loss_in_chunks, offload_layer_inputs
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.run import TrialParts
from dryfit.training.trainer import TrialSteps

# Build the parts of a training step from a planning subject: model on the meta device, loss, optimizer.


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training step.

    Attributes:
        model: The model, on the meta device.
        task: Gives loss sum and normaliser, and the sizes of a batch.
        layout: How the model lies on its ranks.
    """

    model: TaskModel
    task: Task
    subject: PlanSubject
    layout: OneProcess | TensorParallel = field(default_factory=OneProcess)

    def connected(self) -> "StepParts":
        """Make the model compute with the other ranks; its parameters must be those that will be trained."""
        if isinstance(self.layout, TensorParallel):
            self.layout.connect(self.model)
        return replace(self, task=self.layout.task_here(self.task))

    def batch_sizes(self, rows: int, length: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each entry of a batch."""
        return self.task.batch_sizes(rows, length, segments=self.model.takes_types)


def subject_task(subject: PlanSubject) -> Task:
    """Return a subject's task, without knowledge of its rows."""
    data = DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label)
    adapted = subject.settings.model_copy(update={"lora": subject.lora or LoraSettings(r=0)})
    return make_task(subject.task, TaskContext(adapted, data))


def whole_model(subject: PlanSubject) -> tuple[TaskModel, Task]:
    """Return a subject's whole model, on the meta device, and its task.

    Raises:
        ConfigError: The model is unknown.
    """
    task = subject_task(subject)
    return task.model(_planned(subject.settings.regularization)), task


def step_parts(
    subject: PlanSubject,
    *,
    checkpointing: bool,
    reentrant: bool,
    chunked_loss: bool = False,
    layout: OneProcess | TensorParallel | None = None,
) -> StepParts:
    """Build the parts of a subject's step, without memory or reading weights.

    Args:
        subject: What is trained.
        checkpointing: Whether activations are recomputed.
        reentrant: Whether by reentrant autograd.
        chunked_loss: Whether the loss is computed in chunks of tokens.
        layout: Says which part of the model this rank holds; None: all of it.

    Raises:
        ConfigError: The model is unknown, or has no part that a setting names.
        ShardError: The plan is another model's.
    """
    settings = subject.settings
    model, task = whole_model(subject)
    tp = layout.plan.degree if isinstance(layout, TensorParallel) else 1
    if chunked_loss and (tp == 1 or cannot_chunk_loss(task, model, tp=tp) is None):
        task = loss_in_chunks(task, model)
    if checkpointing:
        for part in model.pretrained().values():
            enable_checkpointing(part, reentrant=reentrant)
    freeze(model, settings.regularization.freeze_layers, dropout=settings.regularization.frozen_dropout)
    if isinstance(layout, TensorParallel):
        layout.shard(model)
    return StepParts(model, task, subject, layout or OneProcess())


def _planned(regularization: RegularizationSettings) -> MakeBase:
    """Return a maker of models from their configs alone."""

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del part
        config = one_stack(planning_config(source), source, allowed=STACKS[kind])
        check_stored_format(config, source, frozen)
        set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
        model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code))
        if frozen is None:
            return model
        empty_frozen(model, frozen)
        if frozen.quantised:
            kernels.install()
        return model

    return make


# A trial's step is made by its own Trainer, here on tensors without data, or on rows that nobody learns from.


@final
class SubjectSteps:
    """Steps of a subject, made by the Trainer of its trials.

    Args:
        parts: Model, task and layout; the model's tensors are on ``device``, fake or real.
        device: ``cuda`` or ``cpu``.
        plan: How the optimizer works.
        phases: Called with each phase as it begins.
    """

    def __init__(
        self,
        parts: StepParts,
        device: DeviceKind,
        plan: OptimizerPlan,
        phases: Callable[[StepPhase], None] = lambda _: None,
    ) -> None:
        self.parts = parts
        self.device = device
        with TemporaryDirectory() as folder:  # a Trainer makes one
            trial = _trial_of(parts, device, plan, Path(folder))
            self._steps = TrialSteps(trial, optimizer=plan, of_rows=False, phases=phases)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is stepped."""
        return self._steps.trainer.optimizer

    def batch(self, shape: Shape) -> Batch:
        """Return a batch on the device, without values."""
        sizes = self.parts.batch_sizes(shape.rows, shape.length)
        return {name: torch.empty(size, dtype=torch.int64, device=self.device) for name, size in sizes.items()}

    def micro(self, batch: Batch) -> None:
        """Run forward and backward passes of one micro-batch, of however many rows."""
        self._steps.trainer.micro_batch = len(batch["attention_mask"])
        self._steps.batch_gradients(batch)

    def update(self) -> None:
        """Clip, step the optimizer and free the gradients."""
        self._steps.update()

    def evaluate(self, batch: Batch) -> None:
        """Score one validation batch."""
        self.parts.model.eval()
        # The real run's inference mode keeps as much; fake tensors support no_grad better.
        task = self.parts.task
        with torch.no_grad():
            outputs = self.parts.model(**{name: batch[name] for name in task.inputs if name in batch})
            task.keep(outputs, batch).cpu()

    def measure(self, shape: Shape) -> None:
        """Run what the task's metrics need besides scores, without autocast, as a validation does."""
        self.parts.model.eval()
        self.parts.task.rehearse_measure(self.parts.model, shape.rows, shape.length)

    def save(self) -> None:
        """Copy everything that a checkpoint holds to the host, one tensor after another, sharded ones gathered."""
        model, gathered = self.parts.model, self.parts.layout.gathered(self.parts.model)
        whole_state(model, lambda name, local: gathered(name, local).contiguous(), keep=True)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    of_weight = value.shape == parameter.shape
                    (gathered(names[id(parameter)], value) if of_weight else value).detach().cpu()

    def begin_anew(self, plan: OptimizerPlan) -> None:
        """Make the optimizer anew, without state."""
        self._steps.begin_anew(plan)


def _trial_of(parts: StepParts, device: DeviceKind, plan: OptimizerPlan, folder: Path) -> TrialParts:
    """Return a trial of a subject that has no rows and reports to nobody."""
    subject = parts.subject
    config = TrialConfig(
        number=0,
        task=subject.task,
        metric=parts.task.metric_names()[0],
        direction=Direction.MAXIMIZE,
        data=DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label),
        settings=subject.settings,
        params={},
        seed=0,
    )
    rows = subject.settings.train.batch_size
    execution = ExecutionPlan(
        device=device,
        effective_batch=rows,
        micro_batch=rows,
        accumulation=1,
        optimizer_impl=plan.impl,
        offload_optimizer=plan.offload,
    )
    channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)
    channel.mute()
    return TrialParts(
        request=TrainRequest.apart(config, execution, cache_dir=folder, folder=folder, visible_device=None),
        channel=channel,
        model=parts.model,
        task=parts.task,
        train=_NO_ROWS,
        validation=_NO_ROWS,
        tokenizer_folders={},
        epoch_rows=0,
        layout=cast("Layout", parts.layout),  # a step asks for nothing else
    )


_NO_ROWS: Final = TokenSet(
    torch.zeros(0, dtype=torch.int32), None, torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
)


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch garbage collection off, so that objects die at the same place in every run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TINY = Shape(rows=2, length=16)
_FORMAT = 6
_NO_LIMIT = 2**50


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
        self._engine: _Engine | None = None
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
        """Trace one segment; see :meth:`dryfit.gpu.events.Tracer.trace`."""
        if (shape is not None) != kind.has_shape:
            raise InternalError("tracing a segment", f"{kind} with shape {shape}")
        if self._engine is None:
            self._engine = _virtual_gpu(self._spec.capability) if self._spec.kind is DeviceKind.CUDA else _FakeHost()
        with self._followed(self._engine):
            return self._stage(variant, self._engine).trace(kind, variant, shape)

    @contextmanager
    def _followed(self, engine: "_Engine") -> Iterator[None]:
        """Make new tensors fakes, and say where a model's own code cannot be followed."""
        try:
            with engine.active(), no_collection():
                yield
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
        return self._stages[variant.checkpointing, variant.chunked_loss].sent

    def count(self, work: WorkCounter, variant: Variant, shapes: Sequence[Shape]) -> None:
        """Count the operators of an optimizer step on micro-batches of these shapes; the device is a CUDA device.

        Raises:
            TraceError: The model's code cannot be traced.
        """
        self.trace(SegmentKind.UPDATE, variant, None)  # so that the optimizer has its state
        engine = _virtual_gpu(self._spec.capability)
        with self._followed(engine):
            self._stage(variant, engine).count(engine, work, shapes)

    def _stage(self, variant: Variant, engine: "_Engine") -> "_Stage":
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
            self._stages[built] = _Stage(parts, self._spec.kind, engine, ranks)
        return self._stages[built]


# What a model's own code may raise when it meets a tensor without values.
_FOREIGN = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _place(error: BaseException) -> str:
    """Return the last line of code outside torch and dryfit that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "/torch/" not in frame.filename and "/dryfit/" not in frame.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


@final
class _FakeHost:
    """The CPU, whose tensors are fakes.

    Attributes:
        recorder: Records segments of what happens.
    """

    def __init__(self) -> None:
        self._device = FakeDevice("cpu")
        self._stand_ins = StandIns()
        self.recorder = ScriptRecorder(LiveAllocations(AllocatorSettings, None, 0), Places(), "cpu")
        self.recorder.record_segments()

    def active(self) -> AbstractContextManager[object]:
        """Make new tensors fakes."""
        return self._device.active()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record what happens in this model, and in no other."""
        self.recorder.know(model)
        with ExitStack() as stack:
            for handle in self.recorder.follow():
                stack.callback(handle.remove)
            stack.enter_context(self._stand_ins)
            stack.enter_context(self.recorder)
            yield

    def marked(self, phase: StepPhase) -> None:
        """Choose the number that fakes give: 0 for the scaler's count of infinite gradients, 1 for sizes in models."""
        self._stand_ins.number = 0 if phase in (StepPhase.CLIP, StepPhase.OPTIMIZER) else 1


@final
class _GpuOfSteps:
    """A virtual GPU that runs steps of dryfit's own Trainer.

    Attributes:
        recorder: Records segments of what happens on it.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        spec = DeviceSpec(name="planned", capacity_bytes=_NO_LIMIT, capability=capability)
        self._gpu = VirtualGpu(spec, unlimited=True)
        self.recorder = self._gpu.dispatch
        self._gpu.dispatch.record_segments()
        self._gpu.dispatch.fakes_host = True
        self._gpu.dispatch.processors = None

    def active(self) -> AbstractContextManager[object]:
        """Let tensors be on the virtual GPU."""
        return self._gpu.stepping()

    def watching(self, model: nn.Module) -> AbstractContextManager[object]:
        """Call modules as they are called in this model, whichever of its parts runs first."""
        self.recorder.know(model)
        return nullcontext()

    @contextmanager
    def counted(self, work: WorkCounter) -> Iterator[None]:
        """Count the operators and kernels that run inside the block."""

        def note(func: Any, args: Any, kwargs: Any, out: Any) -> None:
            work.note(func, args, kwargs, out, self.recorder.phase)

        before = self._gpu.on_launch
        self.recorder.listeners.append(note)
        self._gpu.on_launch = lambda kernel, tensors: work.note_kernel(kernel, tensors, self.recorder.phase)
        try:
            yield
        finally:
            self.recorder.listeners.remove(note)
            self._gpu.on_launch = before
            work.is_timed = not self._gpu.multiplies_unseen

    def marked(self, phase: StepPhase) -> None:
        """Do nothing: a virtual GPU knows a scaler's questions."""


_Engine = _FakeHost | _GpuOfSteps
"""Where tensors take no memory, and what they would take is recorded."""


@cache
def _virtual_gpu(capability: tuple[int, int]) -> _GpuOfSteps:
    """Return the process's virtual GPU of a compute capability."""
    return _GpuOfSteps(capability)


def _plain(segment: Segment, model: nn.Module) -> Segment:
    """Return the segment without lines of code; what is freed bears the label of what was allocated last."""
    root = type(model).__name__
    known = [
        replace(label, line="", source="", module="" if label.module == root else label.module)
        for label in segment.label_table
    ]
    table, labels, last = dict[Label, int](), list[int](), 0
    for delta, number in zip(segment.deltas, segment.labels, strict=True):
        if delta > 0:
            last = table.setdefault(known[number], len(table))
        labels.append(last)
    return replace(segment, labels=labels, label_table=tuple(table) or tuple(known[:1]))


class _Stage:
    """A model on the fake device.

    Attributes:
        sent: What was sent in the micro-batch that was traced last.
    """

    def __init__(self, parts: StepParts, device: DeviceKind, engine: _Engine, ranks: CountedRanks) -> None:
        self._model = parts.model
        self._engine = engine
        self._recorder = engine.recorder
        self._host = StorageRecorder("cpu", kernels=False)
        self._ranks = ranks
        self.sent = Sent()
        with engine.watching(self._model), self._recorder.segment() as record:
            self._place(device)
        self._load = record.result
        # Not before: sums of gradients hang on the parameters themselves.
        self._plan = OptimizerPlan(modelled=True)
        self._steps = SubjectSteps(parts.connected(), device, self._plan, self._phase)
        self._trained: tuple[str, ...] | None = None
        self._has_state = False

    def trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        return _plain(self._segment(kind, variant, shape), self._model)

    def _segment(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        if kind is SegmentKind.LOAD:
            return self._load
        plan = OptimizerPlan(impl=variant.optimizer_impl, offload=variant.offload_optimizer, modelled=True)
        if plan != self._plan:
            self._plan = plan
            self._forget_state()
        with ExitStack() as offloaded:
            if variant.offload_activations:
                try:
                    handles = offload_layer_inputs(self._model)
                except ConfigError as error:  # this fallback is none of the model's; others are
                    raise TraceError(error.doing, error.found) from error
                for handle in handles:
                    offloaded.callback(handle.remove)
            return self._traced(kind, shape)

    def count(self, engine: "_GpuOfSteps", work: WorkCounter, shapes: Sequence[Shape]) -> None:
        """Count the operators of an optimizer step; of micro-batches of one shape one runs, and counts for all."""
        with engine.watching(self._model), engine.counted(work):
            self._forget_gradients()
            self._micro(shapes[0])
            for shape, times in Counter(shapes[1:]).items():
                before = work.so_far()
                self._micro(shape)
                each = work.so_far() - before
                work.add(Counter({operation: count * (times - 1) for operation, count in each.items()}))
            self._update()
            work.step_ends()

    def _traced(self, kind: SegmentKind, shape: Shape | None) -> Segment:
        with self._engine.watching(self._model):
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
        self._host.phase = phase
        self._ranks.backward = phase is StepPhase.BACKWARD
        self._engine.marked(phase)

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
            batch = self._steps.batch(shape)
            for name, tensor in batch.items():
                self._recorder.name(tensor, f"input:{name}", MemoryCategory.INPUTS)
        return record.result

    def _micro(self, shape: Shape) -> Segment:
        batch = self._steps.batch(shape)
        self._ranks.sent = Sent()
        for name, tensor in batch.items():
            self._recorder.adopt(tensor, f"input:{name}", MemoryCategory.INPUTS)
        self._phase(StepPhase.FORWARD)
        with self._recorder.segment() as record:
            self._steps.micro(batch)
            self.sent = self._ranks.sent
            graded = [(name, one.grad) for name, one in self._named() if one.grad is not None]
            for name, gradient in graded:
                self._recorder.name(gradient, f"gradient:{name}", MemoryCategory.GRADIENTS)
        self._trained = tuple(name for name, _ in graded)
        return record.result

    def _micro_host(self, shape: Shape) -> Segment:
        """Record the host tensors of a micro-batch; its gradients are forgotten."""
        batch = self._steps.batch(shape)
        self._forget_gradients()
        self._phase(StepPhase.FORWARD)
        with self._host, self._host.segment() as record:
            self._steps.micro(batch)
        self._forget_gradients()
        return record.result

    def _update(self) -> Segment:
        self._make_gradients()
        with self._recorder.segment() as record:
            self._steps.update()
            self._name_state(self._recorder)
        self._has_state = True
        return record.result

    def _update_host(self) -> Segment:
        """Record the host tensors that an optimizer's first step makes and keeps."""
        self._make_gradients()
        self._forget_state()
        with self._host, self._host.segment() as record:
            self._steps.update()
            self._name_state(self._host)
        self._forget_state()
        return record.result

    def _evaluate(self, shape: Shape) -> Segment:
        self._phase(StepPhase.EVALUATE)
        with self._recorder.segment() as record:
            self._steps.evaluate(self._steps.batch(shape))
        return record.result

    def _measure(self, shape: Shape) -> Segment:
        self._phase(StepPhase.EVALUATE)
        with self._recorder.segment() as record:
            self._steps.measure(shape)
        return record.result

    def _save(self) -> Segment:
        if not self._has_state:
            self._update()
        self._phase(StepPhase.SAVE)
        with self._recorder.segment() as record:
            self._steps.save()
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
        self._steps.begin_anew(self._plan)
        self._has_state = False

    def _name_state(self, recorder: StorageRecorder) -> None:
        names = {id(parameter): name for name, parameter in self._named()}
        for parameter, state in self._steps.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    name = f"optimizer:{names[id(parameter)]}:{key}"
                    recorder.name(value, name, MemoryCategory.OPTIMIZER)
