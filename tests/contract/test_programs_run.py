"""The programs that are rehearsed are programs: each runs for real on the CPU, in a tiny size."""

from pathlib import Path

import pytest

from parts import need_package
from rehearsed import PROGRAMS, run
from timm_beside import with_timm

NEEDS = {
    "sft_lora.py": ("trl", "peft"),
    "dpo_lora.py": ("trl", "peft"),
    "grpo.py": ("trl",),
    "lightning_module.py": ("lightning",),
}
RANKS = {"data_parallel.py": 2}
SHORTER = {"parsed_arguments.py": ("--max_steps", "2")}  # of three epochs, which take minutes
STATUS = {"odd/fails.py": 1, "odd/fails_early.py": 1, "odd/exits.py": 3}
ONLY_REHEARSED = {
    *("odd/asks_terminal.py", "odd/flash_attention.py", "odd/gathers.py", "odd/guards.py", "odd/lacks_package.py"),
    *("odd/own_rows.py", "odd/paged_optimizer.py", "odd/sharded_values.py", "odd/deepspeed_refused.py"),
    *(
        "odd/asks_driver.py",
        "odd/factorizes.py",
        "odd/function_modes.py",
        "odd/hooks.py",
        "odd/images.py",
        "odd/jagged_rows.py",
        "odd/late_average.py",
        "odd/own_processes.py",
        "odd/own_products.py",
    ),
    *("odd/plain_tensors.py", "odd/second_order.py", "odd/selects_pairs.py", "odd/swaps_tensors.py"),
    *("odd/repeats_rows.py", "odd/wraps_tensors.py"),
    *("accumulates.py", "compiled_programs.py", "deepspeed_engine.py", "deepspeed_trainer.py"),
    *("sharded_checkpoints.py", "starts_ranks.py", "tensor_parallel.py"),
}
"""They need a terminal, a device, a launcher, or several ranks that have a device each."""
NAMES = sorted({str(path.relative_to(PROGRAMS)) for path in PROGRAMS.rglob("*.py")} - ONLY_REHEARSED)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("program", NAMES)
def test_it_ends_as_its_first_line_says(tmp_path: Path, program: str) -> None:
    for package in NEEDS.get(program, ()):
        need_package(package)
    takes_folder = "--output_dir" in (PROGRAMS / program).read_text(encoding="utf-8")
    done = run(
        tmp_path,
        program,
        *(("--output_dir", str(tmp_path / "out")) if takes_folder else ()),
        *SHORTER.get(program, ()),
        ranks=RANKS.get(program, 1),
        surroundings=with_timm(tmp_path / "timm") if program == "timm_vit.py" else None,
    )
    assert done.returncode == STATUS.get(program, 0), done.stderr[-3000:]
    named = {"odd/fails.py": "ValueError: no such label: 7", "odd/fails_early.py": "KeyError: 'labels'"}
    assert named.get(program, "") in done.stderr
