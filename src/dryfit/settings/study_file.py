"""The study file as types: every table and key, with ranges and defaults."""

import shlex
from enum import StrEnum
from math import isfinite
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dryfit.settings.choices import DEFAULT_TASK, TRAINER_METRIC, Direction, Metric
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionSettings
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.tables import (
    CalledCode,
    DataSettings,
    ObjectiveSettings,
    OwnCode,
    ScriptSettings,
    Settings,
    TrainerSettings,
    TrialSettings,
)
from dryfit.settings.task_facts import MetricName, TaskName, default_metric
from dryfit.settings.trial import Goal
from dryfit.settings.user_code import NAME_PATTERN

# The table ``[nodes]`` of the study file: other machines that run trials.


LAUNCH = r"^(listen|slurm:[1-9][0-9]{0,3}|ray(:[^\s/]+:[0-9]{1,5})?)$"
_NOT_YOURS = ("--array", "--parsable", "--wrap", "--wait", "-W", "--test-only")


class NodesSettings(Settings):
    """``[nodes]``: other machines that run trials, each with an agent (``dryfit agent``)."""

    launch: str = Field(
        default="listen",
        pattern=LAUNCH,
        description="listen: agents are started by hand; slurm:N: by an array of N jobs of Slurm; "
        "ray, ray:HOST:PORT: by Ray, on each node of its cluster",
    )
    sbatch: str = Field(default="", description='slurm: more options of sbatch, such as "--gres=gpu:1 --time=4:00:00"')
    host: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="the address to listen on; agents must reach it; unset: 127.0.0.1, if launched this machine's own",
    )
    port: int = Field(default=0, ge=0, le=65535, description="the port to listen on; 0: any free one")
    slots: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        default="auto", description='trials on one node, at most; "auto": its share of runtime.parallel'
    )
    local: bool = Field(default=True, description="the machine of the control process runs trials too")
    lease_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        default=60, description="how long trials on a node go on without the control process"
    )

    expect: str | None = Field(
        default=None,
        description="the largest GPU that will join, as `dryfit plan --device` takes it; "
        "a trial that fits no smaller one waits for it instead of being refused",
    )
    change_device: bool = Field(
        default=False, description="a trial that was interrupted may go on on another model of GPU than it began on"
    )
    tls: bool = Field(
        default=False, description="encrypt what agents and the control process say; they know its certificate"
    )

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """The words of ``sbatch``, as a shell would read them."""
        return tuple(shlex.split(self.sbatch))

    def has_all_gpus(self, device: str) -> bool:
        """Whether trials run on GPUs of other machines alone, so that this one needs none.

        Args:
            device: As ``execution.device``.
        """
        return device == "cuda" and not self.local

    @field_validator("expect")
    @classmethod
    def _expects_a_known_device(cls, expect: str | None) -> str | None:
        try:
            is_gpu = expect is None or parse_device(expect).kind is DeviceKind.CUDA
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not is_gpu:
            raise ValueError(f'"{expect}" is no GPU; trials on CPUs are not planned for what may join')
        return expect

    @model_validator(mode="after")
    def _sbatch_has_options_of_slurm(self) -> Self:
        if self.sbatch and not self.launch.startswith("slurm:"):
            raise ValueError(f'sbatch is read where launch is "slurm:N"; it is "{self.launch}"')
        for word in self.sbatch_options:
            if word.partition("=")[0] in _NOT_YOURS or (word.startswith("-a") and not word.startswith("--")):
                raise ValueError(f'sbatch has {word}, which dryfit gives itself; how many agents: launch = "slurm:N"')
        return self


Value = bool | int | float | str
"""A value of a choice in the search space, as TOML writes it."""

Condition = dict[str, Value | tuple[Value, ...]]
"""Dotted names of other searched keys, each with the value or values for which a case applies."""

Point = Annotated[dict[str, Value], Field(min_length=1)]
"""An enqueued point of the search space: values of searched keys, by dotted name."""

ListenerName = Annotated[str, Field(pattern=NAME_PATTERN, description="package.module:function or file.py:function")]
"""A user's own function that makes an observer of the study."""

TOP = ":top"
"""Between a study's folder and the number of its best trials, in ``search.enqueue_from``."""

_MOST_CHOICES = 1000
"""Of one case: each is checked as a setting, and written into every record of the space."""

_MOST_CASES = 100
"""Of one key: it is checked of every two of them that they exclude each other."""

_MOST_STEPS = 2**53
"""Of a grid: floats count no further."""

_MINIMIZED = frozenset({Metric.LOSS, Metric.ECE, Metric.MSE, Metric.MAE, TRAINER_METRIC})


def _own_direction(metric: MetricName) -> Direction:
    """Return the direction of a built-in metric; for others the study file must give one."""
    return Direction.MINIMIZE if metric in _MINIMIZED else Direction.MAXIMIZE


class StudySettings(Settings):
    """``[study]``: what is searched for, and when to stop."""

    name: str = Field(default="study", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name of the study")
    task: TaskName = Field(
        default=DEFAULT_TASK,
        description="what the model learns; or a class of your own: `package.module:Class`, or `file.py:Class`",
    )
    task_version: int = Field(
        default=1,
        ge=0,
        description="of your own class; another number: earlier values do not compare, and a new generation begins",
    )
    trials: int = Field(default=20, ge=1, le=1_000_000, description="total of complete + pruned + failed trials")
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of everything")
    metric: MetricName = Field(
        default_factory=lambda before: default_metric(before.get("task", DEFAULT_TASK)),
        description="what is optimised, on the validation rows; unset: f1_macro, of evidence span_balanced, of share "
        "and joint combined, of causal-lm loss, of trainer and script eval_loss, of a regression mse. Your own task "
        "has names of its own",
    )
    direction: Direction | None = Field(default=None, description="maximize or minimize; unset: what the metric wants")
    also: tuple[MetricName, ...] = Field(
        default=(), description="further metrics optimised at the same time; the result is then a Pareto front"
    )
    also_directions: tuple[Direction, ...] | None = Field(
        default=None, description="a direction for each of `also`; unset: what each metric wants"
    )
    max_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="stop after so many hours of running"
    )
    patience: int | None = Field(
        default=None, ge=1, description="stop after so many finished trials without a better one"
    )
    baselines_s: float = Field(
        default=60.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that each baseline (one answer for all rows, chance, TF-IDF) may take before the first "
        "trial; 0: none is computed",
    )
    listeners: tuple[ListenerName, ...] = Field(
        default=(),
        description="functions of your own that make observers: `package.module:function`, or `file.py:function`",
    )
    track: tuple[str, ...] = Field(
        default=(),
        description="trackers that show the study: `tensorboard`, `mlflow:env:NAME`, `wandb[:PROJECT]`, `trackio`",
    )

    @property
    def resolved_direction(self) -> Direction:
        """The direction in the study file, or the metric's own."""
        return self.direction or _own_direction(self.metric)

    @property
    def further_goals(self) -> tuple[Goal, ...]:
        """The goals beside the metric."""
        directions = self.also_directions or tuple(_own_direction(metric) for metric in self.also)
        return tuple(
            Goal(name=metric, direction=direction) for metric, direction in zip(self.also, directions, strict=True)
        )


class Case(Settings):
    """One way to draw a searched key: ``choices``, or ``low``/``high``; ``when`` says under which condition."""

    choices: tuple[Value, ...] | None = Field(default=None, min_length=1, description="categorical")
    low: int | float | None = Field(default=None, description="smallest value")
    high: int | float | None = Field(default=None, description="largest value, included")
    log: bool = Field(default=False, description="draw on a logarithmic scale")
    step: int | float | None = Field(default=None, gt=0, description="grid from low")
    when: Condition | None = Field(default=None, description="only where these searched keys have these values")

    @model_validator(mode="after")
    def _one_kind(self) -> "Case":
        if (self.choices is None) == (self.low is None and self.high is None):
            raise ValueError("give either choices or low and high")
        if self.choices is not None:
            if self.log or self.step is not None:
                raise ValueError("log and step belong to low and high, not to choices")
            if len(self.choices) > _MOST_CHOICES:
                raise ValueError(f"there are {len(self.choices)} choices, and at most {_MOST_CHOICES} are allowed")
            if len({(type(choice), choice) for choice in self.choices}) != len(self.choices):
                raise ValueError("the choices repeat a value")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give both low and high")
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs low above 0, not {self.low}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other")
        if not isfinite(self.high - self.low):
            raise ValueError(f"the width of the range from {self.low} to {self.high} is no finite number")
        if self.step is not None and (self.high - self.low) / self.step > _MOST_STEPS:
            raise ValueError(f"step {self.step} divides the range into more than {_MOST_STEPS} steps")
        return self


class SamplerName(StrEnum):
    """How the next point is chosen."""

    TPE = "tpe"
    RANDOM = "random"
    QMC = "qmc"
    NSGA2 = "nsga2"
    GP = "gp"
    CMAES = "cmaes"


class QmcSequence(StrEnum):
    """Low-discrepancy sequences, both scrambled."""

    SOBOL = "sobol"
    HALTON = "halton"


class PrunerName(StrEnum):
    """How a poor trial is cut short."""

    NONE = "none"
    MEDIAN = "median"
    PERCENTILE = "percentile"
    ASHA = "asha"
    HYPERBAND = "hyperband"
    PATIENT = "patient"


class PatientOf(StrEnum):
    """The pruner behind a patient one."""

    MEDIAN = "median"
    PERCENTILE = "percentile"
    ASHA = "asha"
    HYPERBAND = "hyperband"


def _frozen(value: object) -> object:
    """Turn lists into tuples, at all levels: a strict model takes no list from Python."""
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {key: _frozen(item) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in cast("list[object]", value))
    return value


def _points(value: object) -> object:
    """Return enqueued points with dotted names, whether written quoted or, as nested tables, bare."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(dotted(item) for item in cast("list[object]", value))


def dotted(value: object) -> object:
    """Flatten a table to dotted names: ``{optim: {lr: 1}}`` to ``{optim.lr: 1}``."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, object] = {}
    for name, item in cast("dict[str, object]", value).items():
        inner = dotted(item)
        if isinstance(inner, dict):
            flat |= {f"{name}.{key}": leaf for key, leaf in cast("dict[str, object]", inner).items()}
        else:
            flat[name] = inner
    return flat


class SearchSettings(Settings):
    """``[search]``: the sampler, the pruner and enqueued points."""

    sampler: SamplerName = Field(default=SamplerName.TPE, description="tpe, random, qmc, nsga2, gp or cmaes")
    startup_trials: int = Field(default=10, ge=0, description="tpe, gp: random trials before the model is trusted")
    qmc_sequence: QmcSequence = Field(default=QmcSequence.SOBOL, description="qmc: which sequence, sobol or halton")
    population_size: int = Field(
        default=20, ge=2, le=10_000, description="nsga2: complete trials of a generation; the first is random"
    )
    pruner: PrunerName = Field(
        default=PrunerName.NONE, description="none, median, percentile, asha, hyperband or patient"
    )
    warmup_reports: int = Field(default=1, ge=0, description="every pruner: validations no trial is pruned before")
    pruner_startup_trials: int = Field(
        default=5, ge=0, description="median, percentile: complete trials before any is pruned"
    )
    percentile: Annotated[float, Field(ge=0, le=100)] = Field(
        default=25.0, description="percentile: a trial goes on among the best so many percent at its validation"
    )
    reduction: int = Field(
        default=3, ge=2, le=16, description="asha, hyperband: one of so many trials goes on at each rung"
    )
    patient_of: PatientOf = Field(
        default=PatientOf.MEDIAN, description="patient: who decides on a trial that stalls, any pruner but patient"
    )
    patience_reports: int = Field(
        default=1, ge=0, description="patient: validations without a better one that a trial is allowed"
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="patient: by how much its last ones must fall behind its best before them"
    )
    defaults_first: bool = Field(
        default=True, description="trial 0 is the study file's own values where the space allows it"
    )
    mirror: str = Field(
        default="journal",
        description="Optuna mirror: `journal` (optuna.journal in the study), a storage URL, `env:NAME` or `none`",
    )
    enqueue: Annotated[tuple[Point, ...], BeforeValidator(_points)] = Field(
        default=(),
        description="points to try after the study file's own values, before the sampler's: tables of searched keys",
    )
    enqueue_from: Annotated[str, Field(pattern=rf"^.+{TOP}[1-9][0-9]{{0,3}}$")] | None = Field(
        default=None, description="`DIR:top10`: a new study tries the best 10 trials of the study in DIR after these"
    )

    @property
    def deciding_pruner(self) -> PrunerName:
        """The pruner, or the one behind a patient one."""
        return PrunerName(self.patient_of) if self.pruner is PrunerName.PATIENT else self.pruner


class Isolation(StrEnum):
    """How a child process is made."""

    AUTO = "auto"
    FORKSERVER = "forkserver"
    FRESH = "fresh"


class RuntimeSettings(Settings):
    """``[runtime]``: processes and patience."""

    parallel: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        default=1, description='trials side by side, at most; "auto": as many as run fastest, and memory has room for'
    )
    isolation: Isolation = Field(
        default=Isolation.AUTO, description="auto, forkserver (Linux) or fresh (new interpreter)"
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(default=60, description="until a child's first line")
    hang_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600, description="longest silence of a child; steps that were quicker before shorten it"
    )
    trial_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="most seconds an attempt may take"
    )
    stop_grace_s: Annotated[float, Field(gt=0)] = Field(
        default=60, description="for a child to checkpoint when asked to stop"
    )
    verdict_timeout_s: Annotated[float, Field(gt=0)] = Field(default=30, description="a child waits for its verdict")
    checkpoint_every_s: Annotated[float, Field(gt=0)] = Field(
        default=60, description="between checkpoints, at validations"
    )
    retries: int = Field(default=3, ge=0, le=100, description="most retries of one trial that count")
    keep: str = Field(
        default="best:3",
        pattern=r"^(all|none|best:[1-9][0-9]{0,5})$",
        description="whose weights stay: best:3 (those of the best three trials by study.metric), all or none",
    )
    device_wait_s: Annotated[float, Field(ge=0)] = Field(
        default=3600, description="for device memory that others hold, while no trial can run; then the study pauses"
    )
    max_failed_in_a_row: int = Field(
        default=5, ge=1, description="the study stops after so many failed trials in a row"
    )
    max_same_failure: int = Field(
        default=3, ge=1, description="the study stops when its first so many trials fail in the same way"
    )
    max_refused_in_a_row: int = Field(
        default=1000, ge=1, description="the study stops after so many trials in a row that do not fit"
    )


def _cases(value: object) -> object:
    """Turn each of the three ways to write a searched key into a tuple of cases."""
    frozen = _frozen(value)
    if isinstance(frozen, dict):
        return (cast("dict[str, object]", frozen),)
    if isinstance(frozen, tuple):
        items = cast("tuple[object, ...]", frozen)
        whole_cases = bool(items) and all(isinstance(item, dict | Case) for item in items)
        if whole_cases and len(items) > _MOST_CASES:
            raise ValueError(f"there are {len(items)} cases, and at most {_MOST_CASES} are allowed")
        return items if whole_cases else ({"choices": items},)
    return value


Cases = Annotated[tuple[Case, ...], BeforeValidator(_cases), Field(min_length=1)]


class StudyConfig(TrialSettings):
    """A whole study file: the tables of trials and those of the study."""

    study: StudySettings = StudySettings()
    data: DataSettings = DataSettings()
    space: dict[str, Cases] = Field(default_factory=dict[str, Cases], description="searched keys, by dotted name")
    search: SearchSettings = SearchSettings()
    objective: ObjectiveSettings | None = Field(default=None, description="your own function, for the task objective")
    trainer: TrainerSettings | None = Field(
        default=None, description="a function that makes your own Trainer, for the task trainer"
    )
    script: ScriptSettings | None = Field(
        default=None, description="your own training script with its arguments, for the task script"
    )
    execution: ExecutionSettings = ExecutionSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    nodes: NodesSettings | None = Field(default=None, description="other machines; unset: there are none")

    @property
    def function(self) -> CalledCode | None:
        """The user's own code that is called for each trial, whichever table names it; None: there is none."""
        made = self.trainer or self.script
        if made is None:
            return self.objective
        goals = self.goals
        return CalledCode(
            function=made.command if isinstance(made, ScriptSettings) else made.make,
            goals=tuple(goal.name for goal in goals),
            directions=tuple(goal.direction for goal in goals),
            paths=(made.folder,) if isinstance(made, ScriptSettings) else made.paths,
            **made.model_dump(include=set(OwnCode.model_fields)),
        )

    @property
    def function_table(self) -> str:
        """The table that names that code."""
        return "script" if self.script is not None else "objective" if self.trainer is None else "trainer"

    @property
    def goals(self) -> tuple[Goal, ...]:
        """All goals; the best trial and pruning depend on the first."""
        own = self.objective
        if own is None:
            first = Goal(name=self.study.metric, direction=self.study.resolved_direction)
            return (first, *self.study.further_goals)
        directions = own.directions or (Direction.MINIMIZE,) * len(own.goals)
        return tuple(Goal(name=name, direction=one) for name, one in zip(own.goals, directions, strict=True))

    @property
    def trial_settings(self) -> TrialSettings:
        """The study file's values of all tables that decide what is learned."""
        return TrialSettings(**{name: getattr(self, name) for name in TrialSettings.model_fields})
