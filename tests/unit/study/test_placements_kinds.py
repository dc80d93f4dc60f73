"""Trials on devices of several kinds: each is planned for every kind, and placed by the plan for the one it gets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import instant
import plan_jobs
from device_bench import GIB, MIB, NEED, OTHER, Bench, events_of
from dryfit.ledger.events import AttemptPlaced, TrialPlanned
from dryfit.ledger.replay import StudyState
from dryfit.processes.gpus import ProcessOwner
from dryfit.processes.node import DeviceFacts, NodeFacts, local_facts
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, VerdictKind
from dryfit.settings.study_file_checks import cross_problems
from dryfit.settings.trial import Outcome
from dryfit.study.context import StudyContext, StudySnapshot
from dryfit.study.next_step import End
from dryfit.study.trial_plans import kind_of, plan_here, planned_devices

SMALL = DeviceSpec(name="small", capacity_bytes=NEED, capability=(8, 6))
LARGE = DeviceSpec(name="large", capacity_bytes=4 * NEED, capability=(9, 0))
SIZES = {"train.batch_size": [4, 8, 16, 32]}
"""With 16 tokens: 64 MiB to 512 MiB; the small device takes the larger ones with checkpointing and smaller batches."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *specs: Bench(tmp_path / "study", 0, specs=specs)


def placed_by(done: instant.Run) -> dict[int, tuple[str, Any]]:
    """The kind of device, and the execution of the plan, that each trial was placed by at last."""
    return {
        trial.number: (trial.plan.answer.device.name, trial.plan.execution)
        for trial in done.state.trials
        if trial.plan is not None
    }


def test_each_trial_is_planned_for_every_kind_and_runs_by_the_plan_of_its_own(bench) -> None:
    done = bench(SMALL, LARGE).run(space=SIZES, study={"trials": 12, "seed": 1}, runtime={"parallel": 4})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 12
    names = {"here/0": "small", "here/1": "large"}
    seen = set[tuple[str, bool]]()
    bodies = {body.config.number: body for body in done.supervisor.trained()}
    for trial in done.state.trials:
        assert {plan.answer.device.name for plan in trial.plans.values()} == {"small", "large"}
        kind, choice = placed_by(done)[trial.number]
        assert kind == names[trial.attempts[-1].place], "its plan is that of the device that it got"
        plan, train = bodies[trial.number].plan, bodies[trial.number].config.settings.train
        assert choice is not None
        assert (plan.micro_batch, plan.checkpointing) == (choice.micro_batch, choice.checkpointing)
        used = plan_jobs.needs(plan.micro_batch, train.max_length, checkpointing=plan.checkpointing)
        assert used <= (NEED if kind == "small" else 4 * NEED), "it fits the device it runs on"
        seen.add((kind, plan.checkpointing))
    assert ("large", False) in seen and ("small", True) in seen, "one space, two ways to run it"


def test_what_fits_the_large_kind_alone_runs_there_and_is_not_refused(bench) -> None:
    tiny = SMALL.model_copy(update={"capacity_bytes": 7 * MIB})  # not even one row with checkpointing: 8 MiB
    done = bench(tiny, LARGE).run(study={"trials": 6}, runtime={"parallel": 4})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 6
    assert {event.device for event in events_of(done, AttemptPlaced)} == {"here/1"}
    verdicts = {
        event.answer.device.name: event.answer.verdict for event in events_of(done, TrialPlanned) if event.answer
    }
    assert verdicts == {"small": VerdictKind.REFUSED, "large": VerdictKind.FITS}


def test_what_fits_no_kind_is_refused_with_the_numbers_of_each(bench) -> None:
    kinds = [one.model_copy(update={"capacity_bytes": size * MIB}) for one, size in ((SMALL, 6), (LARGE, 7))]
    done = bench(*kinds).run(study={"trials": 2})
    assert done.end is End.REFUSED
    first = done.state.trials[0]
    assert first.outcome is Outcome.REFUSED
    assert "small has 6 MiB" in first.reason and "large has 7 MiB" in first.reason


def test_an_empty_device_comes_before_a_shared_one_and_a_small_one_before_a_large_one(bench) -> None:
    small = SMALL.model_copy(update={"capacity_bytes": 4 * NEED})
    large = LARGE.model_copy(update={"capacity_bytes": 8 * NEED})
    done = bench(large, small).run(runtime={"parallel": 4})
    assert [event.device for event in events_of(done, AttemptPlaced)] == ["here/1", "here/0", "here/1", "here/0"]


def test_a_ledger_says_by_which_plan_each_attempt_ran(bench) -> None:
    done = bench(SMALL, LARGE).run(space=SIZES, study={"trials": 6, "seed": 2}, runtime={"parallel": 3})
    again = StudyState()
    for event in done.events:
        again.apply(type(event).model_validate_json(event.model_dump_json()))
    assert {trial.number: trial.plan.key for trial in again.trials if trial.plan} == {
        event.number: event.plan for event in events_of(done, AttemptPlaced)
    }


def stopped_once(done_on: dict[int, list[str]]) -> Callable[[Any], instant.Ends | None]:
    """Trials that each lose their first process."""

    def script(body: Any) -> instant.Ends | None:
        places = done_on.setdefault(body.config.number, [])
        places.append(body.visible_device)
        return instant.Ends(None, instant.Evidence(server_lost=True)) if len(places) == 1 else None

    return script


@pytest.mark.parametrize("change", [False, True])
def test_an_interrupted_trial_keeps_to_its_kind_unless_it_may_change(bench, change: bool) -> None:
    """The small device is lost to a neighbour once the trial has begun there."""
    found, places = bench(SMALL, LARGE), dict[int, list[str]]()
    script = stopped_once(places)

    def taken(body: Any) -> instant.Ends | None:
        if body.visible_device == "0":
            found.devices.set("0", NEED, (OTHER, NEED, ProcessOwner.OTHER))
        return script(body)

    done = found.run(
        script=taken,
        study={"trials": 1},
        runtime={"parallel": 1, "device_wait_s": 60},
        nodes={"change_device": change},
    )
    assert places[0][0] == "0"
    if change:
        assert done.end is End.DONE and places == {0: ["0", "1"]}
    else:
        assert done.end is End.PAUSED and places == {0: ["0"]}
        assert "of device 0, which has 128 MiB, 128 MiB of them held by others" in found.watcher.notes[-1]


def test_trials_in_bf16_keep_to_gpus_that_compute_in_it(bench) -> None:
    old = LARGE.model_copy(update={"name": "old", "capability": (7, 5)})
    runs = {"runtime": {"parallel": 2}, "nodes": {}, "study": {"trials": 8, "seed": 1}}
    mixed = {"train.precision": ["bf16", "fp32"]}
    done = bench(LARGE, old).run(**runs, space=mixed)
    places = {(trial.params["train.precision"], trial.attempts[-1].place) for trial in done.state.trials}
    assert ("bf16", "here/1") not in places and {("bf16", "here/0"), ("fp32", "here/1")} <= places


def test_a_trial_is_trained_once_more_by_the_plan_for_the_device_that_is_there(bench) -> None:
    done = bench(SMALL, LARGE).run(study={"trials": 1}, train={"batch_size": 16}, runtime={"parallel": 1})
    (trial,) = done.state.trials
    assert placed_by(done)[0][0] == "small"
    for there, name in ((LARGE, "large"), (SMALL, "small"), (A100, "small")):
        plan = plan_here(planned_devices(study_of({"here": [there]}, there, nodes=None)), trial)
        assert plan is not None and plan.answer.device.name == name, "where nothing is known of a device, as it ran"


# ---- which kinds there are


def study_of(machines: dict[str, Sequence[DeviceSpec | None]], spec: DeviceSpec | None, **tables: Any) -> StudySnapshot:
    """A study on nodes with these devices, the first machine of which has ``spec``."""
    facts = {
        name: NodeFacts(4, 2**34, tuple(DeviceFacts(str(at), spec=one) for at, one in enumerate(devices)))
        for name, devices in machines.items()
    }
    found = {"device": DeviceKind.CUDA, "device_count": 1 if spec else 0, "device_spec": spec}
    known = {"execution": {"memory_limit": None}, "nodes": {}} | tables
    config = instant.config(**{name: keys for name, keys in known.items() if keys is not None})
    resolved = plan_jobs.resolved().model_copy(update=found)
    return StudySnapshot(config=config, layout=None, state=StudyState(), resolved=resolved, nodes=facts)  # type: ignore[arg-type]


A100 = DeviceSpec(name="NVIDIA A100-SXM4-80GB", capacity_bytes=81_151 * MIB, capability=(8, 0))
RTX = DeviceSpec(name="NVIDIA GeForce RTX 4090", capacity_bytes=24_118 * MIB, capability=(8, 9))


def test_gpus_of_one_model_are_one_kind_though_tools_count_them_differently() -> None:
    other = A100.model_copy(update={"capacity_bytes": A100.capacity_bytes - 30 * MIB})
    study = study_of({"here": [A100], "n1": [other, RTX], "n2": [RTX]}, A100)
    kinds = planned_devices(study)
    assert [kind.name for kind in kinds] == [RTX.name, A100.name], "smallest first"
    assert all(kind.capacity_bytes % (128 * MIB) == 0 for kind in kinds)
    assert kinds[1].capacity_bytes <= other.capacity_bytes
    alone = study_of({"here": [A100]}, A100, nodes=None)
    assert planned_devices(alone) == (A100,), "without other machines nothing is rounded: plans of old stay good"


def test_gpus_of_two_models_in_one_machine_are_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    twin = A100.model_copy(update={"capacity_bytes": A100.capacity_bytes - 30 * MIB})
    alone = study_of({}, RTX, nodes=None)
    found = {"device_count": 3, "device_specs": (A100, RTX, twin)}
    resolved = alone.resolved.model_copy(update=found)
    kinds = planned_devices(replace(alone, resolved=resolved, nodes={"here": local_facts(resolved)}))
    assert [kind.name for kind in kinds] == [RTX.name, A100.name]


def test_a_device_that_nobody_describes_counts_as_one_of_the_first_machine() -> None:
    study = study_of({"here": [RTX], "n1": [None]}, RTX)
    assert len(planned_devices(study)) == 1
    assert kind_of(DeviceFacts("0"), study_of({"n1": [None]}, None)) is None
    assert planned_devices(study_of({"n1": [None]}, None)) == ()


def test_a_limit_is_one_of_every_kind() -> None:
    limited = planned_devices(study_of({"here": [RTX], "n1": [A100]}, RTX, execution={"memory_limit": "40GiB"}))
    assert [kind.capacity_bytes // GIB for kind in limited] == [23, 40]


def test_what_is_expected_counts_until_something_as_large_is_there() -> None:
    expecting = {"nodes": {"expect": "a100-80"}}
    waiting = planned_devices(study_of({"here": [RTX]}, RTX, **expecting))
    assert [kind.name for kind in waiting] == [RTX.name, "a100-80"]
    there = planned_devices(study_of({"here": [RTX], "n1": [A100]}, RTX, **expecting))
    assert [kind.name for kind in there] == [RTX.name, A100.name]


def test_what_fits_only_what_is_expected_waits_for_it_and_runs_when_it_has_come(bench) -> None:
    found = bench(SMALL.model_copy(update={"capacity_bytes": 7 * MIB}))
    nodes: dict[str, NodeFacts] = {}
    on_cuda = found.on_cuda

    def joining(study: StudyContext) -> StudyContext:
        study = on_cuda(study)
        nodes.update(study.nodes)
        return replace(study, nodes=nodes)

    def come() -> None:
        if found.idled == 3:
            found.devices.set("1", 24 * GIB)
            nodes["here"] = replace(nodes["here"], devices=(*nodes["here"].devices, DeviceFacts("1", spec=RTX)))

    found.on_cuda, found.on_idle = joining, come  # type: ignore[method-assign]
    done = found.run(study={"trials": 2}, nodes={"expect": "rtx4090"}, runtime={"parallel": 1})
    assert done.end is End.DONE and done.state.counts[Outcome.COMPLETE] == 2
    assert {event.device for event in events_of(done, AttemptPlaced)} == {"here/1"}


@pytest.mark.parametrize(
    ("expect", "said"), [("rtx9999", "rtx9999"), ("cpu:16GiB", "is no GPU"), ("", "no device of that name")]
)
def test_what_is_no_gpu_is_refused_as_an_expectation(expect: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        instant.config(nodes={"expect": expect})


@pytest.mark.parametrize("says", [{"expect": "h100"}, {"change_device": True}])
def test_what_is_said_of_gpus_is_refused_where_trials_run_on_cpus(says: dict[str, Any]) -> None:
    config = instant.config(nodes=says)
    assert not [problem for problem in cross_problems(config) if problem.path[0] == "nodes"]
    on_cpus = config.model_copy(update={"execution": config.execution.model_copy(update={"device": "cpu"})})
    (problem,) = [problem for problem in cross_problems(on_cpus) if problem.path[0] == "nodes"]
    assert problem.path == ("nodes", *says) and "trials run on CPUs" in problem.found
