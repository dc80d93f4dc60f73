"""The planner of one request: the fallback, and where it may choose the number of ranks, by which a subject fits.

Steps are traced once: subjects that differ in batch size and length alone share their traces.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dryfit.core.errors import ConfigError, ShardError, TraceError
from dryfit.core.jobs.plan import PlanAnswer, PlanRequest
from dryfit.core.settings.execution import ExecutionSettings, PlanSubject, eval_rows
from dryfit.core.settings.memory_key import StepKey, step_key
from dryfit.core.sharding.rank_search import RankOutcome, next_ranks, ranks_taken
from dryfit.core.sharding.shard_summary import Sent
from dryfit.jobs.planning.plan_trials import PlannedTrials
from dryfit.memory.planning.estimate import Device
from dryfit.memory.planning.fallbacks import ChangeKind, PlannedTrial, SettingChange, execution_asked
from dryfit.memory.planning.ladder import plan
from dryfit.memory.planning.segment_source import SegmentSource
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.memory.tracing.events import SegmentKind, Shape
from dryfit.memory.tracing.tracer import Variant
from dryfit.parallel.layout import device_counts
from dryfit.parallel.layout.shard_plans import ShardPlans
from dryfit.train.optim.optimizer import check_sharded
from dryfit.train.rehearsal.step_tracer import StepTracer

_Step = tuple[StepKey, int]
"""A step, and the number of ranks that make it."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the subjects of a request.

    Attributes:
        request: What is asked.
        device: The device planned for, with what is known of it.
        store: Traces of earlier requests.
        shards: How models are sharded over ranks.
        trials: What is fixed of each subject.
    """

    request: PlanRequest
    device: Device
    store: TraceStore
    shards: ShardPlans
    trials: PlannedTrials
    _sources: dict[_Step, SegmentSource] = field(default_factory=dict[_Step, SegmentSource])
    _tracers: dict[_Step, StepTracer] = field(default_factory=dict[_Step, StepTracer])

    def prepare(self, trials: Sequence[PlannedTrial]) -> None:
        """Say which batches will be asked for, so that a whole space needs few traces."""
        if len(trials) == 1:
            return
        execution = self.request.execution
        for subject, trial in zip(self.request.subjects, trials, strict=True):
            if execution.ranks > 1:
                self.shards.prove(subject, execution.ranks)
            source = self.source(subject, execution)
            rows = min(execution.micro_batch or trial.effective_batch, trial.effective_batch)
            for length in trial.lengths.candidates:
                source.prepare(SegmentKind.BATCH, [Shape(trial.effective_batch, length)])
                source.prepare(SegmentKind.MICRO_FIRST, [Shape(rows, length)])
                source.prepare(SegmentKind.EVALUATE, [Shape(eval_rows(rows, execution.eval_batch), length)])

    def on_ranks_set(self, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
        """Plan a subject on as many ranks as the execution settings say.

        Raises:
            ConfigError: A setting is impossible.
            ShardError: The model cannot be sharded so.
            TraceError: The model's code cannot be followed to shard it.
        """
        execution = self.request.execution
        if execution.ranks > 1:
            self.shards.prove(subject, execution.ranks)
        answer = self._climb(subject, trial, execution, every_fallback=self.request.every_fallback)
        return answer if execution.ranks == 1 else self._with_shards(subject, trial, execution, answer)

    def on_fewest_ranks(self, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
        """Plan a subject on the fewest ranks by which it fits; where none does, return the refusal on one device.

        Raises:
            ConfigError: A setting is impossible.
        """
        request = self.request
        exact, host_bytes = request.execution.allow == "exact", request.host_bytes
        degrees = () if exact or not request.several else request.degrees
        reasons = ['execution.allow is "exact": ranks add up in another order'] if exact else list[str]()
        answers: dict[int, PlanAnswer] = {}
        outcomes: dict[int, RankOutcome] = {}
        while (ranks := next_ranks(outcomes, degrees)) is not None:
            try:
                if ranks == 1:
                    every = request.every_fallback
                    answers[ranks] = self._climb(subject, trial, request.execution, every_fallback=every)
                else:
                    answers[ranks] = self._on_ranks(subject, ranks)
                outcomes[ranks] = device_counts.rank_outcome(answers[ranks], ranks, host_bytes)
            except (ConfigError, ShardError, TraceError) as error:
                if ranks == 1:
                    raise
                outcomes[ranks] = RankOutcome.NOT_POSSIBLE
                reasons.append(device_counts.why_not_sharded(ranks, error))
        alone, taken = answers.pop(1), ranks_taken(outcomes)
        if reasons and not alone.verdict.fits:
            alone = alone.model_copy(update={"cannot_shard": reasons[0]})
        if taken is None:
            return device_counts.with_tried_ranks(alone, answers, host_bytes)
        answer = alone
        if taken > 1:
            answer = device_counts.answer_on_ranks(alone, answers[taken], taken, trial, request.execution)
        return answer if host_bytes is not None else self._with_more_ranks(subject, answer, taken, degrees)

    def rank_source(self, subject: PlanSubject, ranks: int) -> SegmentSource:
        """Return the segments of one rank, where its optimizer can be sharded; the plan of its shards is not proved.

        Raises:
            ConfigError: The model cannot be sharded over so many ranks, or the optimizer takes no slices.
            TraceError: The model's code cannot be followed to shard it.
        """
        return self.source(subject, self._execution_on(subject, ranks))

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

    def _execution_on(self, subject: PlanSubject, ranks: int) -> ExecutionSettings:
        """Return the settings with another number of ranks, which the subject's optimizer must allow."""
        execution = self.request.execution.model_copy(update={"tp": ranks})
        check_sharded(subject.settings, execution)
        return execution

    def _climb(
        self, subject: PlanSubject, trial: PlannedTrial, execution: ExecutionSettings, *, every_fallback: bool
    ) -> PlanAnswer:
        return plan(
            trial,
            execution,
            self.source(subject, execution),
            self.device,
            resubject=lambda change: self._changed(subject, change, execution),
            every_fallback=every_fallback,
        )

    def _on_ranks(self, subject: PlanSubject, ranks: int) -> PlanAnswer:
        """Plan one rank of a subject; how its model is sharded is proved only where that fits."""
        execution = self._execution_on(subject, ranks)
        trial = self.trials.of(subject, execution)
        answer = self._climb(subject, trial, execution, every_fallback=False)
        if device_counts.rank_outcome(answer, ranks, self.request.host_bytes) is not RankOutcome.FITS:
            return answer
        return self._with_shards(subject, trial, execution, answer)

    def _with_more_ranks(
        self, subject: PlanSubject, answer: PlanAnswer, taken: int, degrees: Sequence[int]
    ) -> PlanAnswer:
        """Add the next number of ranks to fall back to, if the model can be sharded so."""
        for degree in degrees:
            if degree > taken:
                with suppress(ConfigError, TraceError):
                    execution = self._execution_on(subject, degree)
                    self.shards.plan(subject, degree)
                    may_chunk = self.trials.of(subject, execution).cannot_chunk is None
                    return device_counts.with_more_ranks(answer, degree, may_chunk=may_chunk)
        return answer

    def _with_shards(
        self, subject: PlanSubject, trial: PlannedTrial, execution: ExecutionSettings, answer: PlanAnswer
    ) -> PlanAnswer:
        """Add how the model is sharded, which is proved, and what a rank sends to an answer about one rank."""
        shards = self.shards.prove(subject, execution.ranks)
        sent = self._sent(subject, trial, execution, answer)
        return answer.model_copy(update={"sharding": shards.model_copy(update={"sent": sent})})

    def _sent(
        self, subject: PlanSubject, trial: PlannedTrial, execution: ExecutionSettings, answer: PlanAnswer
    ) -> Sent | None:
        """What a rank sends in an optimizer step of the worst batch; None where the step cannot be traced."""
        if answer.memory is None:
            return None
        choice = answer.execution or execution_asked(trial, execution)
        whole, rest = divmod(trial.effective_batch, choice.micro_batch)
        length, tracer, total = answer.memory.worst_batch.length, self._tracer(subject, execution), Sent()
        for rows in [choice.micro_batch] * whole + [rest] * bool(rest):
            shape = Shape(rows, length)
            question = f"{tracer.key}\n{choice.checkpointing} {shape}"
            sent = self.store.sent(question)
            if sent is None:
                try:
                    sent = tracer.sent(Variant(checkpointing=choice.checkpointing), shape)
                except TraceError:
                    return None
                self.store.put_sent(sent, question)
            total += sent
        return total

    def _changed(
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

    def _tracer(self, subject: PlanSubject, execution: ExecutionSettings) -> StepTracer:
        step = (step_key(subject), execution.ranks)
        if step not in self._tracers:
            plan = self.shards.plan(subject, execution.ranks) if execution.ranks > 1 else None
            self._tracers[step] = StepTracer(subject, self.device.spec, reentrant=execution.reentrant, plan=plan)
        return self._tracers[step]
