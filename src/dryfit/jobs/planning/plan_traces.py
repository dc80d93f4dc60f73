"""Traced training steps of the subjects of a planning request, and what their ranks send.

Subjects that differ in batch size and length alone share their traces.
"""

from dataclasses import dataclass, field

from dryfit.core.settings.execution import DeviceSpec, ExecutionSettings, PlanSubject
from dryfit.core.settings.memory_key import StepKey, step_key
from dryfit.core.sharding.shard_summary import Sent
from dryfit.memory.planning.fallbacks import ChangeKind, SettingChange
from dryfit.memory.planning.segment_source import SegmentSource
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.memory.tracing.events import Shape
from dryfit.memory.tracing.tracer import Variant
from dryfit.parallel.layout.shard_plans import ShardPlans
from dryfit.train.optim.optimizer import check_sharded
from dryfit.train.rehearsal.step_tracer import StepTracer

_Step = tuple[StepKey, int]
"""A step, and the number of ranks that make it."""


@dataclass(slots=True)
class StepTraces:
    """Traced steps by subject and number of ranks.

    Attributes:
        device: The device planned for.
        store: Traces of earlier requests.
        shards: How models are sharded over ranks.
    """

    device: DeviceSpec
    store: TraceStore
    shards: ShardPlans
    _sources: dict[_Step, SegmentSource] = field(default_factory=dict[_Step, SegmentSource])
    _tracers: dict[_Step, StepTracer] = field(default_factory=dict[_Step, StepTracer])

    def source(self, subject: PlanSubject, execution: ExecutionSettings) -> SegmentSource:
        """Return the segments of a subject, or of one of its ranks.

        Raises:
            ConfigError: Its model cannot be sharded over so many ranks.
            TraceError: The model's code cannot be followed to shard it.
        """
        step = (step_key(subject), execution.ranks)
        if step not in self._sources:
            self._sources[step] = SegmentSource(self._tracer(subject, execution), self.store)
        return self._sources[step]

    def rank_source(self, subject: PlanSubject, execution: ExecutionSettings) -> SegmentSource:
        """Return the segments of one rank, where its optimizer can be sharded; the plan of its shards is not proved.

        Raises:
            ConfigError: As :meth:`source`, or the optimizer takes no slices.
            TraceError: As :meth:`source`.
        """
        check_sharded(subject.settings, execution)
        return self.source(subject, execution)

    def changed(
        self, subject: PlanSubject, change: SettingChange, execution: ExecutionSettings
    ) -> SegmentSource | None:
        """Return the segments after a change of the experiment; None where there is nothing to change."""
        settings = subject.settings
        match change.kind:
            case ChangeKind.EIGHT_BIT_OPTIMIZER:
                if settings.optim.name != "adamw" or execution.ranks > 1:
                    return None
                optim = settings.optim.model_copy(update={"name": "adamw8bit"})
                smaller = subject.model_copy(update={"settings": settings.model_copy(update={"optim": optim})})
                return SegmentSource(self._tracer(smaller, execution), self.store, twin=self.source(subject, execution))
            case ChangeKind.SMALLER_RANK:
                if subject.lora is None:
                    return None
                lora = subject.lora.model_copy(update={"r": change.after})
                return self.source(subject.model_copy(update={"lora": lora}), execution)
            case ChangeKind.SHORTER | ChangeKind.SMALLER_BATCH:
                return self.source(subject, execution)  # shapes alone: the same segments

    def sent(self, subject: PlanSubject, execution: ExecutionSettings, shape: Shape, *, checkpointing: bool) -> Sent:
        """Return what a rank sends for one micro-batch.

        Raises:
            TraceError: The model's code cannot be traced.
        """
        tracer = self._tracer(subject, execution)
        question = f"{tracer.key}\n{checkpointing} {shape}"
        sent = self.store.sent(question)
        if sent is None:
            sent = tracer.sent(Variant(checkpointing=checkpointing), shape)
            self.store.put_sent(sent, question)
        return sent

    def _tracer(self, subject: PlanSubject, execution: ExecutionSettings) -> StepTracer:
        step = (step_key(subject), execution.ranks)
        if step not in self._tracers:
            plan = self.shards.plan(subject, execution.ranks) if execution.ranks > 1 else None
            self._tracers[step] = StepTracer(subject, self.device, reentrant=execution.reentrant, plan=plan)
        return self._tracers[step]
