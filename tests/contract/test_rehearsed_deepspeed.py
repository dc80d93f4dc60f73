"""DeepSpeed's own code on a virtual GPU: what a rank holds is what the ZeRO paper and DeepSpeed's estimators say.

Hand counts are in bytes for each parameter. The paper (arXiv:1910.02054, section 3.1) counts for Adam in 16 bits: 2 of
weights, 2 of gradients, and 12 of master weights and two moments.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dryfit.processes.rehearsed_command import parse_command
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalMemory, ScriptEnd
from parts import need_package
from rehearsed import hide, rehearse

pytestmark = pytest.mark.slow
WIDTH, LAYERS, VOCABULARY = 2048, 4, 512
PARAMETERS = 2 * VOCABULARY * WIDTH + LAYERS * (8 * WIDTH * WIDTH + 4 * WIDTH + WIDTH + 2 * WIDTH)
LARGEST = 4 * WIDTH * WIDTH
"""Elements of the largest parameter."""
LAUNCHED = parse_command(["torchrun", "train.py"], lambda _: {}).environment
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
SAID = {
    "pipeline": "PipelineModule",
    "inference": "InferenceEngine",
    "disk": "ZeRO-Infinity",
    "operator": "quantizer",
    "automatic": "TypeError",
}


@pytest.fixture(autouse=True)
def _deepspeed() -> None:
    need_package("deepspeed")


def trained(folder: Path, *options: str | int, ranks: int = 1) -> tuple[RehearsalAnswer, RehearsalMemory]:
    """Rehearse three steps of the model of these sizes."""
    given = ("--width", WIDTH, "--layers", LAYERS, *options)
    answer = rehearse(folder, "deepspeed_engine.py", *given, ranks=ranks, surroundings=LAUNCHED)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED) and not answer.unknown, answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == 3
    return answer, answer.memory


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RehearsalMemory]:
    """What a rank holds with all of it on the device: rehearsed once, whichever tests ask."""

    @functools.cache
    def of(stage: int, ranks: int, precision: str = "bf16") -> RehearsalMemory:
        need_package("deepspeed")
        return trained(tmp_path_factory.mktemp("held"), "--stage", stage, "--precision", precision, ranks=ranks)[1]

    return of


def resting(memory: RehearsalMemory) -> float:
    """Bytes for each parameter that the last step leaves, cuBLAS's workspaces aside."""
    return (memory.steps[-1].end_bytes - memory.by_category[MemoryCategory.WORKSPACES]) / PARAMETERS


def rests(stage: int, ranks: int, precision: str) -> float:
    """The hand count between two steps: from stage 3 on weights are split, and the gradients' memory is kept."""
    whole = BYTES[precision]
    return whole + 12 / ranks if stage < 3 else (2 * whole + 12) / ranks


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("stage", "ranks", "precision"),
    [
        *((stage, ranks, "bf16") for stage in (1, 2, 3) for ranks in (1, 2, 8)),
        *((stage, 2, precision) for stage in (2, 3) for precision in ("fp16", "fp32")),
    ],
)
def test_a_rank_holds_what_the_paper_counts(
    held: Callable[..., RehearsalMemory], stage: int, ranks: int, precision: str
) -> None:
    memory = held(stage, ranks, precision)
    assert resting(memory) == pytest.approx(rests(stage, ranks, precision), rel=0.012)  # buckets, and blocks not split
    if ranks <= 2:  # on more the optimizer's step is not the peak
        found = memory.by_category
        assert found[MemoryCategory.OPTIMIZER] / PARAMETERS == pytest.approx(8 / ranks, rel=0.01)
        split = 1 if stage < 3 else ranks
        weights = BYTES[precision] / split + 4 / ranks
        assert found[MemoryCategory.WEIGHTS] / PARAMETERS == pytest.approx(weights, rel=0.01)
        gradients = (BYTES[precision] + 4) / ranks  # of the partition, and a copy for the optimizer
        assert found[MemoryCategory.GRADIENTS] / PARAMETERS == pytest.approx(gradients, rel=0.01)


def test_the_second_stage_takes_what_deepspeed_estimates(held: Callable[..., RehearsalMemory]) -> None:
    code = (
        "import json; from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two;"
        f"print(json.dumps([two({PARAMETERS}, ranks, 1, cpu_offload=False)[1] for ranks in (1, 2)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for ranks, estimate in enumerate(json.loads(done.stdout.splitlines()[-1]), 1):
        found = held(2, ranks).by_category
        states = (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
        assert sum(found[kind] for kind in states) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_moves_the_optimizer_to_the_host(
    tmp_path: Path, held: Callable[..., RehearsalMemory], stage: int
) -> None:
    on_device = held(stage, 2)
    answer, memory = trained(tmp_path, "--stage", stage, "--offload-optimizer", ranks=2)
    moved = (on_device.steps[-1].end_bytes - memory.steps[-1].end_bytes) / PARAMETERS
    # Stage 2 leaves the largest gradient, on its way to the host; of stage 3 the gradients' partition goes as well.
    wanted = 12 / 2 - 2 * LARGEST / PARAMETERS if stage < 3 else (12 + 2) / 2
    assert moved == pytest.approx(wanted, rel=0.01)
    host = answer.host
    assert host is not None
    half = PARAMETERS // 2
    moments, masters, gradients = 8 * half, 4 * half, 4 * half
    if stage < 3:  # with a copy of the weights in 16 bits
        pageable, pinned = moments, [masters, gradients, 2 * half, 2 * LARGEST]
    else:  # with the gradients' partition in 16 bits
        pageable, pinned = moments + masters, [gradients, 2 * half]
    assert host.held_bytes - host.pinned_bytes == pytest.approx(pageable, rel=0.01)
    assert host.pinned_bytes == pytest.approx(sum(1 << (size - 1).bit_length() for size in pinned), rel=0.01)
    assert answer.work is not None and answer.work.step_time is None
    assert answer.host_peak_bytes < 2**30, "nothing of it is allocated"


def test_activations_are_those_of_the_model_without_deepspeed(tmp_path: Path) -> None:
    taken: list[int] = []
    for name, options in {"plain": (), "2": ("--stage", 2), "3": ("--stage", 3)}.items():
        folder = tmp_path / name
        folder.mkdir()
        memory = trained(folder, "--rows", 64, "--tokens", 256, *options, ranks=8 if options else 1)[1]
        assert memory.peak_at.phase in (StepPhase.FORWARD, StepPhase.BACKWARD)
        taken.append(memory.by_category[MemoryCategory.ACTIVATIONS])
    assert taken[1:] == [pytest.approx(taken[0], rel=0.01)] * 2


def test_deepspeeds_checkpointing_keeps_less(tmp_path: Path) -> None:
    whole = trained(tmp_path, "--stage", 2, "--rows", 8, "--tokens", 256)[1]
    (tmp_path / "less").mkdir()
    less = trained(tmp_path / "less", "--stage", 2, "--rows", 8, "--tokens", 256, "--checkpoint")[1]
    hidden = 8 * 256 * WIDTH * 2
    kept = (4 + 4 + 1) * hidden  # of each block: what grows, what comes of that, and what is normalised
    saved = whole.by_phase[StepPhase.FORWARD] - less.by_phase[StepPhase.FORWARD]
    assert saved > (LAYERS - 1) * kept


@pytest.mark.parametrize(
    ("optimizer", "options", "state"),
    [("Lion", (), 4), ("Lamb", ("--precision", "fp16", "--stage", 0), 8)],
)
def test_fused_optimizers_keep_their_state(
    tmp_path: Path, optimizer: str, options: tuple[str | int, ...], state: int
) -> None:
    _, memory = trained(tmp_path, "--stage", 1, *options, "--optimizer", optimizer)
    assert memory.by_category[MemoryCategory.OPTIMIZER] / PARAMETERS == pytest.approx(state, rel=0.01)


def test_the_second_moments_of_adagrad_are_on_the_host(tmp_path: Path) -> None:
    answer, memory = trained(tmp_path, "--stage", 2, "--offload-optimizer", "--optimizer", "Adagrad", "--save", "out")
    assert answer.host.held_bytes - answer.host.pinned_bytes == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert MemoryCategory.OPTIMIZER not in memory.by_category


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_trainer_of_transformers_trains_evaluates_and_saves(tmp_path: Path, stage: int) -> None:
    answer = rehearse(tmp_path, "deepspeed_trainer.py", stage, ranks=8, surroundings=LAUNCHED)
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED) and not answer.unknown, answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) >= 3
    assert answer.libraries["deepspeed"] and answer.host is not None
    saved = {Path(one.where).name: one.bytes or 0 for one in answer.muted if one.what == "checkpoint"}
    assert saved["global_step3"] > 0, saved


def test_what_cannot_be_rehearsed_is_refused_by_name_and_deepspeeds_own_errors_pass(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/deepspeed_refused.py", ranks=2, surroundings=LAUNCHED)
    said = dict(line.split(": ", 1) for line in answer.traceback.splitlines() if line.count(": ") > 1)
    assert {name: word for name, word in SAID.items() if word not in said.get(name, "")} == {}, said


@pytest.mark.parametrize(
    ("hidden", "surroundings", "said"),
    [("deepspeed", LAUNCHED, "pip install --no-deps deepspeed"), ("mpi4py", {}, "a launcher before the script")],
)
def test_what_is_missing_is_one_line(tmp_path: Path, hidden: str, surroundings: Mapping[str, str], said: str) -> None:
    without = {**surroundings, **hide(tmp_path / "hidden", hidden)}
    answer = rehearse(tmp_path, "deepspeed_engine.py", "--stage", 1, surroundings=without)
    assert said in answer.reasons[0]
