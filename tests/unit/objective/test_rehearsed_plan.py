"""A plan made of rehearsals: what fits as it is, what fits with a change, what does not, and what nobody knows."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import DeviceSpec, Effect, StepPhase, VerdictKind
from dryfit.settings.plan_messages import NOTHING_TAKEN, PlanAnswer
from dryfit.settings.rehearsal_messages import (
    FAILED_BY_ITSELF,
    ArgumentValue,
    EvaluationGrowth,
    RehearsalAnswer,
    ScriptEnd,
    SeenArguments,
)
from dryfit.training.rehearsed_plan import plan_by_rehearsal
from rehearsal_stand_in import GIB, answer_of

OWN: Mapping[str, ArgumentValue] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 8,
    "activation_checkpointing": False,
    "bf16": False,
    "optim": "adamw_torch_fused",
}


class Training:
    """A training in which a row takes a GiB of activations, and a quarter with checkpointing, beside 2.875 GiB.

    Attributes:
        asked: The changes that were rehearsed.
    """

    def __init__(self, own: Mapping[str, ArgumentValue] = OWN, **update: Any) -> None:
        self.own, self.update, self.asked = own, update, list[dict[str, ArgumentValue]]()

    def __call__(self, changed: Mapping[str, ArgumentValue]) -> RehearsalAnswer:
        self.asked.append(dict(changed))
        values = {**self.own, **changed}
        seen = SeenArguments(values=dict(self.own), checkpointing="activation_checkpointing", from_command_line=False)
        rows = values["per_device_train_batch_size"]
        assert isinstance(rows, int)
        each = GIB // 4 if values["activation_checkpointing"] else GIB
        answer = answer_of(rows * each, card(1000), seen=seen)
        return answer.model_copy(update=self.update)


def card(size: float) -> DeviceSpec:
    return DeviceSpec(name="a card", capacity_bytes=int(size * GIB))


def planned(
    training: Training, size: float, allow: Literal["exact", "numerics"] = "numerics"
) -> tuple[PlanAnswer, list[tuple[int, int, bool]]]:
    """The answer, and its fallbacks in short."""
    answer = plan_by_rehearsal(training, card(size), allow=allow)
    assert answer.device == card(size)
    return answer, [(one.micro_batch, one.accumulation, one.checkpointing) for one in answer.fallbacks]


def test_what_fits_is_rehearsed_once_and_has_fallbacks_for_a_device_that_has_less_than_it_says() -> None:
    training = Training()
    answer, fallbacks = planned(training, 12)
    assert (answer.verdict, training.asked) == (VerdictKind.FITS, [{}])
    assert answer.execution == ExecutionChoice(micro_batch=8, accumulation=2)
    assert answer.memory is not None and answer.memory.required_bytes == int(10.875 * GIB)
    assert fallbacks == [(4, 4, False), (2, 8, False), (1, 16, False), (1, 16, True)]
    assert not answer.ladder and not answer.shortfall_bytes


@pytest.mark.parametrize(
    ("size", "chosen"),
    [(8, (4, 4, False)), (5, (2, 8, False)), (4, (1, 16, False)), (3.2, (1, 16, True))],
)
def test_the_first_change_that_fits_is_taken(size: float, chosen: tuple[int, int, bool]) -> None:
    training = Training()
    answer, fallbacks = planned(training, size)
    choice = answer.execution
    assert answer.verdict is VerdictKind.FITS_WITH and choice is not None and answer.memory is not None
    assert (choice.micro_batch, choice.accumulation, choice.checkpointing) == chosen
    assert answer.memory.required_bytes <= size * GIB
    assert all(rows * steps == 16 for rows, steps, _ in [chosen, *fallbacks])
    assert abs(answer.shortfall_bytes - (10.875 - size) * GIB) <= 1
    assert {one.required_bytes <= size * GIB for one in answer.ladder if one.fits} == {True}
    assert not any("bf16" in asked for asked in training.asked)


def test_what_does_not_fit_is_refused_with_what_it_would_need() -> None:
    training = Training()
    answer, fallbacks = planned(training, 3)
    assert (answer.verdict, answer.execution, fallbacks) == (VerdictKind.REFUSED, None, [])
    assert min(one.required_bytes for one in answer.ladder) == int(3.125 * GIB)
    assert "micro-batch 8 -> 1, accumulate 16 + activation checkpointing" in {one.change for one in answer.ladder}
    assert not any(one.fits or one.effect is Effect.SEMANTICS for one in answer.ladder)
    assert len(training.asked) <= 4


def test_where_no_number_may_change_only_checkpointing_is_tried() -> None:
    training = Training()
    answer, fallbacks = planned(training, 5, "exact")
    assert training.asked == [{}, {"activation_checkpointing": True}]
    assert answer.verdict is VerdictKind.FITS_WITH and not fallbacks
    assert answer.execution == ExecutionChoice(micro_batch=8, accumulation=2, checkpointing=True)
    assert planned(Training(), 12, "exact")[1] == [(8, 2, True)]
    assert planned(Training({**OWN, "activation_checkpointing": True}), 4, "exact")[0].verdict is VerdictKind.REFUSED


def test_odd_batches_keep_the_effective_batch() -> None:
    answer, fallbacks = planned(Training({**OWN, "per_device_train_batch_size": 15}), 100)
    assert answer.verdict is VerdictKind.FITS
    assert fallbacks == [(5, 6, False), (1, 30, False), (1, 30, True)]


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (
            {
                "end": ScriptEnd.FAILED,
                "verdict": VerdictKind.UNKNOWN,
                "reasons": (FAILED_BY_ITSELF,),
                "traceback": 'Traceback:\n  File "fit.py", line 3\n    f()\nValueError: no\nfrom fit.py:3',
            },
            f"{FAILED_BY_ITSELF}; ValueError: no; from fit.py:3",
        ),
        ({"memory": None}, NOTHING_TAKEN),
        ({"verdict": VerdictKind.UNKNOWN, "reasons": ("an operator without a stand-in",)}, "an operator without"),
    ],
)
def test_what_cannot_be_rehearsed_is_unknown_and_has_fallbacks_all_the_same(update: Any, reason: str) -> None:
    answer, fallbacks = planned(Training(**update), 1)
    assert (answer.verdict, answer.memory, answer.execution) == (VerdictKind.UNKNOWN, None, None)
    assert reason in "; ".join(answer.reasons)
    assert fallbacks[0] == (4, 4, False)


def test_a_training_without_arguments_is_planned_as_it_is() -> None:
    its_own = ExecutionChoice(micro_batch=4, accumulation=1)
    for size, verdict, execution in ((12, VerdictKind.FITS, its_own), (5, VerdictKind.REFUSED, None)):
        answer, fallbacks = planned(Training(training_arguments=None), size)
        assert (answer.verdict, answer.execution, fallbacks) == (verdict, execution, [])


def test_what_an_evaluation_keeps_of_the_batches_left_out_is_counted() -> None:
    whole = Training()({})
    assert whole.memory is not None
    growth = EvaluationGrowth(bytes_per_batch=GIB, batches_left_out=20, line="", code="", source="")
    phases = {**whole.memory.by_phase, StepPhase.EVALUATE: GIB}
    memory = whole.memory.model_copy(update={"evaluation_growth": growth, "by_phase": phases})
    answer, _ = planned(Training(memory=memory), 40)
    assert answer.memory is not None
    assert answer.memory.peak_allocated_bytes == 21 * GIB
    assert answer.memory.required_bytes == whole.memory.required_bytes + 11 * GIB
    assert "keeps 20.0 GiB on the device until its end; eval_accumulation_steps" in answer.reasons[0]
