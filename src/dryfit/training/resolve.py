"""Child jobs that train nothing: prepare a study, check a checkpoint, probe the machine, copy rows."""

import json
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dryfit.meta.checkpoint_files import model_identity
from dryfit.meta.pretrained import Kind, empty_stack, stack_bytes
from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import CheckRequest, CheckResult, ProbeRequest, ProbeResult
from dryfit.settings.devices import check_enough
from dryfit.settings.errors import DataError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, smallest_device
from dryfit.settings.tables import ModelSettings, RegularizationSettings
from dryfit.settings.task_facts import facts_of, task_word
from dryfit.settings.text import few
from dryfit.settings.training_messages import ResolveRequest, ResolveResult, RowsRequest, RowsResult, SplitFacts
from dryfit.settings.user_code import FunctionName
from dryfit.settings.wire import Progress
from dryfit.tasks.answers import check_metrics
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.generation import answer_metric
from dryfit.tasks.own import check_settings, make_task, own_file_of, own_source
from dryfit.tasks.prepare import cache_tokens, checked_fold, checked_splits, study_folds
from dryfit.tasks.rows import VALIDATION, BadRow, RawRow, Row, fingerprint, label_counts, stream_rows, with_names
from dryfit.tasks.saved_models import folder_health
from dryfit.training.device import check_precisions, find_device

# Child job ROWS: write the rows of a source as JSON lines, for a process that must not import the readers.


_PROGRESS_EVERY = 10_000


def copy_rows(body: RowsRequest, channel: ChildChannel) -> RowsResult:
    """Write a line for each row, in order.

    Raises:
        DataError: The source is absent, or cannot be read to its end; or its first row lacks a column.
    """
    count = 0
    with Path(body.out).open("w", encoding="utf-8") as file:
        for row in stream_rows(body.source):
            if isinstance(row, RawRow) and count == 0:
                _check_columns(row, body)
            file.write(json.dumps({"row": row.number, **_line(row, body.columns)}) + "\n")
            count += 1
            channel.beat()
            if count % _PROGRESS_EVERY == 0:
                channel.send(Progress(step=count, total_steps=0, epoch=0.0))
    return RowsResult(rows=count)


def _line(row: RawRow | BadRow, columns: tuple[str, ...]) -> dict[str, object]:
    if isinstance(row, BadRow):
        return {"error": f"{row.error.found}"}
    if not columns:
        return {"values": json.loads(json.dumps(row.values, default=_unwritten))}
    absent = [column for column in columns if column not in row.values]
    if absent:
        return {"error": f"there is no column {few(map(repr, absent))}"}
    values = {column: row.values[column] for column in columns}
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:  # an image, a date, bytes
        return {"error": str(error)}
    return {"values": values}


def _unwritten(value: object) -> dict[str, str]:
    return {"unwritten": type(value).__name__}


def _check_columns(row: RawRow, body: RowsRequest) -> None:
    absent = [column for column in body.columns if column not in row.values]
    if absent:
        raise DataError(
            f"reading {body.source}",
            f"there is no column {few(map(repr, absent))}",
            f"its columns: {few(map(str, row.values), most=20)}",
        )


# Child jobs that train nothing: RESOLVE prepares a study, CHECK checks a checkpoint, PROBE checks the devices.


_VERSIONED = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "scikit-learn", "numpy")


def resolve(body: ResolveRequest, channel: ChildChannel) -> ResolveResult:
    """Check all data, tokenise it for every (model, length), and describe the machine.

    Raises:
        DryfitError: A row, a model, a precision or the device is not what the study needs.
    """
    torch.set_num_threads(1)
    device, count = _found_device(body)
    task = make_task(body.task, TaskContext(body.settings, body.data))
    if facts_of(body.task).own:
        check_settings(type(task), body.settings, body.searched)
    check_metrics(task, body.metrics)
    data = with_names(body.data, task.required)
    task = make_task(body.task, TaskContext(body.settings, data))
    splits = checked_splits(task)
    folds = {fold: checked_fold(task, splits, fold) for fold in study_folds(data)}
    channel.beat()
    data_fingerprint = fingerprint(splits)
    own_file, source = own_file_of(type(task)), own_source(type(task))
    revisions = {task_word(body.task): source} if source else {}
    if (metric := body.settings.lm.metric) is not None:
        revisions[FunctionName.parse(metric).short] = answer_metric(metric).source
    weights_bytes: dict[str, int] = {}
    remarks: list[str] = []
    for model, max_length in body.pairs:
        train = body.settings.train.model_copy(update={"max_length": max_length})
        settings = body.settings.model_copy(update={"model": model, "train": train})
        task = make_task(body.task, TaskContext(settings, data))
        cache = partial(cache_tokens, task, cache_dir=Path(body.cache_dir), data_fingerprint=data_fingerprint)
        remarks += task.remarks(cache(splits))
        for fold, rows in folds.items():
            cache(rows, fold=fold)
            channel.beat()
        sources = task.sources().values()
        revisions |= {source.name: model_identity(source) for source in sources}
        if model.name not in weights_bytes:
            # Layers that two encoders share are counted twice: a trial of the space may share none.
            weights_bytes[model.name] = saved_bytes(task)
        channel.beat()
    facts = {name: _facts(rows, task) for name, rows in splits.items()}
    specs = device_specs(count) if device is DeviceKind.CUDA else ()
    return ResolveResult(
        data_fingerprint=data_fingerprint,
        splits=facts,
        fold_rows=tuple(len(rows[VALIDATION]) for rows in folds.values()),
        revisions=revisions,
        own_file=str(own_file or ""),
        weights_bytes=weights_bytes,
        device=device,
        device_count=count,
        versions={"python": platform.python_version(), **{name: version(name) for name in _VERSIONED}},
        device_spec=smallest_device(specs),
        device_specs=specs,
        device_uuids=device_uuids(count) if count and device is DeviceKind.CUDA else (),
        remarks=tuple(remarks),
        labels=data.labels if "label" in task.required else (),
    )


def _found_device(body: ResolveRequest) -> tuple[DeviceKind, int]:
    """Return where trials run, and on how many devices of this machine, which is asked only if they run here."""
    if body.elsewhere:
        return DeviceKind.CUDA, 0
    device, count = find_device(body.device)
    if device is DeviceKind.CUDA:
        check_enough(count, body.processes)
    check_precisions(body.precisions, device)
    return device, count


def saved_bytes(task: Task) -> int:
    """Return the bytes of a trial's weights on disk: those of its pretrained models, or of its adapters alone."""
    settings = task.context.settings
    if task.kind is not Kind.CAUSAL_LM or settings.lora.r == 0:
        return sum(stack_bytes(source, task.kind) for source in task.sources().values())

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del part
        return empty_stack(source, kind, RegularizationSettings(), frozen)

    trained = [parameter for parameter in task.model(make).parameters() if parameter.requires_grad]
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


def _facts(rows: tuple[Row, ...], task: Task) -> SplitFacts:
    has_evidence = sum(1 for row in rows if row.evidence) if "evidence" in task.required else None
    return SplitFacts(rows=len(rows), label_counts=label_counts(rows), with_evidence=has_evidence)


def check(body: CheckRequest, channel: ChildChannel) -> CheckResult:
    """Check a checkpoint without loading it.

    Raises:
        DryfitError: There is no such folder or task, or the model needs code that is not trusted.
    """
    torch.set_num_threads(1)
    return CheckResult(health=folder_health(body.folder, body.task, trust=body.trust))


def probe(body: ProbeRequest, channel: ChildChannel) -> ProbeResult:
    """Add eight numbers on each CUDA device: a driver that is too old, or a build without its kernels, fails here."""
    del body
    devices: list[DeviceSpec] = []
    trouble = ""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            total = float(torch.ones(8, device=f"cuda:{index}").sum())
        except RuntimeError as error:
            trouble = f"cuda:{index}: {str(error).splitlines()[0]}"
            continue
        if total != 8:
            trouble = f"cuda:{index} says that eight ones are {total}"
            continue
        devices.append(_spec(torch.cuda.get_device_properties(index)))
    return ProbeResult(
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        devices=tuple(devices),
        bf16=not devices or torch.cuda.is_bf16_supported(),
        trouble=trouble,
    )


def device_specs(count: int) -> tuple[DeviceSpec, ...]:
    """Return what each CUDA device is, in CUDA's order."""
    return tuple(_spec(torch.cuda.get_device_properties(index)) for index in range(count))


def device_uuids(count: int) -> tuple[str, ...]:
    """Return the UUIDs of the CUDA devices in CUDA's order, which may differ from the driver's."""
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count))


def _spec(properties: Any) -> DeviceSpec:
    return DeviceSpec(
        name=properties.name,
        capacity_bytes=properties.total_memory,
        capability=(int(properties.major), int(properties.minor)),
    )
