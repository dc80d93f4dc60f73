"""A virtual GPU without room: the line is named, and a script that catches the error goes on with less."""

from pathlib import Path
from typing import Any

import pytest

import dryfit
from dryfit.settings.memory_terms import StepPhase, VerdictKind
from dryfit.settings.rehearsal_messages import ScriptEnd
from rehearsed import GIB, PROGRAMS, device, line_of, rehearse
from rehearsed_memory import memory_of

pytestmark = pytest.mark.slow


def test_without_room_the_line_is_named_where_it_ends(tmp_path: Path) -> None:
    sizes = ("--width", 1024, "--layers", 8, "--batch", 4096)
    answer = rehearse(tmp_path, "plain_loop.py", *sizes, "--rows", 4096, "--length", 64, device=device(2 * GIB))
    assert answer.verdict is VerdictKind.REFUSED and answer.end is ScriptEnd.OUT_OF_MEMORY
    (ended,) = answer.out_of_memory
    assert answer.at_least and not ended.caught and ended.line == line_of("plain_loop.py", "return self.head(")
    assert ended.message.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 2.00 GiB" in ended.message


def test_a_script_that_halves_its_batch_goes_on(tmp_path: Path) -> None:
    sizes = ("--width", 1024, "--layers", 4, "--batch", 65536)
    answer = rehearse(tmp_path, "halves_batch.py", *sizes, device=device(GIB + GIB // 2))
    memory = memory_of(answer)
    assert [one.caught for one in answer.out_of_memory] == [True] * len(answer.out_of_memory)
    assert 1 <= len(answer.out_of_memory) <= 4
    assert len(memory.steps) == 3
    assert memory.required_bytes <= GIB + GIB // 2 and answer.fits and not answer.at_least


@pytest.mark.parametrize("options", [(), ("--reentrant",)], ids=["saved", "reentrant"])
def test_a_backward_pass_without_room_is_an_error_that_can_be_caught(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A checkpointed layer computes its forward within the backward pass, in the middle of autograd's C++."""
    sizes = ("--width", 1024, "--layers", 8, "--batch", 24576)
    answer = rehearse(tmp_path, "backward_out_of_memory.py", *sizes, *options, device=device(3 * GIB))
    memory = memory_of(answer)
    assert answer.out_of_memory
    assert all(one.caught for one in answer.out_of_memory)
    assert answer.out_of_memory[0].phase is StepPhase.BACKWARD
    assert len(memory.steps) == 3
    assert memory.required_bytes <= 3 * GIB


def test_sizes_that_values_decide_are_two_bounds() -> None:
    """Of 4,096 outputs each pair may be selected, or none: two tensors of 4 GiB, or of nothing."""
    roomy, small, tiny = (
        dryfit.rehearse(PROGRAMS / "odd/selects_pairs.py", device=size) for size in ("24GiB", "6GiB", "512MiB")
    )
    assert roomy.verdict is VerdictKind.FITS and roomy.sized_by_values and roomy.memory is not None
    assert small.verdict is VerdictKind.UNKNOWN and small.memory is not None and small.memory.least_bytes is not None
    assert small.memory.least_bytes < 2 * GIB < 8 * GIB < small.memory.required_bytes
    assert "by values that nobody knows" in small.reasons[0]
    assert tiny.verdict is VerdictKind.REFUSED and tiny.memory is not None and tiny.memory.least_bytes is not None
    assert tiny.memory.least_bytes > GIB // 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (
            "auto_batch_size.py",
            ["--output_dir", "out", "--width", 256, "--layers", 4, "--length", 256, "--batch", 256, "--rows", 512],
        ),
        (
            "accelerate_loop.py",
            ["--width", 256, "--layers", 4, "--vocabulary", 1000, "--length", 256, "--batch", 256, "--rows", 512],
        ),
    ],
)
def test_libraries_that_look_for_a_batch_size_find_it(tmp_path: Path, program: str, arguments: list[Any]) -> None:
    arguments = [str(tmp_path / "out") if word == "out" else word for word in arguments]
    answer = rehearse(tmp_path, program, *arguments, device=device(2 * GIB))
    memory = memory_of(answer)
    assert answer.out_of_memory and all(one.caught for one in answer.out_of_memory)
    assert [step.number for step in memory.steps][:3] == [1, 2, 3]
    assert memory.required_bytes <= 2 * GIB
