"""What a linear model of words reaches on the starter data: the baseline that the demo's winner must beat.

python benchmarks/bench_starter.py
"""

import json
import tempfile
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline

from dryfit.starter.template import init_folder


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        init_folder(Path(temporary))
        rows = {
            path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for path in (Path(temporary) / "data").glob("*.jsonl")
        }
    texts = {split: [f"{row['criterion']} {row['text']}" for row in part] for split, part in rows.items()}
    labels = {split: [row["label"] for row in part] for split, part in rows.items()}
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(C=10, max_iter=2000)).fit(texts["train"], labels["train"])
    for split in ("validation", "test"):
        score = f1_score(labels[split], model.predict(texts[split]), average="macro")
        print(f"words and word pairs, logistic regression: macro F1 {score:.3f} on {split}")


if __name__ == "__main__":
    main()
