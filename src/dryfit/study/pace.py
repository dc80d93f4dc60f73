"""How trials run fastest on this machine: threads, trials side by side, number format."""

import math
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from dryfit.ledger.folder import StudyLayout, shared_traces
from dryfit.ledger.replay import StudyState
from dryfit.processes.node import ComputeNode, Nodes, first_node
from dryfit.search.space import Space
from dryfit.settings.check_messages import PaceRequest, PaceResult
from dryfit.settings.choices import Precision
from dryfit.settings.devices import place_on, visible_devices
from dryfit.settings.errors import ChildError, DryfitError
from dryfit.settings.execution import plan_execution
from dryfit.settings.files import read_cached, write_cached
from dryfit.settings.memory_key import memory_key
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.sharding import AUTO
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.tables import TrialSettings
from dryfit.settings.task_facts import facts_of
from dryfit.settings.training_messages import ResolveResult, TrainRequest
from dryfit.settings.wire import Wire, digest
from dryfit.study.child_jobs import ChildJob, run_side_by_side
from dryfit.study.context import CUDA_THREADS, config_of, most_on_node
from dryfit.study.driver import StopRequests
from dryfit.study.requests import plan_subject, preparing_limits

# Choice of threads, trials side by side and number format from steps that were measured. Pure.


_MOST_SIDE_BY_SIDE: Final = 8
"""A sampler learns from trials that have ended: beyond so many at once it knows too little of those before."""

_SPREADS: Final = (1, 2, 4)
_AS_GOOD: Final = 1.05
"""Fewer side by side are taken if they take at most so much longer: they need less memory, and samplers know more."""

_FASTER: Final = 1.1
"""How much faster bf16 must be: less is within what measuring it again changes."""

_BF16_CAPABILITY: Final = (8, 0)
"""The first compute capability with bf16 in its tensor cores (CUDA C++ programming guide, arithmetic instructions)."""


class Way(Wire):
    """A way to run trials on the CPU, or on a GPU one at a time.

    Attributes:
        threads: CPU threads of each trial.
        side_by_side: Trials at once.
    """

    threads: int = Field(ge=1)
    side_by_side: int = Field(ge=1)
    precision: Precision


class MeasuredWay(Wire):
    """The measured speed of one way: the slowest of the concurrent trials."""

    way: Way
    step_s: float = Field(gt=0)

    @property
    def steps_per_s(self) -> float:
        """Steps of all trials side by side in a second."""
        return self.way.side_by_side / self.step_s

    def finish_s(self, trials: int) -> float:
        """Return the seconds until each of some trials has done one step."""
        return math.ceil(trials / self.way.side_by_side) * self.step_s


def divisions(cores: int, loader_workers: int, most: int) -> list[tuple[int, int]]:
    """Return ways to divide a machine's cores, as (threads of a trial, trials side by side), one at a time first.

    Each is one from whose threads the number side by side follows: as many as cores have room for.

    Args:
        cores: CPU cores that trials may use.
        loader_workers: Loader processes of each trial.
        most: Most trials side by side, for want of memory or of trials.
    """
    found: list[tuple[int, int]] = []
    for together in range(1, min(cores, most, _MOST_SIDE_BY_SIDE) + 1):
        threads = cores // together - loader_workers
        if threads >= 1 and cores // (threads + loader_workers) == together:
            found.append((threads, together))
    return [one for one in found if one[1] in _SPREADS or one == found[-1]]


def quickest(measured: Sequence[MeasuredWay], trials: int) -> MeasuredWay:
    """Return the way by which some trials end first; of those nearly as quick the one with the fewest side by side.

    Args:
        measured: At least one way, all of one number format.
        trials: How many are to be run.
    """
    least_s = min(one.finish_s(trials) for one in measured)
    near = [one for one in measured if one.finish_s(trials) <= least_s * _AS_GOOD]
    return min(near, key=lambda one: one.way.side_by_side)


def faster_format(fp32: MeasuredWay, bf16: MeasuredWay | None) -> MeasuredWay:
    """Return the way in bf16 if it was measured, and clearly faster; else that in fp32."""
    return bf16 if bf16 is not None and fp32.step_s >= bf16.step_s * _FASTER else fp32


def in_words(way: Way, precision: Precision, measured: Iterable[MeasuredWay]) -> str:
    """Return the measurements and the chosen settings as text.

    Args:
        way: What was chosen.
        precision: The number format of trials, which may be an earlier session's choice.
        measured: Everything that was measured.
    """
    text = f"{way.side_by_side} trial(s) at once, {way.threads} thread(s) each, {precision}"
    others = [f"{_short(one.way)}: {one.steps_per_s:.2f}" for one in measured]
    return f"{text} (steps a second, threads x trials: {', '.join(others)})"


def _short(way: Way) -> str:
    return f"{way.threads} x {way.side_by_side} {way.precision}"


def has_bf16(device: DeviceKind, spec: DeviceSpec | None, *, cpu: bool) -> bool:
    """Whether a device multiplies in bf16 by instructions of its own.

    Args:
        device: Where trials run.
        spec: The CUDA device; None: not known.
        cpu: Whether the processor does.
    """
    return cpu if device is DeviceKind.CPU else spec is not None and spec.capability >= _BF16_CAPABILITY


def recorded_precision(state: StudyState) -> Precision | None:
    """Return the number format that a study's trials have by its ledger; None: none was decided yet."""
    own = state.generation.comparability.own if state.generations else None
    found = None if own is None else own.get("train.precision")
    return None if found in (None, Precision.AUTO) else Precision(str(found))


def with_precision(config: StudyConfig, precision: Precision | None) -> StudyConfig:
    """Return a configuration with the number format that "auto" stands for.

    Args:
        config: The configuration; returned as it is unless its format is "auto".
        precision: The format; None: not decided yet.
    """
    if config.train.precision is not Precision.AUTO or precision is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


# Measure the fastest threads, parallel trials and number format on this machine for ``auto``; cache the results.
#
# A few optimizer steps of one trial are timed in PACE children, with each division of the cores, and in bf16. What
# was measured is kept for all studies of a user, by machine, model and shape.


_FOLDER: Final = "pace"
_MEASURED_S: Final = 0.6
_BEGUN_S: Final = 12.0
"""Nothing more is measured once so long was spent: on a machine that others use, or with a large model."""
_MOST_TOKENS: Final = 1024
_MOST_OPERATIONS: Final = 150e9
"""Of a measured step, so that one of a large model takes seconds on few cores. A step takes about 6 for each weight
and token (Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1)."""
_WEIGHT_BYTES: Final = 4
_HELD: Final = 5
"""What a trial holds of memory, in sizes of its weights: these, gradients, AdamW's two moments, activations."""


class _Kept(Wire):
    """A file of what was measured of one model and shape on one machine."""

    measured: tuple[MeasuredWay, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The values of "auto" in this session.

    Attributes:
        config: The configuration with it.
        note: What to tell the user; empty: nothing.
    """

    config: StudyConfig
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured.

    Attributes:
        settings: Of a trial; its number format is replaced by each way's.
        rows: Of each step.
        ways: In the number format that is measured first.
    """

    config: StudyConfig
    layout: StudyLayout
    resolved: ResolveResult
    node: ComputeNode
    settings: TrialSettings
    rows: int
    ways: tuple[Way, ...]


def decide(
    config: StudyConfig,
    space: Space,
    layout: StudyLayout,
    resolved: ResolveResult,
    nodes: Nodes,
    stops: StopRequests,
    recorded: Precision | None,
) -> Decided:
    """Replace ``auto`` settings by measured ones: threads of trials on the CPU, and the number format.

    A measurement that fails decides nothing: cores are then divided as where nothing can be measured, and the format
    is fp32. So it is of language models, of a user's own function, and of trials of several processes.

    Args:
        config: The configuration.
        space: Its search space.
        layout: Where the study lies.
        resolved: Its data and device.
        nodes: The first of them measures.
        stops: Where a stop is asked for, nothing is decided by what is missing.
        recorded: The number format that the study's trials have; None: they have none yet.
    """
    plain = Decided(with_precision(config, recorded or Precision.FP32))
    facts, execution = facts_of(config.study.task), config.execution
    wants_format = config.train.precision is Precision.AUTO and recorded is None
    wants_threads = (
        config.runtime.parallel == AUTO
        and execution.threads is None
        and execution.tp == 1
        and resolved.device is DeviceKind.CPU
    )
    there = resolved.device is DeviceKind.CPU or bool(resolved.device_count)  # else GPUs are other machines' alone
    single = execution.tp == 1 and execution.dp == 1
    measurable = there and single and not facts.decoder and not facts.calls_function
    if not measurable or not (wants_format or wants_threads):
        return plain
    subject = _subject(config, space, layout, resolved, first_node(nodes), divides=wants_threads)
    try:
        measured = _measured(subject, nodes, stops, subject.ways)
        if not measured:
            return plain
        best = chosen = quickest(measured, config.study.trials)
        if wants_format and has_bf16(resolved.device, resolved.device_spec, cpu=subject.node.facts.bf16):
            in_bf16 = best.way.model_copy(update={"precision": Precision.BF16})
            found = _measured(subject, nodes, stops, (in_bf16,))
            measured += found
            chosen = faster_format(best, found[0] if found else None)
    except (ChildError, DryfitError) as error:
        return Decided(plain.config, f"how trials run fastest could not be measured: {error}")
    decided = with_precision(config, recorded or chosen.way.precision)
    if wants_threads:
        update = {"execution": execution.model_copy(update={"threads": chosen.way.threads})}
        decided = decided.model_copy(update=update)
    return Decided(decided, f"measured on this machine: {in_words(chosen.way, decided.train.precision, measured)}")


def _subject(
    config: StudyConfig,
    space: Space,
    layout: StudyLayout,
    resolved: ResolveResult,
    node: ComputeNode,
    *,
    divides: bool,
) -> _Subject:
    """Return the largest model of a space at its longest input, and the ways to run it."""
    base, sizes = space.as_prepared(config.trial_settings), resolved.weights_bytes
    pairs = space.model_length_pairs(base)
    model, length = max(pairs, key=lambda pair: (sizes.get(pair[0].name, 0), pair[1]))
    settings = base.model_copy(update={"model": model, "train": base.train.model_copy(update={"max_length": length})})
    weights = max(sizes.get(model.name, 0) // _WEIGHT_BYTES, 1)
    tokens = min(_MOST_TOKENS, _MOST_OPERATIONS / (6 * weights))
    rows = max(1, min(settings.train.batch_size, int(tokens // length)))
    return _Subject(
        config=config,
        layout=layout,
        resolved=resolved,
        node=node,
        settings=settings,
        rows=rows,
        ways=_ways(config, resolved, node, weights * _WEIGHT_BYTES, divides=divides),
    )


def _ways(
    config: StudyConfig, resolved: ResolveResult, node: ComputeNode, weights_bytes: int, *, divides: bool
) -> tuple[Way, ...]:
    first = config.train.precision if config.train.precision is not Precision.AUTO else Precision.FP32
    execution, cores = config.execution, node.facts.cores
    if divides:
        held_bytes = _HELD * weights_bytes
        room = max(1, node.host_memory().available_bytes({}) // held_bytes)
        most = min(config.study.trials, room)
        divided = divisions(cores, execution.loader_workers, most)
        return tuple(Way(threads=threads, side_by_side=most, precision=first) for threads, most in divided)
    if resolved.device is DeviceKind.CUDA:
        threads = execution.threads or min(cores, CUDA_THREADS)
        return (Way(threads=threads, side_by_side=1, precision=first),)
    together = min(most_on_node(config, resolved.device, {node.name: node.facts}, node.name), cores)
    threads = execution.threads or max(1, cores // together)
    return (Way(threads=threads, side_by_side=together, precision=first),)


def _measured(subject: _Subject, nodes: Nodes, stops: StopRequests, ways: Sequence[Way]) -> list[MeasuredWay]:
    """Return what is known of some ways; what is not is measured, and kept.

    Raises:
        DryfitError: A child raised it.
        ChildError: A child died.
    """
    folder = shared_traces(os.environ, Path.home()).parent / _FOLDER
    file = folder / f"{_key(subject)}.json"
    kept = read_cached(file, _Kept) or _Kept(measured=())
    known = {one.way: one for one in kept.measured}
    began_s = time.monotonic()
    for way in ways:
        if way in known or stops.why is not None or time.monotonic() - began_s > _BEGUN_S:
            continue
        if (found := _measure(subject, nodes, stops, way)) is not None:
            known[way] = found
    if len(known) > len(kept.measured):
        write_cached(file, _Kept(measured=tuple(known.values())))
    return [known[way] for way in ways if way in known]


def _measure(subject: _Subject, nodes: Nodes, stops: StopRequests, way: Way) -> MeasuredWay | None:
    """Measure a way with a child for each trial side by side; None: a stop was asked for, or they did not meet."""
    with tempfile.TemporaryDirectory(prefix="dryfit-pace-") as scratch:
        meeting = Path(scratch) / "meeting"
        meeting.mkdir()
        bodies = [_request(subject, way, child, Path(scratch)) for child in range(way.side_by_side)]
        limits = preparing_limits(subject.config.runtime)
        doing = "measuring how trials run fastest"
        jobs = [ChildJob(doing, body, subject.layout.preparations / f"pace-{body.child}", limits) for body in bodies]
        answers = run_side_by_side(jobs, nodes, most=len(jobs), on_done=lambda _: None, stops=stops)
    if stops.why is not None:
        return None
    if died := next((answer for answer in answers if isinstance(answer, ChildError)), None):
        raise died
    found = [answer for answer in answers if isinstance(answer, PaceResult)]
    if not all(answer.together for answer in found):
        return None
    return MeasuredWay(way=way, step_s=max(answer.step_s for answer in found))


def _request(subject: _Subject, way: Way, child: int, scratch: Path) -> PaceRequest:
    config, node = subject.config, subject.node
    train = subject.settings.train.model_copy(update={"precision": way.precision})
    settings = subject.settings.model_copy(update={"train": train})
    trial = config_of(config, settings, {}, data_fingerprint=subject.resolved.data_fingerprint)
    plan = plan_execution(
        config.execution.model_copy(update={"threads": way.threads}),
        effective_batch=train.batch_size,
        device=subject.resolved.device,
        cores=node.facts.cores,
        parallel=way.side_by_side,
    )
    (own := scratch / str(child)).mkdir()
    devices = node.facts.devices if subject.resolved.device is DeviceKind.CUDA else ()
    visible = visible_devices(place_on(node.name, devices[0].name)) if devices else None
    request = TrainRequest.apart(trial, plan, cache_dir=subject.layout.cache, folder=own, visible_device=visible)
    return PaceRequest(
        trial=request,
        rows=subject.rows,
        child=child,
        side_by_side=way.side_by_side,
        meeting=str(scratch / "meeting"),
        measured_s=_MEASURED_S,
    )


def _key(subject: _Subject) -> str:
    """Return a hash of all that decides how fast steps are: the machine, the model and the shape."""
    resolved, settings, node = subject.resolved, subject.settings, subject.node.facts
    train = settings.train.model_copy(update={"precision": Precision.FP32})
    planned = plan_subject(subject.config, settings.model_copy(update={"train": train}))
    spec = resolved.device_spec
    decides: dict[str, Any] = {
        "machine": [node.name, node.cores],
        "device": [resolved.device, spec.model_dump(mode="json") if spec is not None else None],
        "versions": [resolved.versions.get(name) for name in ("python", "torch", "transformers")],
        "model": resolved.revisions.get(settings.model.name),
        "subject": memory_key(planned),
        "rows": subject.rows,
        "execution": subject.config.execution.model_dump(mode="json", exclude={"threads", "memory_limit"}),
    }
    return digest(decides, 24)
