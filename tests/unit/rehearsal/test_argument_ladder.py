"""The ladder of arguments: it ends, keeps the effective batch, and finds what fits where anything does."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.bracket import Tried
from dryfit.settings.ladder import ArgumentChange, climb
from dryfit.settings.memory_terms import DeviceSpec, Effect, PeakAt, StepPhase, VerdictKind
from dryfit.settings.rehearsal_messages import ArgumentValue, RehearsalAnswer, SeenArguments
from rehearsal_stand_in import GIB, answer_of, seen_arguments

SMALL = DeviceSpec(name="1GiB", capacity_bytes=GIB)
BATCH, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"


def values(batch: int = 8, steps: int = 2, **others: ArgumentValue) -> dict[str, ArgumentValue]:
    own = {BATCH: batch, STEPS: steps, "activation_checkpointing": False, "bf16": False, "optim": "adamw_torch_fused"}
    return own | others


@dataclass
class Climbed:
    """What was rehearsed, and what is recommended."""

    tried: list[ArgumentChange]
    best: ArgumentChange | None

    @classmethod
    def of(cls, answer: RehearsalAnswer, needs, *, has_eight_bit: bool = True) -> "Climbed":
        """Climb where a change needs so many GiB as a function of the arguments says."""
        tried: list[ArgumentChange] = []
        seen, capacity_bytes = answer.training_arguments, answer.device.capacity_bytes

        def rehearse(change: ArgumentChange) -> Tried:
            assert seen is not None and change not in tried
            tried.append(change)
            need = int(needs({**seen.values, **change.values}) * GIB)
            return Tried(need <= capacity_bytes, need if need <= capacity_bytes else None)

        return cls(tried, climb(answer, rehearse, allow=Effect.SEMANTICS, has_eight_bit=has_eight_bit))


def climbed(seen: SeenArguments, needs, capacity: float, *, has_eight_bit: bool = True) -> Climbed:
    """Climb on a device of so many GiB."""
    device = SMALL.model_copy(update={"capacity_bytes": max(1, int(capacity * GIB))})
    answer = answer_of(GIB, device, seen=seen)
    known = answer.memory.model_copy(update={"required_bytes": int(needs(seen.values) * GIB)})
    return Climbed.of(answer.model_copy(update={"memory": known}), needs, has_eight_bit=has_eight_bit)


def memory(values: dict[str, ArgumentValue]) -> float:
    """Bytes in some unit: 8 of state, and of activations 4 a row or 1 with checkpointing."""
    state = 4 if values["optim"] in ("adamw_bnb_8bit", "adafactor") else 8
    rows = values[BATCH] * (1 if values["activation_checkpointing"] else 4)
    return state + rows * (0.5 if values["bf16"] else 1)


def said(climbed: Climbed) -> str:
    return " ".join(climbed.best.words)


def test_smaller_micro_batches_come_first() -> None:
    found = climbed(seen_arguments(values()), memory, 24)
    assert said(found) == f"--{BATCH} 4 --{STEPS} 4"
    assert [one.effect for one in found.tried] == [Effect.NUMERICS] * len(found.tried)


def test_then_checkpointing_with_the_largest_micro_batch() -> None:
    assert said(climbed(seen_arguments(values()), memory, 11)) == (
        f"--{BATCH} 2 --{STEPS} 8 --activation_checkpointing True"
    )
    only = climbed(seen_arguments(values(batch=1)), memory, 9)
    assert said(only) == "--activation_checkpointing True"


def test_then_what_changes_the_experiment() -> None:
    half = climbed(seen_arguments(values(batch=1)), memory, 8.5)
    assert said(half) == "--activation_checkpointing True --bf16 True"
    assert half.best is not None and half.best.effect is Effect.SEMANTICS
    eight = climbed(seen_arguments(values(batch=1)), memory, 5)
    assert said(eight) == "--activation_checkpointing True --bf16 True --optim adamw_bnb_8bit"
    without = climbed(seen_arguments(values(batch=1)), memory, 5, has_eight_bit=False)
    assert said(without).endswith("--optim adafactor")
    assert climbed(seen_arguments(values()), memory, 1).best is None


def test_what_is_on_already_is_not_tried() -> None:
    found = climbed(seen_arguments(values(activation_checkpointing=True, bf16=True, optim="adafactor")), memory, 1)
    assert [one.words for one in found.tried] == [(f"--{BATCH}", "1", f"--{STEPS}", "16")]
    assert Climbed.of(answer_of(GIB, SMALL), memory) == Climbed([], None)


def test_evaluation_that_does_not_fit_is_made_smaller() -> None:
    seen = seen_arguments(values(batch=1, per_device_eval_batch_size=8))
    answer = answer_of(GIB, SMALL, seen=seen)
    at = PeakAt(phase=StepPhase.EVALUATE, module="", op="")
    evaluating = answer.model_copy(
        update={"memory": answer.memory.model_copy(update={"peak_at": at}), "verdict": VerdictKind.REFUSED}
    )
    change = Climbed.of(evaluating, memory).tried[0]
    assert change == ArgumentChange((("per_device_eval_batch_size", 1),), Effect.NUMERICS)


def test_nothing_is_rehearsed_below_what_fits() -> None:
    # The chord from one row to eight says that four fit; that eight fit has told it already.
    def needs(values: dict[str, ArgumentValue]) -> float:
        rows = values[BATCH]
        return rows if rows <= 8 else 100 * rows

    found = climbed(seen_arguments(values(batch=64)), needs, 20)
    assert [one.values[BATCH] for one in found.tried] == [1, 8, 16]
    assert said(found) == f"--{BATCH} 8 --{STEPS} 16"


@given(st.integers(1, 48), st.integers(1, 8), st.floats(0, 220), st.booleans(), st.floats(0, 60))
def test_something_is_found_where_anything_fits(
    batch: int, steps: int, capacity: float, checkpointing: bool, floor: float
) -> None:
    def needs(values: dict[str, ArgumentValue]) -> float:
        return max(floor, memory(values))  # another phase needs so much whatever the batch

    seen = seen_arguments(values(batch, steps, activation_checkpointing=checkpointing))
    found = climbed(seen, needs, capacity)
    best = found.best
    least = needs(values(1, 1, activation_checkpointing=True, bf16=True, optim="adamw_bnb_8bit"))
    if needs(seen.values) > capacity:  # what fits as it is has no ladder
        assert (best is not None) == (capacity >= least)
    assert len(found.tried) <= 10
    for one in found.tried:
        assert one.values.get(BATCH, batch) * one.values.get(STEPS, steps) == batch * steps
    if needs(seen.values) > capacity and best is not None and best.effect is Effect.NUMERICS:
        own = {**seen.values, **best.values}
        larger = [{**own, BATCH: rows} for rows in range(own[BATCH] + 1, batch + 1) if batch % rows == 0]
        # What is over by less than fragmentation may be left untried, never what fits.
        assert not [one for one in larger if needs(one) <= capacity]
        if not floor:
            assert len(found.tried) <= 3 or "activation_checkpointing" in best.values
