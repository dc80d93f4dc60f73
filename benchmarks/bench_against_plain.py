"""A whole study against the same work in a plain Optuna + Trainer loop in one process.

    python benchmarks/bench_against_plain.py [--pairs 5] [--contracts FOLDER]

CPU seconds of the whole process tree (children and their children included), interleaved pairs, medians. First with
the same batches (so the same padding); then, on the contract rows if they are at hand, with length-grouped batches
against the loop's own order. The loop writes no checkpoint and no weights; dryfit keeps the best weights of each trial.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from measured import Cost, contract_files, run, spread

from dryfit.study.template import init_folder

HERE = Path(__file__).parent
LRS = (1e-4, 2e-4, 3e-4)


def dryfit(folder: Path, name: str, data: list[str], *, grouped: bool) -> Cost:
    study = folder / f"{name}.toml"
    study.write_text(
        f"""
[study]
trials = {len(LRS)}
[space]
"optim.lr" = {list(LRS)}
[search]
sampler = "random"
defaults_first = false
[head]
pooling = "cls"
[train]
group_by_length = {str(grouped).lower()}
epochs = 1
batch_size = 16
[execution]
threads = 2
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "dryfit.documents.command_line", "tune", str(study), "--quiet", "--json"]
    return run([*command, *(word for pair in data for word in ("--set", pair))], folder / f"{name}.log")


def plain(folder: Path, name: str, data: list[str], *, same_batches: bool) -> Cost:
    command = [sys.executable, str(HERE / "plain.py"), "--out", str(folder / name), "--epochs", "1"]
    command += ["--lr", *map(str, LRS), *(["--same-batches"] if same_batches else []), *data]
    return run(command, folder / f"{name}.log")


def compare(title: str, pairs: int, ours: list[str], theirs: list[str], *, same_batches: bool) -> None:
    costs: list[tuple[Cost, Cost]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for pair in range(pairs):
            folder = Path(temporary) / str(pair)
            folder.mkdir()
            both = (
                lambda folder=folder: dryfit(folder, "dryfit", ours, grouped=not same_batches),
                lambda folder=folder: plain(folder, "plain", theirs, same_batches=same_batches),
            )
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            found = {index: both[index]() for index in order}
            costs.append((found[0], found[1]))
            print(f"  pair {pair}: dryfit {found[0]}, plain {found[1]}", flush=True)
    print(title)
    for what in ("cpu_s", "wall_s"):
        one = [getattr(cost[0], what) for cost in costs]
        other = [getattr(cost[1], what) for cost in costs]
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        print(f"  {what}: dryfit {spread(one)}, plain {spread(other)}, ratio {spread(ratios)}")
    print(f"  median CPU ratio {statistics.median(a.cpu_s / b.cpu_s for a, b in costs):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--contract-pairs", type=int, default=5)
    parser.add_argument("--contracts", default=os.environ.get("DRYFIT_CONTRACTS"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        init_folder(Path(temporary))
        data = Path(temporary) / "data"
        files = {split: str(data / f"{split}.jsonl") for split in ("train", "validation")}
        ours = [f"data.{split}={path}" for split, path in files.items()] + ["train.max_length=160"]
        theirs = [word for split, path in files.items() for word in (f"--{split}", path)]
        compare("same batches, synthetic posts", options.pairs, ours, theirs, same_batches=True)
    contracts = contract_files(options.contracts)
    if contracts is None:
        return
    limits = {"train": 256, "validation": 96}
    ours = [f"data.{split}={contracts[split]}" for split in limits]
    ours += [f"data.{split}_limit={limit}" for split, limit in limits.items()]
    theirs = [word for split in limits for word in (f"--{split}", contracts[split])]
    theirs += [word for split, limit in limits.items() for word in (f"--{split}-limit", str(limit))]
    compare(
        "length-grouped against the loop's own order, contracts",
        options.contract_pairs,
        ours,
        theirs,
        same_batches=False,
    )


if __name__ == "__main__":
    main()
