"""What the memory planner must know of a trial: lengths of its rows, its task, and what its model can do."""

from dataclasses import dataclass, field
from pathlib import Path

from dryfit.core.errors import ConfigError, DryfitError
from dryfit.core.jobs.plan import PlanRequest, StudyTokens
from dryfit.core.settings.execution import ExecutionSettings, PlanSubject
from dryfit.core.settings.tables import DataSettings
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.wire import canonical_json
from dryfit.memory.planning.estimate import Lengths
from dryfit.memory.planning.fallbacks import PlannedTrial
from dryfit.meta.loading.catalogue import planning_config
from dryfit.meta.loading.configs import most_tokens
from dryfit.meta.loading.pretrained import cannot_checkpoint
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.folds import Fold, study_folds
from dryfit.tasks.lm.decoder_tail import FOREIGN
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.train.activation_offload import cannot_offload_activations
from dryfit.train.chunked_loss import cannot_chunk_loss, costs_time
from dryfit.train.optim.optimizer import cannot_offload, has_pages, implementations
from dryfit.train.rehearsal.subjects import whole_model


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
    max_length, limit = settings.train.max_length, most_tokens(planning_config(settings.model))
    if limit is not None and max_length > limit:
        raise ConfigError(
            f"planning {settings.model.name}",
            f"train.max_length is {max_length}",
            allowed=f"at most {limit}: the model has no more positions",
        )


def _cannot_checkpoint(task: Task, execution: ExecutionSettings) -> str | None:
    """Why one of a task's models cannot recompute its activations; None where all can."""
    reasons = (
        cannot_checkpoint(planning_config(source), task.kind, reentrant=execution.reentrant)
        for source in task.sources().values()
    )
    return next((reason for reason in reasons if reason is not None), None)
