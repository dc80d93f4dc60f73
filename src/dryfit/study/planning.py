"""Plan the memory of trials without a device, and calibrate a device."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from dryfit.ledger.folder import StudyLayout, shared_traces
from dryfit.processes.node import device_of, gpu_count, named_gpu, visible_here
from dryfit.search.space import Space, apply_params, first_value, setting
from dryfit.settings.choices import BaseFormat, BuiltInTask, Precision
from dryfit.settings.errors import ChildError, ConfigError, LedgerError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, PlanSubject
from dryfit.settings.installed import installed_version
from dryfit.settings.memory_terms import Allocator, DeviceSpec, OptimizerImpl, VerdictKind
from dryfit.settings.plan_messages import (
    CalibrateRequest,
    CalibrateResult,
    MemoryCase,
    PlanAnswer,
    PlanRequest,
    PlanResult,
    StudyTokens,
)
from dryfit.settings.rehearsal_messages import Interval, RunCost, times
from dryfit.settings.run_costs import Prices, cost_of
from dryfit.settings.sharding import AUTO, DEGREES, degrees_within
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.tables import PACKAGED_MODEL, LoraSettings, ModelSettings, TrialSettings
from dryfit.settings.task_facts import BUILT_IN, TASK_MODULES
from dryfit.settings.text import Shown
from dryfit.settings.trial import Scalar
from dryfit.study.arguments import layout_of, space_of, study_file_of
from dryfit.study.child_jobs import run_all_alone, run_alone
from dryfit.study.pace import with_precision
from dryfit.study.requests import plan_subject, resolve_request
from dryfit.study.session import read_study
from dryfit.study.template import preset_text

# Plan a study file or its search space on request, by PLAN children.


AXES: Final = (
    "model.name",
    "train.max_length",
    "train.precision",
    "optim.name",
    "regularization.freeze_layers",
    "train.batch_size",
)
"""Keys that decide the memory of a trial; of the others, the study's own values are planned."""

_MAIN_AXES: Final = ("model.name", "train.max_length", "train.batch_size")
_MOST_POINTS: Final = 256
_SIDE_BY_SIDE: Final = 2
_PRELOAD: Final = ("dryfit.training.plan_job", *TASK_MODULES)
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)

OnNote: TypeAlias = Callable[[str], None]
"""Called with a line on what is being done."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A study to plan.

    Attributes:
        config: The study, its overrides included.
        space: What it searches.
        device: The device it would run on, with no more memory than ``execution.memory_limit`` allows.
        trace_dir: Folder of recorded traces.
        layout: Where the study lives; None where there is no study file.
        degrees: Ranks over 1 that ``execution.tp = "auto"`` may take.
        host_bytes: Host memory for all ranks of a trial; None: not counted.
        prices: What its hours are charged by; None: by nothing.
    """

    config: StudyConfig
    space: Space
    device: DeviceSpec
    trace_dir: Path
    layout: StudyLayout | None
    degrees: tuple[int, ...] = ()
    host_bytes: int | None = None
    prices: Prices | None = None

    @property
    def searched(self) -> tuple[str, ...]:
        """The axes that are searched, in the order of :data:`AXES`."""
        return tuple(name for name in AXES if self.space.cases(name))


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One combination of searched values, with or without checkpointing.

    Attributes:
        params: Values of the varied axes.
    """

    params: Mapping[str, Scalar]
    checkpointing: bool
    answer: PlanAnswer

    @property
    def mildness(self) -> tuple[bool, int, bool, int]:
        """Sort key of cells that fit: no change, then checkpointing, smaller micro-batches, and more devices last."""
        choice = self.answer.execution
        return (
            self.answer.verdict is not VerdictKind.FITS,
            self.answer.devices,
            choice is not None and choice.offloads,
            (choice.accumulation if choice is not None else 1) * 2 + self.checkpointing,
        )


@dataclass(frozen=True, slots=True)
class SpacePlan(Shown):
    """Which part of a search space fits.

    Attributes:
        varied: The axes whose values are all combined.
        kept: Searched axes of which one value was planned: the study's own where it is among those searched.
        cells: One for each combination, without and with checkpointing where the study leaves that open.
        planner_s: Seconds from the question to the answer.
        trials: Of the study.
        prices: What hours are charged by; None: by nothing.
    """

    device: DeviceSpec
    varied: tuple[str, ...]
    kept: Mapping[str, Scalar]
    cells: tuple[PlannedCell, ...]
    planner_s: float
    trials: int
    prices: Prices | None = None

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return any(cell.answer.verdict.fits for cell in self.cells)

    @property
    def hours(self) -> Interval | None:
        """Hours of a training, from the shortest to the longest of the combinations that fit; None: one's are unknown.

        Each combination is taken as often as another.
        """
        mildest: dict[tuple[Scalar, ...], PlannedCell] = {}
        for cell in sorted((one for one in self.cells if one.answer.verdict.fits), key=lambda one: one.mildness):
            mildest.setdefault(tuple(cell.params.values()), cell)
        known = [cell.answer.hours for cell in mildest.values() if cell.answer.hours is not None]
        if not known or len(known) < len(mildest):
            return None
        mean = sum(one.estimate for one in known) / len(known)
        return Interval(estimate=mean, low=min(one.low for one in known), high=max(one.high for one in known))

    @property
    def cost(self) -> RunCost | None:
        """Cost of all trials one after the other; None: their hours or the price are unknown."""
        hours = self.hours
        return None if hours is None else cost_of(times(hours, self.trials), 1, self.device, self.prices)


def plan_trial(asked: PlanInput, on_note: OnNote, *, ladder: bool = False) -> PlanAnswer:
    """Plan the study's own values.

    Args:
        asked: What is asked about.
        on_note: Hears what is being done.
        ladder: Price every change, also where none is needed: it takes several times as long. What does not fit is
            always priced with every change.

    Raises:
        DryfitError: The data, the model or a size is wrong.
    """
    settings = asked.config.trial_settings
    tokens = _tokens(asked, ((settings.model, settings.train.max_length),), on_note)
    request = _request(asked, (settings,), asked.config.execution, tokens)
    on_note(f"planning {settings.model.name} on {asked.device.name}")
    answer = _answer_of(request.model_copy(update={"every_fallback": ladder}))
    if answer.hours is not None:
        cost = cost_of(answer.hours, answer.devices, answer.device, asked.prices)
        answer = answer.model_copy(update={"cost": cost})
    if answer.verdict is VerdictKind.REFUSED and not ladder:
        on_note("it does not fit: looking for what would")
        priced = _answer_of(request.model_copy(update={"every_fallback": True}))
        # A planner that dies over the prices takes nothing back.
        return answer if priced.verdict is VerdictKind.UNKNOWN else priced
    return answer


def _answer_of(request: PlanRequest) -> PlanAnswer:
    ((answer,),) = _ask([request], lambda _: None)
    return answer


def plan_combinations(asked: PlanInput, on_note: OnNote) -> SpacePlan:
    """Plan every combination of the searched values that matter to memory.

    Raises:
        ConfigError: There are too many combinations.
        DryfitError: The data, a model or a size is wrong.
    """
    began_s = time.monotonic()
    kept, points = _points(asked)
    base = apply_params(asked.config.trial_settings, kept)
    settings = [apply_params(base, point) for point in points]
    pairs = dict.fromkeys((tables.model, tables.train.max_length) for tables in settings)
    tokens = _tokens(asked, tuple(pairs), on_note)

    wish = asked.config.execution
    choices = (False, True) if wish.checkpointing is None else (wish.checkpointing,)
    groups = [
        (choice, [index for index, tables in enumerate(settings) if tables.model == model])
        for model in dict.fromkeys(tables.model for tables in settings)
        for choice in choices
    ]
    requests = [
        _request(
            asked, [settings[index] for index in group], wish.model_copy(update={"checkpointing": choice}), tokens
        ).model_copy(update={"several": choice is choices[-1]})  # what takes least says how many devices would do
        for choice, group in groups
    ]
    on_note(f"planning {sum(len(group) for _, group in groups)} cells on {asked.device.name}")
    answers = _ask(requests, lambda index: on_note(_progress(groups[index], settings)))
    cells = {
        (index, choice): PlannedCell(points[index], choice, answer)
        for (choice, group), of_group in zip(groups, answers, strict=True)
        for index, answer in zip(group, of_group, strict=True)
    }
    return SpacePlan(
        device=asked.device,
        varied=tuple(name for name in asked.searched if name not in kept),
        kept=kept,
        cells=tuple(cells[index, choice] for index in range(len(points)) for choice in choices),
        planner_s=round(time.monotonic() - began_s, 3),
        trials=asked.config.study.trials,
        prices=asked.prices,
    )


def _points(asked: PlanInput) -> tuple[dict[str, Scalar], list[dict[str, Scalar]]]:
    """The axes of which one value is taken, and all combinations of the others.

    All axes are varied where that gives a table one can read; else the main ones alone.

    Raises:
        ConfigError: Even they have too many combinations.
    """
    points = asked.space.combinations(asked.searched, _MOST_POINTS)
    if points is not None:
        return {}, points
    main = [name for name in asked.searched if name in _MAIN_AXES]
    points = asked.space.combinations(main, _MOST_POINTS)
    if points is None:
        raise ConfigError(
            "planning a search space",
            f"{', '.join(main)} have more than {_MOST_POINTS} combinations",
            hint="search fewer values, such as --set space.train.batch_size=[8,32]",
        )
    return {name: _one_value(asked, name) for name in asked.searched if name not in main}, points


def _one_value(asked: PlanInput, name: str) -> Scalar:
    """The study's own value of a searched key where it can be drawn, or else the first that can."""
    own, cases = setting(asked.config.trial_settings, name), asked.space.cases(name)
    return own if any(case.contains(own) for case in cases) else first_value(cases[0])


def _progress(group: tuple[bool, list[int]], settings: Sequence[TrialSettings]) -> str:
    checkpointing, indices = group
    how = "with" if checkpointing else "without"
    return f"planned {settings[indices[0]].model.name} {how} checkpointing: {len(indices)} cells"


def _request(
    asked: PlanInput, settings: Sequence[TrialSettings], execution: ExecutionSettings, tokens: StudyTokens | None
) -> PlanRequest:
    return PlanRequest(
        subjects=tuple(plan_subject(asked.config, one) for one in settings),
        device=asked.device,
        execution=execution,
        tokens=tokens,
        trace_dir=str(asked.trace_dir),
        degrees=asked.degrees,
        host_bytes=asked.host_bytes,
        timed=True,
    )


def _ask(requests: Sequence[PlanRequest], on_done: Callable[[int], None]) -> list[tuple[PlanAnswer, ...]]:
    """The answers to some requests, side by side. Where a planner dies, its subjects' memory is unknown."""
    began_s = time.monotonic()
    preload = _PRELOAD if len(requests) > 1 else ()
    results = run_all_alone("planning memory", requests, most=_SIDE_BY_SIDE, preload=preload, on_done=on_done)
    waited_s = round(time.monotonic() - began_s, 3)
    return [_answers(request, result, waited_s) for request, result in zip(requests, results, strict=True)]


def _answers(request: PlanRequest, result: PlanResult | ChildError, waited_s: float) -> tuple[PlanAnswer, ...]:
    if isinstance(result, ChildError):
        reasons = tuple(part for part in (result.found, result.hint) if part)
        unknown = PlanAnswer.unknown(request.device, reasons, installed_version("torch"), waited_s)
        return (unknown,) * len(request.subjects)
    return result.answers


def _tokens(asked: PlanInput, pairs: Sequence[tuple[ModelSettings, int]], on_note: OnNote) -> StudyTokens | None:
    """Where the lengths of the study's rows are known from; None where they are not, and cannot be without a network.

    Raises:
        DryfitError: The data is wrong.
    """
    config, layout = asked.config, asked.layout
    if layout is None or not _has_rows(config):
        return None
    names = (*(model.name for model, _ in pairs), config.joint.criteria_model)
    if all(name is None or _is_local(name) for name in names):
        on_note("checking data and models")
        body = resolve_request(config, asked.space, pairs=pairs, cache_dir=layout.cache, device="cpu")
        fingerprint = run_alone("checking data and models", body).data_fingerprint
    else:
        fingerprint = _resolved_before(layout)
    if fingerprint is None:
        return None
    return StudyTokens(data=config.data, cache_dir=str(layout.cache), data_fingerprint=fingerprint)


def _has_rows(config: StudyConfig) -> bool:
    return config.data.file is not None or (config.data.train is not None and config.data.validation is not None)


def _is_local(model: str) -> bool:
    return model == PACKAGED_MODEL or any((Path(model) / name).is_file() for name in _TOKENIZER_FILES)


def _resolved_before(layout: StudyLayout) -> str | None:
    try:
        resolved = read_study(layout).resolved
    except LedgerError:
        return None
    return resolved.data_fingerprint if resolved is not None else None


# Calibration: runs some small models of realistic width on the device, then compares them with their plans.


_ROWS: Final = 16
_LENGTH: Final = 256
_MODELS: Final[dict[str, dict[str, Any]]] = {
    # BERT-base and Qwen2.5-0.5B with few layers: kernels and workspaces depend on widths, not on depth.
    "encoder": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "decoder": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def measure_and_compare(
    visible_device: str, keep_in: Path, on_note: Callable[[str], None], *, quick: bool = False
) -> CalibrateResult:
    """Run every case on a device, compare with their plans, keep the constants.

    Args:
        visible_device: Value of CUDA_VISIBLE_DEVICES.
        keep_in: Folder of the calibration file, beside that of the traces.
        on_note: Called with a line on what is being done.
        quick: Three cases only.

    Raises:
        MachineError: There is no such device.
        ChildError: No case could be run.
    """
    with tempfile.TemporaryDirectory(prefix="dryfit-") as name:
        exchange = Path(name) / "exchange"
        exchange.mkdir()
        measured, failed = 0, None
        for case in calibration_cases(Path(name), quick=quick):
            on_note(f"measuring {case.name}")
            body = CalibrateRequest(case=case, folder=str(exchange), visible_device=visible_device)
            try:
                run_alone(f"measuring {case.name}", body)
                measured += 1
            except ChildError as error:
                # A case that the device is too small for does not spoil the others.
                on_note(str(error))
                failed = error
        if not measured and failed is not None:
            raise failed
        on_note(f"planning the same {measured} cases without the device")
        body = CalibrateRequest(case=None, folder=str(exchange), calibration_dir=str(keep_in))
        return run_alone("comparing plans with measurements", body)


def calibration_cases(folder: Path, *, quick: bool = False) -> tuple[MemoryCase, ...]:
    """Return the cases to measure; configs of the models are written into ``folder``."""
    for name, config in _MODELS.items():
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder, decoder = folder / "encoder", folder / "decoder"
    first = (
        _case("encoder-bf16-fused", encoder, Precision.BF16),
        _case("encoder-fp32-checkpointed", encoder, Precision.FP32, checkpointing=True),
        _case("decoder-lora-bf16", decoder, Precision.BF16, lora=True),
    )
    if quick:
        return first
    return (
        *first,
        _case("encoder-fp32-foreach", encoder, Precision.FP32, impl=OptimizerImpl.FOREACH),
        _case("encoder-bf16-checkpointed", encoder, Precision.BF16, checkpointing=True, impl=OptimizerImpl.FOREACH),
        _case("encoder-bf16-native", encoder, Precision.BF16, allocator=Allocator.NATIVE),
        _case("decoder-lora-bf16-checkpointed", decoder, Precision.BF16, lora=True, checkpointing=True),
        _case("decoder-bf16-foreach", decoder, Precision.BF16, impl=OptimizerImpl.FOREACH),
    )


def _case(
    name: str,
    model: Path,
    precision: Precision,
    *,
    lora: bool = False,
    checkpointing: bool = False,
    impl: OptimizerImpl = OptimizerImpl.FUSED,
    allocator: Allocator = Allocator.EXPANDABLE,
) -> MemoryCase:
    tables = {
        "model": {"name": str(model)},
        "train": {"batch_size": _ROWS, "max_length": _LENGTH, "precision": precision},
    }
    decoder = model.name == "decoder"
    subject = PlanSubject(
        task=next(task for task, facts in BUILT_IN.items() if facts.decoder is decoder),
        settings=TrialSettings.model_validate_json(json.dumps(tables)),
        lora=LoraSettings(base=BaseFormat(precision)) if lora else None,
    )
    choice = ExecutionChoice(micro_batch=_ROWS, accumulation=1, checkpointing=checkpointing, optimizer_impl=impl)
    family = "decoder LoRA" if lora else model.name
    return MemoryCase(name=name, family=family, subject=subject, execution=choice, allocator=allocator)


def plan(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    task: BuiltInTask | None = None,
    ladder: bool = False,
    on_note: OnNote = lambda _: None,
) -> PlanAnswer:
    """Say whether a trial with the study's own values fits a device, without using one.

    Args:
        study_file: A study file or its folder; None: the defaults, or ``preset``. Its data may be missing.
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...; None: this machine's first GPU.
        overrides: ``key=value`` pairs that replace keys of the file; ``execution.*`` keys are kept as given.
        preset: A study file that comes with dryfit.
        task: That of the preset, where it is for several.
        ladder: Price every change, also where none is needed; slower.
        on_note: Called with a line about what is being done.

    Raises:
        ConfigError: A key, a size or the device is wrong, or there is no GPU and none was named.
        DryfitError: The data or the model is wrong.
    """
    asked = plan_input(study_file, device=device, overrides=overrides, preset=preset, task=task)
    return plan_trial(asked, on_note, ladder=ladder)


def plan_space(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    task: BuiltInTask | None = None,
    on_note: OnNote = lambda _: None,
) -> SpacePlan:
    """Say which part of a study's search space fits a device. The arguments are as in :func:`plan`.

    Raises:
        ConfigError: As :func:`plan`; or there are too many combinations.
        DryfitError: The data or a model is wrong.
    """
    return plan_combinations(
        plan_input(study_file, device=device, overrides=overrides, preset=preset, task=task), on_note
    )


def plan_input(
    study_file: Path | str | None,
    *,
    device: str | None,
    overrides: Sequence[str],
    preset: str | None,
    task: BuiltInTask | None = None,
    prices: Prices | None = None,
) -> PlanInput:
    """Read and check the subject of a plan; nothing is started.

    Raises:
        ConfigError: As :func:`plan`.
    """
    if study_file is not None and preset is not None:
        raise ConfigError("planning", f"a study file ({study_file}) and a preset ({preset})", "one of them")
    if task is not None and preset is None:
        raise ConfigError("planning", f"a task ({task}) without a preset", "--preset beside it, or study.task")
    layout = None
    if study_file is not None:
        loaded = load_study_file(study_file_of(Path(study_file)), overrides, Use.PLAN)
        layout = layout_of(study_file)
    elif preset is not None:
        loaded = load_study_text(preset_text(preset, task), Path(f"preset {preset}"), overrides, Use.PLAN)
    else:
        loaded = load_study_text("", Path("the defaults"), overrides, Use.PLAN)
    spec = loaded.config.execution.limited(device_of(device))
    degrees = _degrees(loaded.config.execution, named=device is not None)
    config = with_precision(loaded.config, Precision.FP32)  # auto may take bf16, which needs no more
    traces = shared_traces(os.environ, Path.home())
    return PlanInput(config, space_of(loaded), spec, traces, layout, degrees, prices=prices)


def _degrees(execution: ExecutionSettings, *, named: bool) -> tuple[int, ...]:
    """Return the numbers of ranks that a trial may take; any number of a device that is only named."""
    if execution.tp != AUTO:
        return ()
    return DEGREES if named else degrees_within(gpu_count(visible_here()))


def calibrate(device: str = "cuda:0", *, quick: bool = False, on_note: OnNote = lambda _: None) -> CalibrateResult:
    """Measure a handful of training steps on a GPU and keep what later plans for its kind of device can use.

    Args:
        device: ``cuda`` or ``cuda:N``, counted among those that this process may use.
        quick: Fewer steps.
        on_note: Called with a line about what is being done.

    Raises:
        ConfigError: It is no such name.
        MachineError: There is no such device.
        ChildError: Nothing could be measured.
    """
    visible = named_gpu(device, visible_here())
    keep_in = shared_traces(os.environ, Path.home()).parent
    return measure_and_compare(visible, keep_in, on_note, quick=quick)
