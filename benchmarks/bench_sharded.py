"""Where Qwen2.5-7B can be trained on one, two and eight 24 GiB cards: by the Trainer, FSDP2 and DeepSpeed.

Each row is one ``dryfit rehearse`` of ``benchmarks/sharded/train.py``. No GPU and no weights are needed.

    python benchmarks/bench_sharded.py          # writes the table into docs/deepspeed.md; half an hour
    python benchmarks/bench_sharded.py zero3    # prints the rows of one way
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "sharded"
PAGE = Path(__file__).parents[1] / "docs" / "deepspeed.md"
MARK = "<!-- below: python benchmarks/bench_sharded.py -->\n"
DEVICE = "rtx4090"
RANKS = (1, 2, 8)
WAYS = {
    "plain": "Trainer (DDP from two cards on)",
    "fsdp2": "FSDP2",
    "zero2": "ZeRO-2, optimizer on the host",
    "zero3": "ZeRO-3, optimizer on the host",
}
ARGUMENTS = (
    *("--output_dir", "out", "--bf16", "--per_device_train_batch_size", "2", "--max_steps", "4", "--report_to", "none"),
    *("--save_strategy", "no", "--activation_checkpointing"),
)
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One rehearsal.

    Attributes:
        lora: Rank of the adapters; 0: all weights.
    """

    way: str
    lora: int
    ranks: int

    def command(self) -> list[str]:
        """Return the command line that is rehearsed."""
        count = str(self.ranks)
        launchers = {
            "plain": ["torchrun", "--nproc-per-node", count] if self.ranks > 1 else [],
            "fsdp2": ["accelerate", "launch", "--config_file", "fsdp2.yaml", "--num_processes", count],
        }
        launcher = launchers.get(self.way, ["deepspeed", "--num_gpus", count])
        of_deepspeed = ["--deepspeed", f"{self.way}.json"] if self.way not in launchers else []
        return [*launcher, "train.py", "--rank", str(self.lora), *ARGUMENTS, *of_deepspeed]


def rows(ways: list[str]) -> Iterator[Row]:
    """Yield all rows, in the order of the table."""
    for lora in (128, 0):
        for way in ways:
            for ranks in RANKS:
                yield Row(way, lora, ranks)


def rehearsed(row: Row) -> dict[str, Any]:
    """Return the answer of a rehearsal."""
    dryfit = [sys.executable, "-m", "dryfit.documents.command_line", "rehearse", "--device", DEVICE]
    command = [*dryfit, "--json", "--quiet", "--steps", "2", *row.command()]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{row}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def line(row: Row, answer: dict[str, Any]) -> str:
    """Return a row of the table: GiB of a card, whether it fits, GiB of the host for all ranks."""
    trained = f"LoRA, r={row.lora}" if row.lora else "all weights"
    fits = {True: "yes", False: "no"}.get(answer["fits"], "unknown")
    host = (answer.get("host") or {"held_bytes": 0})["held_bytes"] * row.ranks
    needs = [f"{answer[name] / GIB:.1f}" for name in ("peak_allocated_bytes", "required_bytes")]
    return f"| {trained} | {WAYS[row.way]} | {row.ranks} | {' | '.join(needs)} | {fits} | {host / GIB:.0f} |"


def main() -> None:
    """Print the table line by line; the whole one is written to the page."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    table = [
        f"{today}, {libraries}\n",
        "| trained | by | cards | peak, GiB a card | required, GiB a card | fits | host, GiB for all ranks |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    print("\n".join(table), flush=True)
    for row in rows(sys.argv[1:] or list(WAYS)):
        table.append(line(row, rehearsed(row)))
        print(table[-1], flush=True)
    if not sys.argv[1:]:
        above, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(above + mark + "\n".join(["", *table, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
