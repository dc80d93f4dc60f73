"""Every kind of failure has tests that make it: a table, and that what it names is there.

``SCRIPTED`` goes through the whole loop with the ends of processes made up; the others end real processes in that way.
A device that breaks cannot be had on a machine without one.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from dryfit.processes.failures import ROWS
from dryfit.settings.errors import PERMITTED, Action, FailureKind

TESTS = Path(__file__).parents[1]
SCRIPTED = "contract/test_study_failures.py::test_a_failure_that_goes_on"
RUNTIME, STUDY = "chaos/test_runtime_kills.py::", "chaos/test_study_kills.py::"
REAL = "chaos/test_faults_real.py::"
OWN, GPU_SAYS = (
    REAL + "test_a_fault_has_its_kind_its_action_and_its_sentence",
    REAL + "test_what_a_gpu_would_say_has_its_kind_and_its_action",
)
SUPERVISOR = "contract/test_runtime_supervisor.py::"

CASES: dict[FailureKind, tuple[str, ...]] = {
    FailureKind.INTERRUPTED: (
        SCRIPTED,
        "chaos/test_study_signals.py::test_ctrl_c_after_a_request_ends_everything_at_once",
    ),
    FailureKind.PREEMPTED: (SCRIPTED, SUPERVISOR + "test_a_sigterm_from_outside_is_told_as_such"),
    FailureKind.LOST: (SCRIPTED, RUNTIME + "test_a_killed_server_takes_its_children_along_and_is_replaced"),
    FailureKind.CONFIG: (SCRIPTED,),
    FailureKind.DATA: (SCRIPTED,),
    FailureKind.NETWORK: (SCRIPTED,),
    FailureKind.DISK_FULL: (
        SCRIPTED,
        "chaos/test_faults_real.py::test_no_room_on_the_disk_pauses_the_study",
        REAL + "test_a_disk_that_is_really_full_pauses_the_study_and_loses_nothing",
    ),
    FailureKind.CHANGED: (SCRIPTED, "chaos/test_inputs_changed.py::test_a_function_that_is_edited_pauses_its_study"),
    FailureKind.CHECKPOINT_CORRUPT: (SCRIPTED,),
    FailureKind.OOM_NEIGHBOUR: (SCRIPTED,),
    FailureKind.OOM_DEVICE: (
        "contract/test_study_failures.py::test_oom_takes_fallback_after_fallback_and_never_changes_the_experiment",
        "contract/test_study_planned.py::test_real_children_plan_crash_run_out_and_end",
    ),
    FailureKind.OOM_HOST: (SCRIPTED, OWN, REAL + "test_what_the_kernel_kills_for_want_of_memory_is_told_as_such"),
    FailureKind.SHM_FULL: (SCRIPTED, REAL + "test_shared_memory_that_is_full_is_told_and_tried_again_with_less"),
    FailureKind.POISONED: (SCRIPTED, GPU_SAYS),
    FailureKind.DEVICE_LOST: (SCRIPTED, GPU_SAYS),
    FailureKind.DEVICE_ASSERT: (
        SCRIPTED,
        "contract/test_study_failures.py::test_the_attempt_that_learns_more_ends_the_trial",
    ),
    FailureKind.COMM: (SCRIPTED, GPU_SAYS),
    FailureKind.HANG: (SCRIPTED, SUPERVISOR + "test_a_hanging_child_leaves_its_stacks_and_is_killed"),
    FailureKind.TIMEOUT: (SCRIPTED, SUPERVISOR + "test_a_child_that_lives_but_takes_too_long_is_killed"),
    FailureKind.NONFINITE: (SCRIPTED,),
    FailureKind.START: (SCRIPTED, RUNTIME + "test_a_start_that_always_hangs_is_a_failed_start"),
    FailureKind.PLANNER: ("contract/test_study_planned.py::test_a_planner_that_crashes_does_so_once_for_a_study",),
    FailureKind.NATIVE_CRASH: (SCRIPTED, SUPERVISOR + "test_a_native_crash_is_seen_and_leaves_its_stack", OWN),
    FailureKind.KILLED: (SCRIPTED, RUNTIME + "test_a_killed_child_is_told_and_the_next_one_runs"),
    FailureKind.USER_CODE: (SCRIPTED, SUPERVISOR + "test_an_exception_crosses_with_its_causes"),
    FailureKind.INTERNAL: (SCRIPTED,),
}


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_has_a_row_a_permission_and_a_case_that_is_there(kind: FailureKind) -> None:
    assert any(row.kind is kind for row in ROWS)
    assert PERMITTED[kind].stages
    assert CASES[kind]
    for case in CASES[kind]:
        file, _, function = case.partition("::")
        assert function in functions(file), case


def test_every_action_follows_something() -> None:
    """But to end a trial's planning and to give up, which follow when all stages are used up."""
    stages = {stage.action for one in PERMITTED.values() for stage in one.stages}
    assert stages | {one.then for one in PERMITTED.values()} == set(Action)


def test_only_the_last_stage_may_go_on_for_ever() -> None:
    for permission in PERMITTED.values():
        assert all(stage.times is not None for stage in permission.stages[:-1])
        assert all(stage.times is None or stage.times > 0 for stage in permission.stages)
