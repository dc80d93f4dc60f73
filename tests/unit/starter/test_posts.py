import json
from collections import Counter

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline

from dryfit.settings.errors import ConfigError
from dryfit.study.example_posts import CRITERIA, VERBS, generate, write_splits


def test_the_same_seed_gives_the_same_rows():
    assert generate(50, 3) == generate(50, 3)
    assert generate(50, 3) != generate(50, 4)


def test_rows_are_balanced_unique_and_their_evidence_is_whole_sentences():
    rows = generate(400, 1)
    assert Counter(row["label"] for row in rows) == {0: 200, 1: 200}
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == 400
    assert {row["criterion"] for row in rows} == {criterion.text for criterion in CRITERIA}
    for row in rows:
        assert bool(row["evidence"]) == bool(row["label"])
        for start, end in row["evidence"]:
            sentence = row["text"][start:end]
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert start == 0 or row["text"][start - 1] == " "
            assert "{" not in sentence


def test_criteria_have_phrases_both_ways_and_every_verb_has_its_forms():
    assert len(CRITERIA) >= 6
    for criterion in CRITERIA:
        assert not set(criterion.shows) & set(criterion.opposes)
        for phrase in (*criterion.shows, *criterion.opposes):
            assert phrase.split()[0] in VERBS
    used = {phrase.split()[0] for c in CRITERIA for phrase in (*c.shows, *c.opposes)}
    assert used == set(VERBS)


def test_no_rows_cannot_be_made():
    with pytest.raises(ConfigError):
        generate(0, 1)


def test_splits_share_no_author_id_or_text(tmp_path):
    paths = write_splits(tmp_path, (101, 30, 33), seed=1)
    splits = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in paths]
    assert [path.name for path in paths] == ["train.jsonl", "validation.jsonl", "test.jsonl"]
    assert [len(split) for split in splits] == [101, 30, 33]
    for field in ("id", "group", "text"):
        seen = [{row[field] for row in split} for split in splits]
        assert sum(map(len, seen)) == len(set.union(*seen))
    assert len({row["group"] for row in splits[0]}) < 101
    again = tmp_path / "again"
    again.mkdir()
    assert [path.read_bytes() for path in write_splits(again, (101, 30, 33), seed=1)] == [p.read_bytes() for p in paths]


def test_words_and_word_pairs_do_not_solve_it():
    train, unseen = generate(800, 1), generate(600, 2, held_out=True)
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=10, max_iter=1000))
    model.fit([f"{row['criterion']} {row['text']}" for row in train], [row["label"] for row in train])
    guesses = model.predict([f"{row['criterion']} {row['text']}" for row in unseen])
    assert f1_score([row["label"] for row in unseen], guesses, average="macro") <= 0.75
