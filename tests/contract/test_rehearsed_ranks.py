"""A script of several ranks, rehearsed as rank 0: its buckets, its shards, and what it sends."""

from pathlib import Path

import pytest

import dryfit
from dryfit.gpu.constants import communicator_bytes
from dryfit.gpu.events import BLOCK_BYTES
from dryfit.settings.memory_terms import MemoryCategory, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalMemory, ScriptEnd
from rehearsed import MIB, PROGRAMS, rehearse

pytestmark = pytest.mark.slow
WIDTH, LAYERS = 256, 4
SIZES = LAYERS * (4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH)


def rounded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def rehearsed(folder: Path, *options: str, ranks: int) -> tuple[RehearsalAnswer, RehearsalMemory]:
    answer = rehearse(folder, "data_parallel.py", "--width", WIDTH, "--layers", LAYERS, *options, ranks=ranks)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), answer.traceback
    assert answer.memory is not None
    return answer, answer.memory


@pytest.mark.parametrize("options", [(), ("--find-unused",)], ids=["plain", "unused"])
def test_data_parallelism_keeps_buckets_and_sends_each_gradient_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    answer, memory = rehearsed(tmp_path, *options, ranks=4)
    weights = sum(rounded(4 * size) for size in SIZES)
    assert memory.by_category[MemoryCategory.WEIGHTS] - weights in range(BLOCK_BYTES + 1)  # its map of what was used
    assert memory.by_category[MemoryCategory.OPTIMIZER] == 2 * weights + rounded(0)
    assert answer.sent["all_reduce"] - 4 * sum(SIZES) in (0, 4 * len(SIZES))  # and that map, where it is sent
    assert answer.ranks == 4
    assert memory.nccl_bytes == communicator_bytes(answer.device, 4)


def test_sharded_parameters_take_their_share(tmp_path: Path) -> None:
    answer, memory = rehearsed(tmp_path, "--shard", ranks=8)
    shard = sum(rounded(4 * size // 8) for size in SIZES)
    assert memory.by_category[MemoryCategory.WEIGHTS] == pytest.approx(shard, rel=0.02)
    assert memory.by_category[MemoryCategory.OPTIMIZER] == pytest.approx(2 * shard, rel=0.02)
    # Each layer is gathered for its forward and, but for the last, once more for its backward pass.
    assert set(answer.sent) >= {"all_gather", "reduce_scatter"}
    assert answer.sent["reduce_scatter"] > 0


def test_sharded_parameters_are_initialised_without_an_end_in_their_values(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/sharded_values.py", ranks=2)
    assert answer.ran and answer.memory is not None, answer.traceback
    assert len(answer.memory.steps) == 3
    assert [one.line.rpartition(":")[2] for one in answer.unknown] == ["16", "16"]


def test_what_is_gathered_of_other_ranks_is_what_this_one_has(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/gathers.py", ranks=2)
    assert answer.ran and answer.memory is not None, answer.traceback
    assert len(answer.memory.steps) == 3 and not answer.unknown


@pytest.mark.parametrize(
    ("way", "ranks"), [("spawn", 2), ("notebook", 2), ("mesh", 2), ("lightning", 2), ("fabric", 2), ("alone", 1)]
)
def test_a_script_may_begin_its_ranks_in_any_way(tmp_path: Path, way: str, ranks: int) -> None:
    answer = rehearse(tmp_path, "starts_ranks.py", way, ranks, ranks=ranks)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == 3
    assert (way in ("spawn", "notebook")) == any("the script starts" in note for note in answer.notes)


def test_as_many_ranks_as_a_script_starts_are_rehearsed_where_nobody_says_how_many() -> None:
    def answer_of(way: str, ranks: int | None) -> RehearsalAnswer:
        arguments = [way, "4" if way == "two nodes" else "2"]
        return dryfit.rehearse(PROGRAMS / "starts_ranks.py", device="24GiB", arguments=arguments, ranks=ranks)

    # It asks for two devices first, and as the first of two for a group of four.
    answer = answer_of("two nodes", None)
    assert (answer.ranks, answer.fits, answer.ranks_wanted) == (4, True, 0)
    assert answer.sent is not None and answer.sent["all_reduce"] > 0
    for way in ("spawn", "lightning"):
        alone = answer_of(way, 1)
        assert (alone.ranks, alone.verdict, alone.ranks_wanted) == (1, VerdictKind.UNKNOWN, 2)


@pytest.mark.parametrize(
    ("way", "ranks", "asked", "text"),
    [
        ("spawn", 1, 4, "a process group of 4 ranks, and 1 are rehearsed"),
        ("store", 2, 2, "it waits for rank1, which a rank that is not there would set"),
        ("group's store", 2, 2, "Wait timeout"),
    ],
)
def test_what_would_wait_for_ever_is_a_text(tmp_path: Path, way: str, ranks: int, asked: int, text: str) -> None:
    answer = rehearse(tmp_path, "starts_ranks.py", way, asked, ranks=ranks)
    assert answer.verdict is VerdictKind.UNKNOWN
    assert text in answer.reasons[0]


def test_a_group_that_nobody_described_is_torchs_own_error(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "starts_ranks.py", "forgotten", 1)
    assert answer.end is ScriptEnd.FAILED
    assert "environment variable RANK expected" in answer.traceback


@pytest.mark.each_value
@pytest.mark.parametrize("version", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("kind", "option"), [("whole", "flat"), ("shards", "original"), ("shards", "mixed")])
def test_what_is_gathered_is_freed_and_checkpoints_of_both_kinds_pass(
    tmp_path: Path, version: str, kind: str, option: str
) -> None:
    answer = rehearse(tmp_path, "sharded_checkpoints.py", version, kind, option, ranks=2)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), answer.traceback
    shards = 6 * 4 * MIB // 2
    held = answer.memory.by_category
    assert held[MemoryCategory.WEIGHTS] == pytest.approx(shards, rel=0.01)
    assert held[MemoryCategory.OPTIMIZER] == pytest.approx(2 * shards, rel=0.01)
    ends = answer.memory.steps[-1].end_bytes - held[MemoryCategory.WORKSPACES]
    assert ends == pytest.approx(4 * shards, rel=0.01)  # gradients too, and nothing that was gathered


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_states_of_parameters_that_lie_on_other_ranks_are_gathered(tmp_path: Path, kind: str) -> None:
    """All layers are one flat parameter, of which rank 0 of 4 has the first one and a half."""
    answer = rehearse(tmp_path, "sharded_checkpoints.py", "fsdp1", kind, "original", "together", ranks=4)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), answer.traceback
    memory = answer.memory
    assert memory is not None and len(memory.steps) == 3
    assert memory.by_category[MemoryCategory.OPTIMIZER] == pytest.approx(2 * 6 * 4 * MIB // 4, rel=0.01)
    ends = [step.end_bytes for step in memory.steps]
    assert ends[-1] == ends[-2]


@pytest.mark.parametrize("way", ["both", "stages"])
def test_layers_are_split_over_ranks(tmp_path: Path, way: str) -> None:
    answer = rehearse(tmp_path, "tensor_parallel.py", way, ranks=4)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == 3
    blocks = 4 * 2 * 4 * 512 * 512 * 4 // 4  # of each a quarter, by whatever ways
    if way != "stages":  # its script makes all of them, and keeps them
        assert answer.memory.by_category[MemoryCategory.WEIGHTS] == pytest.approx(blocks, rel=0.05)
        assert answer.memory.nccl_bytes == 2 * communicator_bytes(answer.device, 4)  # one for each way
