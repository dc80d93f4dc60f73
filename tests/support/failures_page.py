"""The page of failures, rendered from the tables that recognise them and say what follows.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/failures_page.py``.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.failure import PERMITTED, Action, FailureKind, Permission, Stage
from dryfit.reporting.data.troubles import NO_FAULTS
from dryfit.runtime.failures.classify import ROWS, FaultRow
from dryfit.runtime.failures.fault_texts import FATAL_XIDS

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"

_WIDTH = 120

FAULTS = "tests/unit/runtime/test_runtime_faults.py::test_an_example_of_each_row"
TEXTS = "tests/unit/runtime/test_runtime_faults.py::test_every_text_has_a_source_and_is_found_by_its_row"
STUDIES = "tests/contract/test_study_failures.py::"
GOES_ON = STUDIES + "test_a_failure_that_goes_on"
PASSES = STUDIES + "test_a_failure_that_passes"
SUPERVISOR = "tests/contract/test_runtime_supervisor.py::"
RUNTIME, STUDY = "tests/chaos/test_runtime_kills.py::", "tests/chaos/test_study_kills.py::"
MIRROR = "tests/contract/test_mirror_failures.py::"
CHANGES = "tests/chaos/test_inputs_changed.py::"
RESUME = "tests/contract/test_train_resume.py::"


@dataclass(frozen=True)
class Entry:
    """What the tables do not say of a kind.

    Attributes:
        what: What happened.
        do: What a person can do about it.
        tests: What proves that it is recognised and followed as the page says.
    """

    what: str
    do: str
    tests: tuple[str, ...]


ENTRIES: dict[FailureKind, Entry] = {
    FailureKind.OOM_DEVICE: Entry(
        "The trial needed more of the device than it has. Its plan was too small, or there was none (a function of "
        "your own). A trial with a plan goes on with the plan's next fallback: smaller micro-batches and more of them, "
        "activation checkpointing; after a validation, with fewer rows validated at once. The effective batch, and so "
        "what is learned, stays.",
        "Nothing, while it goes on. `dryfit calibrate` makes plans exact for your device; `dryfit plan` says what a "
        "trial needs. In a function of your own, take smaller batches.",
        (
            FAULTS,
            STUDIES + "test_oom_takes_fallback_after_fallback_and_never_changes_the_experiment",
            STUDIES + "test_oom_with_room_left_in_the_plan_completes_with_the_same_value",
            STUDIES + "test_oom_in_a_validation_takes_fewer_rows_there_and_leaves_training_as_it_is",
            MIRROR + "test_errors_of_cuda_can_be_asked_for",
        ),
    ),
    FailureKind.OOM_NEIGHBOUR: Entry(
        "The trial took no more than planned, but other processes held the device's memory. It waits and tries again, "
        "then alone on its device.",
        "Look who is on the device (`nvidia-smi`), lower `runtime.parallel`, or give the study a device of its own "
        "(`CUDA_VISIBLE_DEVICES`).",
        (FAULTS, "tests/unit/runtime/test_runtime_faults.py::test_who_took_the_memory", GOES_ON),
    ),
    FailureKind.OOM_HOST: Entry(
        "The machine, or the cgroup, ran out of memory: Python said so, or the kernel killed the trial or one of its "
        "loader workers.",
        "Lower `runtime.parallel` or `execution.loader_workers`; raise the memory of the job or container. Under "
        "systemd, `OOMPolicy=continue` ([supervision.md](supervision.md)).",
        (FAULTS, GOES_ON),
    ),
    FailureKind.SHM_FULL: Entry(
        "The data loader's workers hand batches over through `/dev/shm`, and that is full; containers have 64 MiB of "
        "it. The trial goes on with fewer workers.",
        "Give the container more (`docker run --shm-size 2g`; [supervision.md](supervision.md) has Kubernetes), or set "
        "`execution.loader_workers = 0`.",
        (FAULTS, GOES_ON),
    ),
    FailureKind.DEVICE_ASSERT: Entry(
        "A kernel's assertion failed, most often for a label or a token id that is out of range. It appears some steps "
        "after it happened, and nothing in that process can use the device afterwards: the process ends. Rows, labels "
        "and tokens are checked on the host before they reach the device, so this should only come from a model's own "
        "code. The trial is run once more with blocking launches, to name the line and the rows; the other trials "
        "stay fast.",
        "Read the story: the second attempt has the line of code, the rows and their label range.",
        (FAULTS, STUDIES + "test_the_attempt_that_learns_more_ends_the_trial", GOES_ON),
    ),
    FailureKind.DEVICE_LOST: Entry(
        "The device failed: uncorrectable memory errors, a reset, a bus that lost it. It gets no more trials in this "
        "run; the trial goes on on another device.",
        "Look at `dmesg` and `nvidia-smi -q`; most of these want a reset of the device, or of the machine.",
        (FAULTS, "tests/unit/runtime/test_runtime_faults.py::test_the_numbers_of_the_driver_are_told", GOES_ON),
    ),
    FailureKind.NATIVE_CRASH: Entry(
        "Native code crashed: a segmentation fault, an illegal memory access on the device, a loader worker that died. "
        "The Python stacks of the moment are in `stacks.txt`.",
        "If it comes again at the same place, it is a bug of a library or a driver: `stacks.txt` says of which.",
        (FAULTS, SUPERVISOR + "test_a_native_crash_is_seen_and_leaves_its_stack", GOES_ON),
    ),
    FailureKind.POISONED: Entry(
        "Something in the trial's process changed torch or transformers for all that came after: a default dtype or "
        "device, a patched function. Then weights stay on the meta device. Trials have processes of their own and "
        "never load side by side in one, so this does not spread; the trial is tried again in a fresh process.",
        "If it comes always, a model's own code does it on import: the log names what was changed.",
        (FAULTS, GOES_ON, PASSES),
    ),
    FailureKind.COMM: Entry(
        "Processes of one trial that compute together lost each other.",
        "Look at the network between the devices, and for a first error in the other process's log: this one is often "
        "only its echo.",
        (FAULTS, GOES_ON),
    ),
    FailureKind.HANG: Entry(
        "The training thread gave no sign of life for too long. The stacks of all threads were written to "
        "`stacks.txt`, then the process was killed with all it had started. It goes on from its last checkpoint.",
        "Read `stacks.txt`: the innermost lines say what it waited for. If it was only slow, raise "
        "`runtime.hang_timeout_s`.",
        (FAULTS, SUPERVISOR + "test_a_hanging_child_leaves_its_stacks_and_is_killed", GOES_ON),
    ),
    FailureKind.TIMEOUT: Entry(
        "The trial lived, but took longer than `runtime.trial_timeout_s`.",
        "Raise it, or leave it unset.",
        (FAULTS, SUPERVISOR + "test_a_child_that_lives_but_takes_too_long_is_killed", GOES_ON),
    ),
    FailureKind.NONFINITE: Entry(
        "The loss or a gradient became infinite or NaN. That is a result, not a fault: the story has the step and the "
        "learning rate, and samplers hear of a poor trial.",
        "Narrow the learning rates from above; try bf16 instead of fp16.",
        (
            FAULTS,
            RESUME + "test_a_loss_that_is_not_finite_is_said_with_step_and_rate",
            MIRROR + "test_states_and_kinds",
        ),
    ),
    FailureKind.DATA: Entry(
        "A row, a label or a file of the data is wrong, or the data changed while the study ran. Before the first "
        "trial that is an error of the command; later it ends the trial.",
        "The message names the file and the row's id. `dryfit doctor STUDY.toml` reads every row before a trial does.",
        (FAULTS, "tests/unit/train/test_guarding.py::test_a_damaged_batch_is_told_with_its_row", GOES_ON),
    ),
    FailureKind.CONFIG: Entry(
        "The trial cannot be what was asked for: a model without the wanted weights, an option that this machine does "
        "not have, a model that is not in the cache while offline.",
        "The message has four parts: what was done, what was found, what is allowed, what to do next.",
        (FAULTS, GOES_ON),
    ),
    FailureKind.NETWORK: Entry(
        "A download failed. It is tried again after 5 s, 20 s and 80 s, from the cache where that suffices.",
        "Download before: `HF_HUB_OFFLINE=1 dryfit doctor STUDY.toml` says what is missing.",
        (FAULTS, GOES_ON, PASSES),
    ),
    FailureKind.DISK_FULL: Entry(
        "No space, or the quota is used up. The study stops; no trial is lost by it.",
        "Free some space, then `dryfit resume`. `runtime.keep` decides whose weights stay; `cache/` and `report/` of a "
        "study are safe to delete.",
        (FAULTS, STUDY + "test_a_full_disk_pauses_the_study", GOES_ON),
    ),
    FailureKind.CHANGED: Entry(
        "The file of the user's function or task, the files of a model, or rows whose tokens are not cached any more, "
        "were changed while the study ran: a trial would learn something else than those before it. The study stops; "
        "no trial is lost by it.",
        "Put back what was changed, then `dryfit resume`; or resume with it, which says that it has changed.",
        (FAULTS, CHANGES + "test_a_function_that_is_edited_pauses_its_study", GOES_ON),
    ),
    FailureKind.CHECKPOINT_CORRUPT: Entry(
        "A checkpoint cannot be read. Checkpoints are written beside each other and hashed; a torn or damaged one "
        "gives way to the one before, without this failure. This is one whose hash is right and which cannot be read "
        "all the same.",
        "Nothing, while it goes on. If it comes again: check the disk.",
        (FAULTS, RESUME + "test_a_damaged_newest_checkpoint_falls_back", GOES_ON),
    ),
    FailureKind.KILLED: Entry(
        "The process, or a loader worker, was killed by SIGKILL, or ended without a word, and nothing says why. It "
        "goes on from its last checkpoint, as often as each attempt reaches a new one.",
        "Ask who kills: another user, `earlyoom`, a limit of the batch system, the kernel (`dmesg | grep -i kill`).",
        (FAULTS, RUNTIME + "test_a_killed_child_is_told_and_the_next_one_runs", GOES_ON),
    ),
    FailureKind.PREEMPTED: Entry(
        "Somebody else than dryfit sent the trial's process SIGTERM. It wrote a checkpoint and goes on from there.",
        "Nothing. A batch system that ends the whole job stops the study: [supervision.md](supervision.md).",
        (FAULTS, SUPERVISOR + "test_a_sigterm_from_outside_is_told_as_such", GOES_ON),
    ),
    FailureKind.INTERRUPTED: Entry(
        "The study was asked to stop: Ctrl-C, a signal, `dryfit stop`. Each trial wrote a checkpoint, unless it was "
        "to end at once.",
        "`dryfit resume`.",
        (FAULTS, "tests/chaos/test_study_signals.py::test_a_signal_makes_trials_checkpoint", GOES_ON),
    ),
    FailureKind.LOST: Entry(
        "The control process or the fork server was killed, and the kernel ended the trial with it. No trial stays "
        "RUNNING for ever: the next run closes the attempt, and goes on from its last checkpoint.",
        "`dryfit resume`.",
        (FAULTS, STUDY + "test_kill_9_of_the_control_process_again_and_again", GOES_ON),
    ),
    FailureKind.START: Entry(
        "The process said nothing within `runtime.start_timeout_s`, or ended before its first line, also in a fresh "
        "interpreter.",
        "Read its log. On a machine that is busy, or with a slow file system, raise `runtime.start_timeout_s`.",
        (FAULTS, RUNTIME + "test_a_start_that_always_hangs_is_a_failed_start", GOES_ON),
    ),
    FailureKind.PLANNER: Entry(
        "A trial's memory could not be planned. Nothing is wrong with the trial: it runs with no other beside it, or "
        "is "
        'refused with `execution.unknown = "refuse"`.',
        "The reason is in the story; a model with code of its own may do what cannot be traced.",
        (
            FAULTS,
            "tests/unit/runtime/test_runtime_faults.py::test_whatever_ends_a_planner_is_its_own_failure",
            "tests/contract/test_study_planned.py::test_real_children_plan_crash_run_out_and_end",
        ),
    ),
    FailureKind.USER_CODE: Entry(
        "A Python exception that none of the other kinds knows: a bug in a function of your own, in a model's code, "
        "in a library.",
        "The traceback is in the trial's log, its type and text in the story.",
        (FAULTS, SUPERVISOR + "test_an_exception_crosses_with_its_causes", GOES_ON),
    ),
    FailureKind.INTERNAL: Entry(
        "An invariant of dryfit broke. The study ends with exit status 4, and the trial stays open.",
        "Please report it, with the log.",
        (FAULTS, STUDIES + "test_an_invariant_that_broke_stops_the_study_with_its_own_status"),
    ),
}


@dataclass(frozen=True)
class Symptom:
    """Something one may search for that is no row of the tables.

    Attributes:
        said: As it shows.
        means: What becomes of it here.
        test: What proves it.
    """

    said: str
    means: str
    test: str


SYMPTOMS = (
    Symptom(
        "`CategoricalDistribution does not support dynamic value space`",
        "does not come: a suggestion is made in a study of its own, from the ledger, and the mirror gives changed "
        "choices a name of their own (`name~2`)",
        "tests/contract/test_search_mirror.py::test_changed_choices_get_a_name_of_their_own",
    ),
    Symptom(
        "trials that stay `RUNNING` for ever (zombies)",
        "do not come: the next run closes what an earlier one left open ([lost](#lost)), also in the mirror",
        "tests/chaos/test_storm.py::test_a_storm_over_functions_changes_nothing",
    ),
    Symptom(
        "one failure takes all later trials down",
        "cannot: each trial has a process, and so a CUDA context, of its own",
        STUDY + "test_kill_9_of_children_and_of_the_fork_server",
    ),
    Symptom(
        "`Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!`",
        "[user_code](#user_code): a line of code mixed them; the traceback is in the log",
        MIRROR + "test_states_and_kinds",
    ),
    Symptom(
        "`Cannot copy out of meta tensor; no data!`",
        "[poisoned](#poisoned): tried again in a fresh process; `dryfit.load` itself never leaves a tensor on meta",
        FAULTS,
    ),
    Symptom(
        "`RuntimeError: CUDA error: device-side assert triggered`",
        "[device_assert](#device_assert)",
        MIRROR + "test_errors_of_cuda_can_be_asked_for",
    ),
    Symptom(
        "`RuntimeError: DataLoader worker (pid ...) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.`",
        "[shm_full](#shm_full)",
        TEXTS,
    ),
    Symptom("the loss is `nan`", "[nonfinite](#nonfinite): the trial is pruned, with step and learning rate", FAULTS),
    Symptom(
        "nothing happens, no output (a hang)",
        "[hang](#hang): killed after a while without a sign of life, with its stacks; SIGUSR1 shows those of the "
        "control process ([supervision.md](supervision.md))",
        SUPERVISOR + "test_a_hanging_child_leaves_its_stacks_and_is_killed",
    ),
    Symptom(
        "`Killed`, exit status 137", "[oom_host](#oom_host) where the kernel counts it, else [killed](#killed)", FAULTS
    ),
    Symptom(
        "`RuntimeError: DataLoader worker (pid ...) is killed by signal: Killed.`",
        "[oom_host](#oom_host) where the kernel counts it, else [killed](#killed)",
        FAULTS,
    ),
    Symptom(
        "`OSError: [Errno 28] No space left on device`", "[disk_full](#disk_full), or [shm_full](#shm_full)", FAULTS
    ),
    Symptom(
        "`Xid` in the kernel's log",
        f"[device_lost](#device_lost) for {', '.join(map(str, FATAL_XIDS))}; others are the trial's own",
        "tests/unit/runtime/test_runtime_faults.py::test_the_numbers_of_the_driver_are_told",
    ),
    Symptom(
        "`torch.AcceleratorError: CUDA error: ...`, and no hint where",
        "[device_assert](#device_assert) is run once more to say where; training itself is never slowed down by "
        "`CUDA_LAUNCH_BLOCKING`",
        STUDIES + "test_the_attempt_that_learns_more_ends_the_trial",
    ),
)

_INTRODUCTION = """\
# What goes wrong, and what follows

`dryfit status DIR` groups failures by kind: how often, in which trials, what followed, how much time was lost.
`dryfit show DIR N` shows a trial's story: each attempt, its failure with the exception and where it was raised, what
followed, and where log and stacks are. `--json` of both is for programs, `dryfit status DIR --watch` for a study that
runs.

Every process that ends without a result has exactly one kind. It is recognised by the exception's type and
code, by exit status and signal, by what dryfit did to it and what happened around it; by a text only where there is
nothing else. What follows is a table, with limits. "Tried again" means: in a new process, from the newest good
checkpoint. Limits count from the last new checkpoint on. `runtime.retries` limits all retries of a trial together
that count.

**In Optuna** (`search.mirror`, or `dryfit export --to optuna`) a trial's user attributes are `failure_kind` and
`failure` (of the last attempt that failed), `cuda_error` (true or false), `cuda_error_type`, `cuda_error_msg`,
`prune_reason` (of a pruned or refused trial), `attempts`, `planned_bytes`, `observed_bytes`, `tp` (ranks, where the
planner cuts its model), `seed`, `outcome` and `reason`. A refused trial is PRUNED there, a failed or cancelled one
FAIL.

```
[t for t in optuna.load_study(...).trials if t.user_attrs["cuda_error"]]
```

"""

_ACTIONS = {
    Action.RETRY: "tried again",
    Action.FALLBACK: "tried again with the next fallback of its plan, while there is one",
    Action.EXCLUSIVE: "tried again with no other trial on its device",
    Action.ELSEWHERE: "tried again on another device",
    Action.LIGHTER: "tried again with less of the host (half the loader workers, tensors shared through files)",
    Action.DIAGNOSE: "run once more with blocking launches, to learn where it fails",
    Action.UNPLANNED: "its memory stays unknown (`execution.unknown`)",
    Action.GIVE_UP: "the trial ends FAILED",
    Action.PRUNE: "the trial ends PRUNED",
    Action.PAUSE: "the study stops with exit status 3 or 130; the trial goes on when it is resumed",
    Action.STOP_STUDY: "the study ends with exit status 4; the trial stays open",
}


def render() -> str:
    """The whole page."""
    return _INTRODUCTION + "\n".join([*_index(), *_kinds()]) + "\n"


def _index() -> Iterator[str]:
    yield "## By what you see"
    yield ""
    yield "| what you see | what it is here | proved by |"
    yield "|---|---|---|"
    for symptom in SYMPTOMS:
        yield f"| {symptom.said} | {symptom.means} | {_test(symptom.test)} |"
    kinds: dict[str, list[FailureKind]] = {}
    for kind in ENTRIES:
        for text in texts_of(kind):
            kinds.setdefault(text, []).append(kind)
    for text, known in kinds.items():
        yield f"| `{_cell(text)}` | {' or '.join(f'[{kind}](#{kind})' for kind in known)} | {_test(TEXTS)} |"
    yield ""


def texts_of(kind: FailureKind) -> list[str]:
    """Every text that a kind is known by."""
    return list(dict.fromkeys(one.text for row in rows_of(kind) for one in row.texts))


def rows_of(kind: FailureKind) -> list[FaultRow]:
    """How a kind is recognised."""
    return [row for row in ROWS if row.kind is kind]


def _kinds() -> Iterator[str]:
    yield "## By kind"
    yield ""
    for kind, entry in ENTRIES.items():
        yield f"### {kind}"
        yield ""
        yield textwrap.fill(entry.what, _WIDTH, break_on_hyphens=False, break_long_words=False)
        yield ""
        yield _item("Recognised by", f"{'; '.join(dict.fromkeys(row.source for row in rows_of(kind)))}.")
        said = [f'"{_placeholders(row.sentence)}"' for row in rows_of(kind) if row.sentence != "{said}"]
        if said:
            yield _item("Message", f"{'; '.join(dict.fromkeys(said))}.")
        yield _item("What follows", f"{follows(PERMITTED[kind])}.{_no_fault(kind)}")
        yield _item("What you can do", entry.do)
        yield _item("Proved by", ", ".join(_test(test) for test in entry.tests))
        yield ""


def _item(head: str, text: str) -> str:
    return textwrap.fill(
        f"- **{head}**: {text}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def follows(permission: Permission) -> str:
    """What a kind permits, in words."""
    parts = [_stage(stage) for stage in permission.stages]
    if permission.stages[-1].times is not None or permission.stages[-1].action is Action.FALLBACK:
        parts.append(_ACTIONS[permission.then])
    text = "; then ".join(parts)
    if any(stage.action in _TRIES for stage in permission.stages):
        text += "; this counts as a retry" if permission.counts else "; this counts as no retry"
    if permission.first_delay_s:
        text += f"; the first wait is {permission.first_delay_s:g} s, each further one longer"
    return text + ("; samplers treat it as a refused point" if permission.blames_point else "")


_TRIES = {Action.RETRY, Action.FALLBACK, Action.EXCLUSIVE, Action.ELSEWHERE, Action.LIGHTER, Action.DIAGNOSE}


def _stage(stage: Stage) -> str:
    if stage.times is None or stage.action is Action.DIAGNOSE:
        return _ACTIONS[stage.action]
    return f"{_ACTIONS[stage.action]}, {'once' if stage.times == 1 else f'{stage.times} times'} at most"


def _no_fault(kind: FailureKind) -> str:
    return " It counts as no failure in the shares of `status`." if kind in NO_FAULTS else ""


def _placeholders(sentence: str) -> str:
    return sentence.replace("{", "<").replace("}", ">").replace("<", "`<").replace(">", ">`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _test(name: str) -> str:
    file, _, function = name.partition("::")
    return f"[{function}](../{file})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
