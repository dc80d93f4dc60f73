"""A step of the HF Trainer on a virtual GPU beside the plan of dryfit's own: they agree but for what is listed here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.settings.memory_terms import MemoryCategory
from peak_holders import RESERVED
from step_cases import CASES, ENCODER, case_of

pytestmark = pytest.mark.slow
MIB = 2**20
SMALL = 32 << 10
"""What inputs, labels, norms and losses of single numbers may differ by, for each operator."""
ENCODERS = ("bert", "modernbert")
WIDTH = ENCODER["hidden_size"]
SUPPORT = Path(__file__).parents[1] / "support"
OPTIMIZERS = {
    "adamw:fused": "adamw_torch_fused",
    "adamw:foreach": "adamw_torch",
    "adafactor": "adafactor",
    "adamw8bit": "adamw_8bit",
}
FLAGS = {
    "micro": ("--accumulation", "4"),
    "ckpt": ("--checkpointing", "saved"),
    "ckpt-reentrant": ("--checkpointing", "reentrant"),
    "lora": ("--lora", "16"),
}


def held(folder: Path, what: str, *arguments: str | Path) -> dict[str, int]:
    """What holds the memory at a peak, found in a fresh process."""
    out = folder / f"{what}.json"
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "peak_holders.py"), what, str(out), *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", list(CASES))
def test_the_trainer_takes_what_the_plan_says_but_for_listed_operators(tmp_path: Path, name: str) -> None:
    architecture, precision, optimizer, *flags = CASES[name].split()
    case = tmp_path / "case.json"
    case.write_text(case_of(tmp_path / "model", CASES[name]).model_dump_json(), encoding="utf-8")
    options = [word for flag in flags for word in FLAGS[flag]]
    script = [SUPPORT / "trainer_of_config.py", "--config", tmp_path / "model", "--output_dir", tmp_path / "out"]
    seen = held(tmp_path, "script", *script, "--precision", precision, "--optim", OPTIMIZERS[optimizer], *options)
    planned = held(tmp_path, "plan", case)
    reserved, planned_reserved = seen.pop(RESERVED), planned.pop(RESERVED)
    print("RESERVED", name, reserved, planned_reserved, reserved - planned_reserved)
    differs = {key: seen.get(key, 0) - planned.get(key, 0) for key in {*seen, *planned}}
    listed = of_encoders(optimizer) if architecture in ENCODERS else {}
    if differs.get(MemoryCategory.GRADIENTS, 0) < SMALL:  # the peak lies before those of what the Trainer's model adds
        listed.pop(MemoryCategory.GRADIENTS, None)
    assert {key: size for key, size in differs.items() if abs(size - listed.get(key, 0)) > SMALL} == {}
    total = sum(planned.values())
    assert total > 90 * MIB
    assert abs(sum(differs.values()) - sum(listed.values())) <= 0.001 * total
    segment = max(0.001 * reserved, 2 * MIB)
    assert -segment <= reserved - planned_reserved <= sum(listed.values()) + segment


def of_encoders(optimizer: str) -> dict[str, int]:
    """What transformers' classifier has that dryfit's has not: a dense layer before the head, and its state.

    For 8-bit AdamW transformers also asks bitsandbytes for fp32 moments of embeddings, where dryfit keeps 8 bits and a
    scale for each 256 of them.
    """
    dense = WIDTH * WIDTH + WIDTH
    moments = {"adafactor": 0, "adamw8bit": 2 * dense}.get(optimizer, 8 * dense)
    if optimizer == "adamw8bit":
        embeddings = WIDTH * (ENCODER["vocab_size"] + ENCODER["max_position_embeddings"] + 2)
        moments += int(embeddings * 2 * (4 - 1 - 4 / 256))
    return {MemoryCategory.WEIGHTS: 4 * dense, MemoryCategory.GRADIENTS: 4 * dense, MemoryCategory.OPTIMIZER: moments}
