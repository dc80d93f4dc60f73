"""Child job PLAN: the memory of trials on a device, before anything runs on it."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError, ShardError, TraceError
from dryfit.core.jobs import ChildResult, PlanAnswer, PlanRequest, PlanResult, StudyTokens
from dryfit.core.settings.execution import ExecutionSettings, PlanSubject
from dryfit.core.settings.memory_key import any_shape, memory_key
from dryfit.core.settings.tables import DataSettings, ModelSettings
from dryfit.core.sharding.rank_search import AUTO, RankOutcome, next_ranks, ranks_taken
from dryfit.core.sharding.shard_summary import Sent, ShardSummary
from dryfit.core.text.units import gib
from dryfit.core.wire import Phase
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.planning.constants import device_constants, read_calibrations
from dryfit.memory.planning.estimate import Device, Lengths
from dryfit.memory.planning.fallbacks import ChangeKind, PlannedTrial, SettingChange, execution_asked
from dryfit.memory.planning.ladder import plan as climb
from dryfit.memory.planning.segment_source import SegmentSource
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.memory.tracing.events import SegmentKind, Shape
from dryfit.memory.tracing.tracer import Variant
from dryfit.meta.loading.catalogue import planning_config
from dryfit.meta.loading.configs import most_tokens
from dryfit.meta.loading.pretrained import cannot_checkpoint
from dryfit.parallel.layout import device_counts
from dryfit.parallel.layout.fsdp_bytes import ParameterSize, held_bytes
from dryfit.parallel.layout.proved_plans import PLANS_FOLDER
from dryfit.parallel.layout.shard_plans import ShardPlans
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.folds import Fold, study_folds
from dryfit.tasks.own import own_source
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.registry import make_task, task_class
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.train.optimizer import cannot_offload, check_divided, implementations, moments_of
from dryfit.train.rehearsal.step_tracer import StepTracer
from dryfit.train.rehearsal.subjects import step_parts, subject_task, whole_model
from dryfit.train.validation import evaluation_rows

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_Step = tuple[ModelSettings, str]
"""What subjects have in common that differ in batch size and length alone."""


def plan(body: PlanRequest, channel: ChildChannel) -> ChildResult:
    """Plan every subject of a request. What cannot be traced is answered as unknown.

    Raises:
        ConfigError: A model, a size or a wish is impossible.
    """
    torch.set_num_threads(1)
    channel.send(Phase(name="load"))
    body = body.model_copy(update={"subjects": tuple(map(_with_source, body.subjects))})
    for subject in body.subjects:
        check_divided(subject.settings, body.execution)
    cuts = ShardPlans(Path(body.trace_dir).parent / PLANS_FOLDER, whole_model)
    planner = _Planner(body, TraceStore.of_this_code(Path(body.trace_dir)), cuts)
    trials = [planner.trial(subject) for subject in body.subjects]
    planner.prepare(trials)
    answers: list[PlanAnswer] = []
    for subject, trial in zip(body.subjects, trials, strict=True):
        answers.append(planner.answer(subject, trial))
        channel.beat()
    return ChildResult(plan=PlanResult(answers=tuple(answers)), error=None)


def _held_text(subject: PlanSubject, processes: int) -> str:
    """What each of the processes that divide a trial holds, as far as it is known without a trace."""
    model = step_parts(subject, checkpointing=False, reentrant=False).model
    sizes = [ParameterSize(tuple(one.shape), one.itemsize, one.requires_grad) for one in model.parameters()]
    moments = moments_of(subject.settings.optim)
    held = held_bytes(sizes, rank=0, processes=processes, moments=moments)  # no other process holds more
    total = gib(held.weights_bytes + held.gradients_bytes + held.state_bytes)
    parts = (
        f"weights {gib(held.weights_bytes)}, gradients {gib(held.gradients_bytes)}, "
        f"optimizer state {gib(held.state_bytes)}"
    )
    return (
        f"each of {processes} processes holds {total} between two steps: {parts}; what a step takes beside is not known"
    )


def _with_source(subject: PlanSubject) -> PlanSubject:
    """Traces are shared by all studies: those of a class of the user's own hold while its file is the same."""
    source = own_source(task_class(subject.task))
    return subject.model_copy(update={"source": source}) if source else subject


@dataclass(slots=True)
class _Planner:
    """One request: subjects that differ only in batch and length share their traces."""

    body: PlanRequest
    store: TraceStore
    cuts: ShardPlans
    sources: dict[_Step, SegmentSource] = field(default_factory=dict[_Step, SegmentSource])
    lengths: dict[tuple[str, int, str], Lengths] = field(default_factory=dict[tuple[str, int, str], Lengths])
    tracers: dict[_Step, StepTracer] = field(default_factory=dict[_Step, StepTracer])
    ranks: dict[int, "_Planner"] = field(default_factory=dict[int, "_Planner"])

    def prepare(self, trials: Sequence[PlannedTrial]) -> None:
        """Say which batches will be asked for, so that a whole space needs few traces."""
        if len(trials) == 1:
            return
        for subject, trial in zip(self.body.subjects, trials, strict=True):
            if self.body.execution.ranks > 1:
                self.cuts.prove(subject, self.body.execution.ranks)
            source = self.source(subject)
            rows = min(self.body.execution.micro_batch or trial.effective_batch, trial.effective_batch)
            for length in trial.lengths.candidates:
                source.prepare(SegmentKind.BATCH, [Shape(trial.effective_batch, length)])
                source.prepare(SegmentKind.MICRO_FIRST, [Shape(rows, length)])
                source.prepare(SegmentKind.EVALUATE, [Shape(trial.evaluation_rows(rows), length)])

    def answer(self, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
        """Plan one subject.

        Raises:
            ConfigError: A wish is impossible.
            ShardError: Its model cannot be cut as the settings say.
            TraceError: Its model cannot be followed to cut it.
        """
        began_s, execution = time.monotonic(), self.body.execution
        if execution.tp == AUTO:
            found = self.fewest(subject, trial)
        else:
            cut = self.cuts.prove(subject, execution.ranks) if execution.ranks > 1 else None
            found = self.with_cut(subject, trial, self.climbed(subject, trial), cut)
        if self.body.several:
            found = device_counts.with_rank_counts(
                found, trial, self.body, self.device(), lambda degree: self.divided(subject, degree)
            )
        if execution.dp > 1:
            found = found.model_copy(update={"reasons": (*found.reasons, _held_text(subject, execution.dp))})
        return found.model_copy(update={"planner_s": round(time.monotonic() - began_s, 3)})

    def climbed(self, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
        """What the ladder says of a subject on the ranks of the execution."""
        return climb(
            trial,
            self.body.execution,
            self.source(subject),
            self.device(),
            resubject=lambda change: self.changed(subject, change),
            every_fallback=self.body.every_fallback,
        )

    def with_cut(
        self, subject: PlanSubject, trial: PlannedTrial, answer: PlanAnswer, cut: ShardSummary | None
    ) -> PlanAnswer:
        """An answer about a rank, with how the model is cut and what is sent."""
        if cut is None:
            return answer
        return answer.model_copy(
            update={"sharding": cut.model_copy(update={"sent": self.sent(subject, trial, answer)})}
        )

    def fewest(self, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
        """Plan a subject on the fewest ranks by which it fits; where none does, the refusal on one device.

        Raises:
            ConfigError: A wish is impossible.
        """
        exact, host_bytes = self.body.execution.allow == "exact", self.body.host_bytes
        degrees = () if exact or not self.body.several else self.body.degrees
        reasons = ['execution.allow is "exact": ranks add up in another order'] if exact else list[str]()
        answers: dict[int, PlanAnswer] = {}
        found: dict[int, RankOutcome] = {}
        while (ranks := next_ranks(found, degrees)) is not None:
            try:
                answers[ranks] = self.climbed(subject, trial) if ranks == 1 else self.on_ranks(ranks).rank_of(subject)
                found[ranks] = device_counts.rank_outcome(answers[ranks], ranks, host_bytes)
            except (ConfigError, ShardError, TraceError) as error:
                if ranks == 1:
                    raise
                found[ranks] = RankOutcome.NOT_POSSIBLE
                reasons.append(device_counts.why_not_sharded(ranks, error))
        one, taken = answers.pop(1), ranks_taken(found)
        one = one.model_copy(update={"cannot_shard": reasons[0]}) if reasons and not one.verdict.fits else one
        if taken is None:
            return device_counts.with_tried_ranks(one, answers, host_bytes)
        answer = (
            one if taken == 1 else device_counts.answer_on_ranks(one, answers[taken], taken, trial, self.body.execution)
        )
        return answer if host_bytes is not None else self.with_fallback(subject, answer, taken, degrees)

    def on_ranks(self, ranks: int) -> "_Planner":
        """One that plans a rank of so many, and climbs no further than it must."""
        if ranks not in self.ranks:
            execution = self.body.execution.model_copy(update={"tp": ranks})
            body = self.body.model_copy(update={"execution": execution, "every_fallback": False})
            self.ranks[ranks] = _Planner(body, self.store, self.cuts, lengths=self.lengths)
        return self.ranks[ranks]

    def rank_of(self, subject: PlanSubject) -> PlanAnswer:
        """Plan one rank of a subject's model; how it is cut is proved only where that fits.

        Raises:
            ConfigError: It cannot be cut so, or its optimizer takes no slices.
            ShardError: Its plan computes something else.
            TraceError: Its model cannot be followed.
        """
        check_divided(subject.settings, self.body.execution)
        trial, ranks = self.trial(subject), self.body.execution.ranks
        answer = self.climbed(subject, trial)
        fits = device_counts.rank_outcome(answer, ranks, self.body.host_bytes) is RankOutcome.FITS
        return self.with_cut(subject, trial, answer, self.cuts.prove(subject, ranks) if fits else None)

    def with_fallback(self, subject: PlanSubject, answer: PlanAnswer, taken: int, degrees: Sequence[int]) -> PlanAnswer:
        """An answer that fits, with the next number of ranks to fall back to, if the model can be cut so."""
        for degree in degrees:
            if degree > taken:
                with suppress(ConfigError, TraceError):
                    check_divided(subject.settings, self.on_ranks(degree).body.execution)
                    self.cuts.plan(subject, degree)
                    return device_counts.with_more_ranks(answer, degree)
        return answer

    def divided(self, subject: PlanSubject, degree: int) -> SegmentSource:
        """Segments of one rank of a subject's model, whose plan is not proved.

        Raises:
            ConfigError: Nothing can be cut, the degree does not divide what can be, or its optimizer takes no slices.
            TraceError: The model's code cannot be followed.
        """
        planner = self.on_ranks(degree)
        check_divided(subject.settings, planner.body.execution)
        return planner.source(subject)

    def sent(self, subject: PlanSubject, trial: PlannedTrial, answer: PlanAnswer) -> Sent | None:
        """What a rank sends in an optimizer step of the worst batch; None where the step cannot be traced."""
        if answer.memory is None:
            return None
        choice = answer.execution or execution_asked(trial, self.body.execution)
        whole, rest = divmod(trial.effective_batch, choice.micro_batch)
        length = answer.memory.worst_batch.length
        total = Sent()
        try:
            for rows in [choice.micro_batch] * whole + [rest] * bool(rest):
                total += self.sent_once(subject, Shape(rows, length), checkpointing=choice.checkpointing)
        except TraceError:
            return None
        return total

    def sent_once(self, subject: PlanSubject, shape: Shape, *, checkpointing: bool) -> Sent:
        """What a rank sends for one micro-batch.

        Raises:
            TraceError: The model's code cannot be traced.
        """
        tracer = self.tracer(subject)
        question = f"{tracer.key}\n{checkpointing} {shape}"
        found = self.store.sent(question)
        if found is None:
            found = tracer.sent(Variant(checkpointing=checkpointing), shape)
            self.store.put_sent(found, question)
        return found

    def trial(self, subject: PlanSubject) -> PlannedTrial:
        """What the ladder must know of a subject.

        Raises:
            ConfigError: The model has no positions for such a length.
        """
        settings, spec = subject.settings, self.body.device
        config = planning_config(settings.model)
        max_length = settings.train.max_length
        limit = most_tokens(config)
        if limit is not None and max_length > limit:
            raise ConfigError(
                f"planning {settings.model.name}",
                f"train.max_length is {max_length}",
                allowed=f"at most {limit}: the model has no more positions",
            )
        tokens, task = self.body.tokens, _task(self.body.tokens, subject)
        # Without rows nothing is made of a model's files, and none need be there.
        place = (settings.model.name, max_length, task.token_key() if tokens is not None else "")
        if place not in self.lengths:
            self.lengths[place] = Lengths.of(max_length, _row_lengths(tokens, task))
        return PlannedTrial(
            effective_batch=settings.train.batch_size,
            lengths=self.lengths[place],
            optimizer_impls=implementations(settings.optim.name, spec.kind),
            evaluation_rows=evaluation_rows,
            cannot_checkpoint=self.cannot_checkpoint(subject),
            cannot_offload=cannot_offload(settings.optim, spec.kind, processes=self.body.execution.processes),
            lora_rank=subject.lora.r if subject.lora is not None else None,
            measured_rows=task.measured_rows,
        )

    def cannot_checkpoint(self, subject: PlanSubject) -> str | None:
        """Why one of a subject's models cannot recompute its activations; None where all can."""
        task = subject_task(subject)
        found = (
            cannot_checkpoint(planning_config(source), task.kind, reentrant=self.body.execution.reentrant)
            for source in task.sources().values()
        )
        return next((reason for reason in found if reason is not None), None)

    def device(self) -> Device:
        """The device with what is known of it."""
        spec = self.body.device
        calibrations = read_calibrations(Path(self.body.trace_dir).parent)
        return Device(
            spec=spec,
            constants=device_constants(spec, torch.__version__, calibrations),
            allocator=allocator_settings(self.body.execution, os.environ),
            torch=torch.__version__,
        )

    def source(self, subject: PlanSubject) -> SegmentSource:
        """Segments of a subject: one source for all that differ in batch size and length alone."""
        step = _step(subject)
        if step not in self.sources:
            self.sources[step] = SegmentSource(self.tracer(subject), self.store)
        return self.sources[step]

    def tracer(self, subject: PlanSubject) -> StepTracer:
        """Traces a subject as the request's device and execution have it; one for all that differ in shapes alone."""
        execution, step = self.body.execution, _step(subject)
        if step not in self.tracers:
            plan = self.cuts.plan(subject, execution.ranks) if execution.ranks > 1 else None
            self.tracers[step] = StepTracer(subject, self.body.device, reentrant=execution.reentrant, plan=plan)
        return self.tracers[step]

    def changed(self, subject: PlanSubject, change: SettingChange) -> SegmentSource | None:
        """Segments after a change of the experiment; None where it has no such part."""
        settings = subject.settings
        match change.kind:
            case ChangeKind.EIGHT_BIT_OPTIMIZER:
                if settings.optim.name != "adamw" or self.body.execution.ranks > 1:
                    return None
                optim = settings.optim.model_copy(update={"name": "adamw8bit"})
                smaller = subject.model_copy(update={"settings": settings.model_copy(update={"optim": optim})})
                return SegmentSource(self.tracer(smaller), self.store, twin=self.source(subject))
            case ChangeKind.SMALLER_RANK:
                if subject.lora is None:
                    return None
                return self.source(
                    subject.model_copy(update={"lora": subject.lora.model_copy(update={"r": change.after})})
                )
            case ChangeKind.SHORTER | ChangeKind.SMALLER_BATCH:
                return self.source(subject)  # shapes alone: the same segments


def _step(subject: PlanSubject) -> _Step:
    return (subject.settings.model, memory_key(any_shape(subject)))


def allocator_settings(execution: ExecutionSettings, environment: Mapping[str, str]) -> AllocatorSettings:
    """How the caching allocator of a trial's process will be set: as the user's variable says, else as planned."""
    for name in _ALLOCATOR_VARIABLES:
        if environment.get(name):
            return AllocatorSettings.parse(environment[name])
    return AllocatorSettings.of(execution.allocator)


def _task(tokens: StudyTokens | None, subject: PlanSubject) -> Task:
    """What a subject learns, from the study's data where there is any."""
    dummy = DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label)
    return make_task(subject.task, TaskContext(subject.settings, dummy if tokens is None else tokens.data))


def _row_lengths(tokens: StudyTokens | None, task: Task) -> list[int] | None:
    """Tokens of every row that is trained on or scored; None where they are not known."""
    if tokens is None:
        return None
    whole = _lengths(tokens, task, None)
    first, *others = [*study_folds(tokens.data), None]
    if first is None:
        return whole
    found = _lengths(tokens, task, first)
    if sorted(found) == sorted(whole):  # each row has its tokens, whatever it stands beside: so it is in every fold
        return whole
    return [*found, *(length for fold in others if fold is not None for length in _lengths(tokens, task, fold))]


def _lengths(tokens: StudyTokens, task: Task, fold: Fold | None) -> list[int]:
    found = prepared_tokens(
        task,
        cache_dir=Path(tokens.cache_dir),
        data_fingerprint=tokens.data_fingerprint,
        only=(TRAIN, VALIDATION),
        fold=fold,
    )
    return [length for split in found.splits.values() for length in split.lengths_R.tolist()]
