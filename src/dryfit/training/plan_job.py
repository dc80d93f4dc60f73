"""Child job PLAN: the memory of trials, from traces and the ladder, before anything runs."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import device_constants, read_calibrations
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.gpu.work import WorkCounter
from dryfit.meta.configs import check_positions, planning_config
from dryfit.meta.pretrained import cannot_checkpoint
from dryfit.parallel import device_counts
from dryfit.parallel.device_counts import with_rank_counts
from dryfit.parallel.fsdp import held_bytes
from dryfit.parallel.proved_plans import PLANS_FOLDER, ShardPlans
from dryfit.plans.estimate import Device, Lengths, SegmentSource
from dryfit.plans.ladder import PlannedTrial, SettingChange, execution_asked, plan_by_ladder
from dryfit.plans.trace_store import TraceStore
from dryfit.plans.tracer import Variant
from dryfit.processes.channel import ChildChannel
from dryfit.settings.device_reach import DeviceReach
from dryfit.settings.errors import ConfigError, DryfitError, TraceError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, PlanSubject
from dryfit.settings.ladder import Change
from dryfit.settings.memory_key import StepKey, step_key
from dryfit.settings.memory_terms import DeviceKind, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest, PlanResult, StudyTokens
from dryfit.settings.reach_calibrations import calibrated_reach, read_reach_calibrations
from dryfit.settings.rehearsal_messages import Interval, StepTime, run_hours, times
from dryfit.settings.sharding import AUTO, Sent
from dryfit.settings.tables import DataSettings, TrainSettings
from dryfit.settings.task_facts import facts_of
from dryfit.settings.text import gib
from dryfit.settings.wire import canonical_json
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.lm_loss import FOREIGN
from dryfit.tasks.own import make_task, own_source, task_class
from dryfit.tasks.prepare import Fold, prepared_tokens, study_folds
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.tokens import TokenSet
from dryfit.training.batches import first_epoch
from dryfit.training.model import cannot_chunk_loss, cannot_offload_activations, costs_time
from dryfit.training.optimizer import cannot_offload, check_sharded, has_pages, implementations, moments_of
from dryfit.training.step_tracer import StepTracer, step_parts, whole_model

# What the memory planner must know of a trial: lengths of its rows, its task, and what its model can do.


@dataclass(slots=True)
class PlannedTrials:
    """The trials of a request; those with the same model and length share their rows' lengths."""

    request: PlanRequest
    _whole_losses: dict[str, str | None] = field(default_factory=dict[str, str | None])
    _lengths: dict[tuple[str, int, str], Lengths] = field(default_factory=dict[tuple[str, int, str], Lengths])

    def of(self, subject: PlanSubject, execution: ExecutionSettings) -> PlannedTrial:
        """Return what the ladder must know of a subject.

        Raises:
            ConfigError: The model has no positions for such a length.
        """
        settings, tokens = subject.settings, self.request.tokens
        _check_length(subject)
        data = tokens.data if tokens is not None else _dummy_data(subject)
        task = make_task(subject.task, TaskContext(settings, data))
        return PlannedTrial(
            effective_batch=settings.train.batch_size,
            lengths=self._lengths_of(subject, task),
            optimizer_impls=implementations(settings.optim.name, self.request.device.kind),
            cannot_checkpoint=_cannot_checkpoint(task, execution),
            cannot_offload=cannot_offload(settings.optim, self.request.device.kind, processes=execution.processes),
            cannot_chunk=self._cannot_chunk(subject, execution),
            chunks_for_free=not costs_time(settings.train.precision),
            cannot_offload_activations=cannot_offload_activations(
                self.request.device.kind, processes=execution.processes
            ),
            lora_rank=subject.lora.r if subject.lora is not None else None,
            measured_rows=task.measured_rows,
            has_pages=has_pages(settings.optim),
        )

    def _cannot_chunk(self, subject: PlanSubject, execution: ExecutionSettings) -> str | None:
        """Why a subject's loss cannot be computed in chunks; of each model and its adapters asked once."""
        if execution.chunked_loss is False:
            return None  # it will not be, whatever the answer
        if not facts_of(subject.task).decoder:
            return "its loss is not over the words of a vocabulary"
        several = {"tp": execution.ranks, "dp": execution.dp}
        asked = [one and one.model_dump(mode="json") for one in (subject.settings.model, subject.lora)]
        key = canonical_json([*asked, *(many > 1 for many in several.values())])
        if key not in self._whole_losses:
            try:
                model, task = whole_model(subject)
                self._whole_losses[key] = cannot_chunk_loss(task, model, **several)
            except (DryfitError, *FOREIGN) as error:  # why it cannot be planned, its trace will say
                self._whole_losses[key] = f"its model cannot be built to plan it ({type(error).__name__})"
        return self._whole_losses[key]

    def _lengths_of(self, subject: PlanSubject, task: Task) -> Lengths:
        tokens, max_length = self.request.tokens, subject.settings.train.max_length
        # Without rows nothing is made of a model's files, and none need be there.
        key = (subject.settings.model.name, max_length, task.token_key() if tokens is not None else "")
        if key not in self._lengths:
            self._lengths[key] = Lengths.of(max_length, row_lengths(tokens, task) if tokens is not None else None)
        return self._lengths[key]


def row_lengths(tokens: StudyTokens, task: Task) -> list[int]:
    """Return the tokens of every row that is trained on or scored, in any fold."""
    whole = _lengths(tokens, task, None)
    first, *others = [*study_folds(tokens.data), None]
    if first is None:
        return whole
    in_first = _lengths(tokens, task, first)
    if sorted(in_first) == sorted(whole):  # each row has its tokens, whatever it stands beside: so it is in every fold
        return whole
    return [*in_first, *(length for fold in others if fold is not None for length in _lengths(tokens, task, fold))]


def _lengths(tokens: StudyTokens, task: Task, fold: Fold | None) -> list[int]:
    prepared = prepared_tokens(
        task,
        cache_dir=Path(tokens.cache_dir),
        data_fingerprint=tokens.data_fingerprint,
        only=(TRAIN, VALIDATION),
        fold=fold,
    )
    return [length for split in prepared.splits.values() for length in split.lengths_R.tolist()]


def _dummy_data(subject: PlanSubject) -> DataSettings:
    return DataSettings(num_labels=subject.num_labels, multi_label=subject.multi_label)


def _check_length(subject: PlanSubject) -> None:
    settings = subject.settings
    config, doing = planning_config(settings.model), f"planning {settings.model.name}"
    check_positions(config, "train.max_length", settings.train.max_length, doing)


def _cannot_checkpoint(task: Task, execution: ExecutionSettings) -> str | None:
    """Why one of a task's models cannot recompute its activations; None where all can."""
    reasons = (
        cannot_checkpoint(planning_config(source), task.kind, reentrant=execution.reentrant)
        for source in task.sources().values()
    )
    return next((reason for reason in reasons if reason is not None), None)


# The planner of one request: the fallback, and where it may choose the number of ranks, by which a subject fits.
#
# Steps are traced once: subjects that differ in batch size and length alone share their traces.


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
            asked = execution.choice(trial.effective_batch)
            for length in trial.lengths.candidates:
                source.prepare(SegmentKind.BATCH, [Shape(trial.effective_batch, length)])
                source.prepare(SegmentKind.MICRO_FIRST, [Shape(asked.micro_batch, length)])
                source.prepare(SegmentKind.EVALUATE, [Shape(asked.eval_rows, length)])

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
        exact, host_bytes, every = request.execution.allow == "exact", request.host_bytes, request.every_fallback
        degrees = () if exact or not request.several else request.degrees
        alone = self._climb(subject, trial, request.execution, every_fallback=every)
        if alone.verdict.fits:
            return alone if host_bytes is not None else self._with_more_ranks(subject, alone, 1, degrees)
        refused = alone.verdict is VerdictKind.REFUSED
        tried, reasons = device_counts.until_fits(
            degrees if refused else (),
            lambda ranks: self._on_ranks(subject, ranks),
            lambda ranks, answer: device_counts.fits_on(answer, ranks, host_bytes),
        )
        if exact:
            reasons = ['execution.allow is "exact": ranks add up in another order']
        if reasons:
            alone = alone.model_copy(update={"cannot_shard": reasons[0]})
        taken, several = next(reversed(tried.items()), (1, alone))
        if not device_counts.fits_on(several, taken, host_bytes):
            return device_counts.with_tried_ranks(alone, tried, host_bytes)
        answer = device_counts.answer_on_ranks(alone, several, taken, trial, request.execution)
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
            self._sources[step] = SegmentSource(self.tracer(subject, execution), self.store)
        return self._sources[step]

    def _execution_on(self, subject: PlanSubject, ranks: int) -> ExecutionSettings:
        """Return the settings with another number of ranks, which the subject's optimizer must allow."""
        execution = self.request.execution.model_copy(update={"tp": ranks})
        check_sharded(subject.settings, execution)
        return execution

    def _climb(
        self, subject: PlanSubject, trial: PlannedTrial, execution: ExecutionSettings, *, every_fallback: bool
    ) -> PlanAnswer:
        return plan_by_ladder(
            trial,
            execution,
            self.source(subject, execution),
            self.device.of_ranks(execution.ranks),
            resubject=lambda change: self._changed(subject, change, execution),
            every_fallback=every_fallback,
        )

    def _on_ranks(self, subject: PlanSubject, ranks: int) -> PlanAnswer:
        """Plan one rank of a subject; how its model is sharded is proved only where that fits."""
        execution = self._execution_on(subject, ranks)
        trial = self.trials.of(subject, execution)
        answer = self._climb(subject, trial, execution, every_fallback=False)
        if not device_counts.fits_on(answer, ranks, self.request.host_bytes):
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
        length, tracer, total = answer.memory.worst_batch.length, self.tracer(subject, execution), Sent()
        for shape in _micro_shapes(trial.effective_batch, choice, length):
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
        if change.kind is Change.SMALL_OPTIMIZER and settings.optim.name == "adamw" and execution.ranks == 1:
            optim = settings.optim.model_copy(update={"name": "adamw8bit"})
            smaller = subject.model_copy(update={"settings": settings.model_copy(update={"optim": optim})})
            return SegmentSource(self.tracer(smaller, execution), self.store, twin=self.source(subject, execution))
        if change.kind is Change.SMALLER_RANK and subject.lora is not None:
            lora = subject.lora.model_copy(update={"r": change.after})
            return self.source(subject.model_copy(update={"lora": lora}), execution)
        return None

    def tracer(self, subject: PlanSubject, execution: ExecutionSettings) -> StepTracer:
        """Return what traces the steps of a subject, or of one of its ranks."""
        step = (step_key(subject), execution.ranks)
        if step not in self._tracers:
            plan = self.shards.plan(subject, execution.ranks) if execution.ranks > 1 else None
            self._tracers[step] = StepTracer(subject, self.device.spec, reentrant=execution.reentrant, plan=plan)
        return self._tracers[step]


def _micro_shapes(effective_batch: int, choice: ExecutionChoice, length: int) -> list[Shape]:
    """Return the shapes of the micro-batches of an optimizer step."""
    whole, rest = divmod(effective_batch, choice.micro_batch)
    return [Shape(rows, length) for rows in [choice.micro_batch] * whole + [rest] * bool(rest)]


# Hours of a training: of the steps of its epochs, each on the mean batch of the first epoch.


@dataclass(slots=True)
class Hours:
    """Tells the hours of trainings; subjects that make the same step share one timed step.

    Attributes:
        planner: Traces the steps.
        reach: Gives what a device reaches, by its name.
    """

    planner: Planner
    reach: Callable[[str], DeviceReach | None]
    _timed: dict[tuple[_Step, Variant], tuple[StepTime | None, float]] = field(
        default_factory=dict[tuple[_Step, Variant], tuple[StepTime | None, float]]
    )
    _rows: dict[tuple[str, int, str], TokenSet] = field(default_factory=dict[tuple[str, int, str], TokenSet])

    def of(self, subject: PlanSubject, answer: PlanAnswer) -> Interval | None:
        """Return the hours of a trial's trainings, one for each fold, without evaluations.

        None: its rows are not known, it takes several devices or keeps a part of its step on the host, or its
        kernels have no times.
        """
        request, choice = self.planner.request, answer.execution
        if (
            request.tokens is None
            or choice is None
            or answer.devices > 1
            or request.execution.dp > 1
            or choice.offloads
        ):
            return None
        folds = study_folds(request.tokens.data)
        task = make_task(subject.task, TaskContext(subject.settings, request.tokens.data))
        rows = self._trained_rows(subject, task, request.tokens, folds[0] if folds else None)
        batches = _elements(subject.settings.train, task, rows, choice)
        mean = sum(batches) / len(batches)
        variant = Variant.of(choice)
        step = (step_key(subject), 1)
        if (step, variant) not in self._timed:
            self._timed[step, variant] = self._step_time(subject, choice, mean), mean
        time, timed = self._timed[step, variant]
        steps = subject.settings.train.epochs * len(batches)
        return None if time is None else times(run_hours(time, steps, mean / timed), len(folds) or 1)

    def _trained_rows(self, subject: PlanSubject, task: Task, tokens: StudyTokens, fold: Fold | None) -> TokenSet:
        """Return the rows that are trained on; subjects with the same tokens read them once."""
        key = (subject.settings.model.name, subject.settings.train.max_length, task.token_key())
        if key not in self._rows:
            cache, data = Path(tokens.cache_dir), tokens.data_fingerprint
            prepared = prepared_tokens(task, cache_dir=cache, data_fingerprint=data, only=(TRAIN,), fold=fold)
            self._rows[key] = prepared.splits[TRAIN]
        return self._rows[key]

    def _step_time(self, subject: PlanSubject, choice: ExecutionChoice, elements: float) -> StepTime | None:
        rows = subject.settings.train.batch_size
        shapes = _micro_shapes(rows, choice, max(1, round(elements / rows)))
        work = WorkCounter(reach=self.reach)
        try:
            tracer = self.planner.tracer(subject, self.planner.request.execution.model_copy(update={"tp": 1}))
            tracer.count(work, Variant.of(choice), shapes)
        except TraceError:  # what its memory is, other traces said
            return None
        made = work.work(self.planner.device.spec)
        return made.step_time if made is not None else None


def _elements(train: TrainSettings, task: Task, rows: TokenSet, choice: ExecutionChoice) -> list[int]:
    """Return the tokens, padding included, of each batch of the first epoch."""
    lengths = rows.lengths_R.clamp(max=train.max_length)
    grouped = train.group_by_length
    batches = first_epoch(task, rows, seed=0, batch_size=train.batch_size, group_by_length=grouped)
    micro = choice.micro_batch
    cut = [[lengths[batch[at : at + micro]] for at in range(0, len(batch), micro)] for batch in batches]
    return [sum(len(part) * int(part.max()) for part in parts) for parts in cut]


# The request's subjects become trials (``plan_trials``); the planner (``plan_answers``) traces their steps and finds
# the fallback and, where it may choose, the number of ranks by which each fits.


def plan(body: PlanRequest, channel: ChildChannel) -> PlanResult:
    """Plan every subject of a request. What cannot be traced is answered as unknown.

    Raises:
        ConfigError: A model, a size or an execution setting is impossible.
    """
    torch.set_num_threads(1)
    body = body.model_copy(update={"subjects": tuple(map(_with_source, body.subjects))})
    for subject in body.subjects:
        check_sharded(subject.settings, body.execution)
    trace_dir = Path(body.trace_dir)
    shards = ShardPlans(trace_dir.parent / PLANS_FOLDER, whole_model)
    planner = Planner(body, _device(body), TraceStore.of_this_code(trace_dir), shards, PlannedTrials(body))
    trials = [planner.trials.of(subject, body.execution) for subject in body.subjects]
    planner.prepare(trials)
    calibrations = read_reach_calibrations(trace_dir.parent)
    hours = Hours(planner, lambda name: calibrated_reach(name, torch.__version__, calibrations))
    answers: list[PlanAnswer] = []
    for subject, trial in zip(body.subjects, trials, strict=True):
        answer = _answer(planner, subject, trial)
        timed = body.timed and body.device.kind is DeviceKind.CUDA and answer.verdict.fits
        answers.append(answer.model_copy(update={"hours": hours.of(subject, answer)}) if timed else answer)
        channel.beat()
    return PlanResult(answers=tuple(answers))


def _answer(planner: Planner, subject: PlanSubject, trial: PlannedTrial) -> PlanAnswer:
    """Plan one subject.

    Raises:
        ConfigError: A setting is impossible.
        ShardError: Its model cannot be sharded as the settings say.
        TraceError: Its model's code cannot be followed to shard it.
    """
    began_s, request = time.monotonic(), planner.request
    auto, dp = request.execution.tp == AUTO, request.execution.dp
    answer = planner.on_fewest_ranks(subject, trial) if auto else planner.on_ranks_set(subject, trial)
    if request.several:
        answer = with_rank_counts(
            answer,
            trial,
            request,
            planner.device,
            lambda degree: planner.rank_source(subject, degree),
        )
    if dp > 1:
        answer = answer.model_copy(update={"reasons": (*answer.reasons, _held_text(subject, dp))})
    return answer.model_copy(update={"planner_s": round(time.monotonic() - began_s, 3)})


def _held_text(subject: PlanSubject, processes: int) -> str:
    """Say what each process of an FSDP-sharded trial holds, as far as it is known without a trace."""
    model = step_parts(subject, checkpointing=False, reentrant=False).model
    moments = moments_of(subject.settings.optim)
    held = held_bytes(model.parameters(), rank=0, processes=processes, moments=moments)  # no other process holds more
    total = gib(held.weights_bytes + held.gradients_bytes + held.state_bytes)
    parts = (
        f"weights {gib(held.weights_bytes)}, gradients {gib(held.gradients_bytes)}, "
        f"optimizer state {gib(held.state_bytes)}"
    )
    return (
        f"each of {processes} processes holds {total} between two steps: {parts}; what a step takes beside is not known"
    )


def _with_source(subject: PlanSubject) -> PlanSubject:
    """Add the fingerprint of a user's own task: all studies share traces, and its traces hold for one source alone."""
    source = own_source(task_class(subject.task))
    return subject.model_copy(update={"source": source}) if source else subject


def _device(request: PlanRequest) -> Device:
    """Return the device planned for, with its constants and the settings of its allocator."""
    calibrations = read_calibrations(Path(request.trace_dir).parent)
    return Device(
        spec=request.device,
        constants=device_constants(request.device, torch.__version__, calibrations),
        allocator=AllocatorSettings.of_environment(os.environ, AllocatorSettings.of(request.execution.allocator)),
        torch=torch.__version__,
    )
