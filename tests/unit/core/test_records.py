"""Records: written as JSON and read strictly, and as strict within a model of pydantic."""

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, MemoryCategory, VerdictKind
from dryfit.settings.records import Message, Record
from dryfit.settings.rehearsal_messages import LargestBatch, RehearsalAnswer, RehearsalRequest, ScriptEnd

CARD = DeviceSpec(name="a card", capacity_bytes=2**30)
ANSWER = RehearsalAnswer(
    verdict=VerdictKind.FITS,
    end=ScriptEnd.STOPPED,
    device=CARD,
    worst_batch=LargestBatch(shapes={"ids": (4, 8)}, seen=1, of=None, fed_first=True),
    sent={"all_reduce": 3},
    notes=("ä",),
)


class Sizes(Message):
    by_category: dict[MemoryCategory, int]
    value: str | int | float | bool | None
    kind: Literal["sizes"] = "sizes"


class Around(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    device: DeviceSpec
    answer: RehearsalAnswer | None = None


@pytest.mark.parametrize("value", ["text", 1, 0.5, True, None])
def test_what_is_written_is_read(value: object) -> None:
    sizes = Sizes(by_category={MemoryCategory.INPUTS: 1}, value=value)
    assert Sizes.model_validate_json(sizes.model_dump_json()) == sizes
    assert type(Sizes.model_validate_json(sizes.model_dump_json()).value) is type(value)
    assert RehearsalAnswer.model_validate_json(ANSWER.model_dump_json()) == ANSWER


def test_the_forms_of_a_dump() -> None:
    dumped = ANSWER.model_dump(exclude={"v"})
    assert "v" not in dumped and dumped["worst_batch"]["shapes"] == {"ids": (4, 8)}
    assert dumped["verdict"] is VerdictKind.FITS
    assert ANSWER.model_dump(mode="json")["worst_batch"]["shapes"] == {"ids": [4, 8]}
    assert tuple(CARD.model_fields) == ("name", "kind", "capacity_bytes", "capability")
    assert CARD.model_copy(update={"name": "b"}).name == "b" and CARD.name == "a card"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "DeviceSpec"),
        ("{", "Expecting"),
        ('{"capacity_bytes": 1}', "DeviceSpec.name is missing"),
        ('{"name": "a", "capacity_bytes": 1, "more": 2}', "unknown key: 'more'"),
        ('{"name": "a", "capacity_bytes": true}', "capacity_bytes is True, not int"),
        ('{"name": "a", "capacity_bytes": 1.0}', "capacity_bytes is 1.0, not int"),
        ('{"name": "a", "capacity_bytes": 0}', "not above 0"),
        ('{"name": "a", "capacity_bytes": 1, "kind": "tpu"}', "tpu"),
        ('{"name": "a", "capacity_bytes": 1, "capability": [1]}', "has 1 values, not 2"),
        ('{"name": "a", "capacity_bytes": 1, "capability": ["x", 1]}', "capability.0"),
    ],
)
def test_what_is_wrong_is_told(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        DeviceSpec.model_validate_json(text)


def test_a_record_within_a_model_is_as_strict() -> None:
    around = Around(device=CARD, answer=ANSWER)
    assert Around.model_validate_json(around.model_dump_json()) == around
    for wrong in ('{"device": {"name": "a", "capacity_bytes": "1"}}', '{"device": {"name": "a", "capacity_bytes": 0}}'):
        with pytest.raises(ValidationError):
            Around.model_validate_json(wrong)


def test_records_are_frozen_and_given_by_name() -> None:
    with pytest.raises(AttributeError):
        CARD.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        DeviceSpec("a", DeviceKind.CUDA, 1)  # type: ignore[misc]
    assert hash(CARD) == hash(CARD.model_copy()) and issubclass(DeviceSpec, Record)
    with pytest.raises(ValueError, match="ranks"):
        RehearsalRequest(device=CARD, ranks=0, scratch_dir="", answer_file="")
