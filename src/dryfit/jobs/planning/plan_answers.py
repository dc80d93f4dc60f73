"""The planner of one request: the fallback by which a subject fits on a number of ranks, and what its ranks send."""

from collections.abc import Sequence
from dataclasses import dataclass

from dryfit.core.errors import TraceError
from dryfit.core.jobs.plan import PlanAnswer, PlanRequest
from dryfit.core.settings.execution import ExecutionSettings, PlanSubject, eval_rows
from dryfit.core.sharding.shard_summary import Sent, ShardSummary
from dryfit.jobs.planning.plan_traces import StepTraces
from dryfit.jobs.planning.plan_trials import PlannedTrials
from dryfit.memory.planning.estimate import Device
from dryfit.memory.planning.fallbacks import PlannedTrial, execution_asked
from dryfit.memory.planning.ladder import plan
from dryfit.memory.tracing.events import SegmentKind, Shape


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the subjects of a request.

    Attributes:
        request: What is asked.
        device: The device planned for, with what is known of it.
        traces: Steps of the subjects.
        trials: What is fixed of each subject.
    """

    request: PlanRequest
    device: Device
    traces: StepTraces
    trials: PlannedTrials

    def prepare(self, trials: Sequence[PlannedTrial]) -> None:
        """Say which batches will be asked for, so that a whole space needs few traces."""
        if len(trials) == 1:
            return
        execution = self.request.execution
        for subject, trial in zip(self.request.subjects, trials, strict=True):
            if execution.ranks > 1:
                self.traces.shards.prove(subject, execution.ranks)
            source = self.traces.source(subject, execution)
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
        shards = self.traces.shards.prove(subject, execution.ranks) if execution.ranks > 1 else None
        answer = self.climb(subject, trial, execution, every_fallback=self.request.every_fallback)
        return answer if shards is None else self.with_shards(subject, trial, execution, answer, shards)

    def execution_on(self, ranks: int) -> ExecutionSettings:
        """Return the settings with another number of ranks."""
        return self.request.execution.model_copy(update={"tp": ranks})

    def climb(
        self, subject: PlanSubject, trial: PlannedTrial, execution: ExecutionSettings, *, every_fallback: bool
    ) -> PlanAnswer:
        """Find the first fallback by which a subject fits on the ranks of these settings.

        Raises:
            ConfigError: A setting is impossible, or the model cannot be sharded so.
            TraceError: The model's code cannot be followed to shard it.
        """
        return plan(
            trial,
            execution,
            self.traces.source(subject, execution),
            self.device,
            resubject=lambda change: self.traces.changed(subject, change, execution),
            every_fallback=every_fallback,
        )

    def with_shards(
        self,
        subject: PlanSubject,
        trial: PlannedTrial,
        execution: ExecutionSettings,
        answer: PlanAnswer,
        shards: ShardSummary,
    ) -> PlanAnswer:
        """Add how the model is sharded and what a rank sends to an answer about one rank."""
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
        length = answer.memory.worst_batch.length
        total = Sent()
        try:
            for rows in [choice.micro_batch] * whole + [rest] * bool(rest):
                shape = Shape(rows, length)
                total += self.traces.sent(subject, execution, shape, checkpointing=choice.checkpointing)
        except TraceError:
            return None
        return total
