"""What a majority and a linear model of words reach on the starter data: what the demo's winner must beat.

python benchmarks/bench_starter.py
"""

import tempfile
from pathlib import Path

from class_baselines import baseline_classes, f1_macro, read_rows

from dryfit.study.template import init_folder


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        init_folder(Path(temporary))
        rows = {path.stem: read_rows(path) for path in (Path(temporary) / "data").glob("*.jsonl")}
    splits = ("validation", "test")
    for name, parts in baseline_classes(rows["train"], [rows[split] for split in splits]).items():
        for split, classes in zip(splits, parts, strict=True):
            print(f"{name}: macro F1 {f1_macro(rows[split], classes):.3f} on {split}")


if __name__ == "__main__":
    main()
