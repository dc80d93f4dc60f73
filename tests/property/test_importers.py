"""Whatever the script and wherever the spans: what is imported is what the source says, and a study reads it."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dryfit.settings.splits import SplitRule
from dryfit.settings.tables import DataSettings
from dryfit.study.import_formats import (
    ImportedRow,
    LeftOut,
    PassageSettings,
    Record,
    Rejected,
    contractnli_rows,
    drawn,
    fault_of,
    joined,
    passages_of,
    redsm5_rows,
    squad_rows,
    trimmed,
)
from dryfit.study.importing import target_of, write_rows
from dryfit.tasks.rows import load_splits

TEXTS = st.text(max_size=60)  # any script, any plane; half of surrogate pairs are not among them
WORDS = st.text(st.characters(exclude_categories=("Cs", "Zs", "Zl", "Zp", "Cc")), min_size=1, max_size=12)
SENTENCES = st.lists(st.lists(WORDS, min_size=1, max_size=4).map(" ".join), min_size=1, max_size=8)


@st.composite
def texts_and_spans(draw):
    text = draw(TEXTS)
    ends = st.integers(0, len(text))
    return text, [tuple(sorted(span)) for span in draw(st.lists(st.tuples(ends, ends), max_size=12))]


@given(texts_and_spans(), st.integers(1, 80))
def test_no_passage_cuts_a_span_and_none_but_white_space_is_lost(drawn_text, enough) -> None:
    text, spans = drawn_text
    passages = passages_of(text, spans, enough)
    kept = set()
    for begin, end in passages:
        assert text[begin:end] == text[begin:end].strip() != ""
        assert not kept & set(range(begin, end))
        kept |= set(range(begin, end))
    assert not "".join(letter for index, letter in enumerate(text) if index not in kept).strip()
    for span in filter(None, (trimmed(text, span) for span in spans)):
        assert sum(begin <= span[0] and span[1] <= end for begin, end in passages) == 1


@given(texts_and_spans())
def test_joined_spans_hold_what_the_spans_hold_and_lie_apart(drawn_text) -> None:
    text, spans = drawn_text
    spans = [span for span in (trimmed(text, span) for span in spans) if span is not None]
    found = joined(text, spans)
    assert all(text[first[1] : second[0]].strip() for first, second in pairwise(found))
    assert all(any(begin <= start and end <= stop for begin, stop in found) for start, end in spans)
    outside = {index for start, end in found for index in range(start, end)}
    outside -= {index for start, end in spans for index in range(start, end)}
    assert not "".join(text[index] for index in outside).strip()


@given(st.lists(st.text(), unique=True, max_size=20), st.integers(0, 25))
def test_what_is_drawn_does_not_hang_on_the_order(names, count) -> None:
    found = drawn(names, count, str)
    assert len(found) == min(count, len(names)) and found == [name for name in names if name in found]
    assert set(found) == set(drawn(names[::-1], count, str))


@st.composite
def contracts(draw):
    sentences = draw(SENTENCES)
    text, spans = "", []
    for sentence in sentences:
        text += draw(st.sampled_from(["", "\n", " \t"])) if text else ""
        spans.append([len(text), len(text) + len(sentence)])
        text += sentence
    held = draw(st.lists(st.integers(0, len(spans) - 1), unique=True))
    choice = draw(st.sampled_from(["Entailment", "Contradiction"])) if held else "NotMentioned"
    annotations = {"h": {"choice": choice, "spans": held}}
    return {"id": 1, "text": text, "spans": spans, "annotation_sets": [{"annotations": annotations}]}


@given(contracts(), st.integers(1, 40), st.sampled_from([None, 1, 2]))
def test_all_evidence_of_a_contract_is_in_its_rows(contract, enough, negatives) -> None:
    document = {"documents": [contract], "labels": {"h": {"hypothesis": "It is so."}}}
    items = list(contractnli_rows(document, "x.json", PassageSettings(enough, negatives)))
    rows = [item for item in items if isinstance(item, ImportedRow)]
    assert not [item for item in items if isinstance(item, Rejected)]
    assert all(fault_of(row) is None and row.label == bool(row.evidence) for row in rows)
    held = sorted(contract["annotation_sets"][0]["annotations"]["h"]["spans"])
    expected = "".join(contract["text"][slice(*contract["spans"][index])] for index in held)
    found = "".join(row.text[start:end] for row in rows for start, end in row.evidence)
    assert "".join(found.split()) == "".join(expected.split())
    left_out = sum(item.rows for item in items if isinstance(item, LeftOut))
    assert len(rows) + left_out == len(passages_of(contract["text"], contract["spans"], enough))


@given(SENTENCES, st.data())
def test_answers_are_spans_of_their_context_or_a_fault(words, data) -> None:
    context = " ".join(words)
    start = data.draw(st.integers(0, len(context) - 1))
    text = context[start : data.draw(st.integers(start + 1, len(context)))]
    told = data.draw(st.one_of(st.just(start), st.integers(-3, len(context) + 3)))
    question = {"id": "q", "question": "What?", "answers": [{"text": text, "answer_start": told}]}
    (item,) = squad_rows({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [question]}]}]}, "x.json")
    if told >= 0 and context[told : told + len(text)] == text:
        assert isinstance(item, ImportedRow)
        assert [item.text[begin:end] for begin, end in item.evidence] == [text]
    else:
        assert isinstance(item, Rejected)


@given(SENTENCES, st.data())
def test_a_sentence_is_found_in_its_post_whatever_white_space_was_cleaned(sentences, data) -> None:
    gaps = st.sampled_from([" ", "\n\n", "  ", "\u3000"])
    text = data.draw(gaps).join(data.draw(gaps).join(sentence.split()) for sentence in sentences)
    index = data.draw(st.integers(0, len(sentences) - 1))
    values = {"post_id": "p", "sentence_id": "1", "sentence_text": sentences[index], "DSM5_symptom": "S", "status": "1"}
    posts = [Record({"post_id": "p", "text": text}, 2, "posts, line 2")]
    (row,) = redsm5_rows(posts, [Record(values, 2, "notes, line 2")], {"S": "It is."}, None)
    ((start, end),) = row.evidence
    assert row.label == 1 and row.text == text
    assert text[start:end].split() == sentences[index].split()


ROWS = st.lists(
    st.builds(
        ImportedRow,
        id=TEXTS,
        group=TEXTS,
        criterion=TEXTS,
        text=TEXTS,
        label=st.integers(-1, 1),
        evidence=st.just(()),
        place=st.just("x, line 1"),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(ROWS)
def test_a_study_reads_every_row_that_is_written_as_it_is(tmp_path_factory: pytest.TempPathFactory, rows) -> None:
    folder = tmp_path_factory.mktemp("rows")
    good = [
        ImportedRow(f"good {label}", f"good {label}", "c", "t", label, ((0, 1),), "x") for label in (0, 1)
    ]  # each class once in each split
    more = [ImportedRow(f"more {label}", f"more {label}", "c", "t", label, ((0, 1),), "x") for label in (0, 1)]
    write_rows([*good, *rows], target_of(folder / "train.jsonl"), SplitRule(0, 0, 0), lambda _: None)
    write_rows(more, target_of(folder / "validation.jsonl"), SplitRule(0, 0, 0), lambda _: None)
    written = [json.loads(line) for line in (folder / "train.jsonl").read_bytes().decode().split("\n") if line]
    read = load_splits(DataSettings(train=f"{folder}/train.jsonl", validation=f"{folder}/validation.jsonl"))["train"]
    told = [(row.id, row.group, row.criterion, row.text, row.label) for row in read]
    assert told == [(row["id"], row["group"], row["criterion"], row["text"], row["label"]) for row in written]
    fitting = [row for row in rows if fault_of(row) is None]
    assert {row.id for row in fitting} <= {row.id for row in read}
    assert len(read) == 2 + len({row.id for row in fitting} - {"good 0", "good 1"})
