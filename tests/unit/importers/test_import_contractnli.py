from dryfit.study.import_formats import ImportedRow, LeftOut, PassageSettings, contractnli_rows, fault_of, passages_of
from import_files import HYPOTHESES, contract, contractnli

ALL = PassageSettings(passage_chars=60, negatives=None)
"""Passages: the first two sentences (90 characters), the next two (91), the last one."""


def rows_of(*contracts, cutting=ALL, document=None):
    document = contractnli(*contracts) if document is None else document
    return list(contractnli_rows(document, "dev.json", cutting))


def test_evidence_that_nothing_but_white_space_parts_is_one_span() -> None:
    both = contract(
        1, {"nda-1": ("Contradiction", [3, 2]), "nda-2": ("Entailment", [4, 0]), "nda-3": ("NotMentioned", [])}
    )
    told = {row.id: row for row in rows_of(both)}
    assert told["1:nda-1:1"].evidence == ((0, 91),)
    assert told["1:nda-1:1"].place == "dev.json, documents[0], nda-1, passage 1"
    assert [told[f"1:nda-2:{index}"].evidence for index in range(3)] == [((0, 24),), (), ((0, 36),)]


def test_as_many_without_evidence_as_with_it_and_at_least_one() -> None:
    items = rows_of(contract(1), contract(2), cutting=PassageSettings(60, negatives=1))
    rows = [item for item in items if isinstance(item, ImportedRow)]
    for key in HYPOTHESES:
        for number in (1, 2):
            labels = [row.label for row in rows if row.id.startswith(f"{number}:{key}:")]
            assert labels.count(0) == 1 and labels.count(1) == (key != "nda-3")
    everything = rows_of(contract(1), contract(2))
    assert sum(item.rows for item in items if isinstance(item, LeftOut)) == len(everything) - len(rows) == 8
    assert items == rows_of(contract(1), contract(2), cutting=PassageSettings(60, negatives=1))


def test_a_passage_ends_at_the_first_span_from_which_it_is_long_enough() -> None:
    text = "aaaa bbbb cccc dddd"
    spans = [(0, 4), (5, 9), (10, 14), (15, 19)]
    assert passages_of(text, spans, 1) == spans
    assert passages_of(text, spans, 5) == spans  # the white space before a span is of the passage before
    assert passages_of(text, spans, 6) == [(0, 9), (10, 19)]
    assert passages_of(text, spans, 900) == [(0, 19)]
    assert passages_of(text, [(0, 4), (2, 12), (15, 19)], 1) == [(0, 14), (15, 19)]  # no cut inside of a span
    assert passages_of("  text around spans  ", [(7, 13)], 5) == [(2, 6), (7, 19)]
    assert passages_of(" \n ", [], 5) == []


def test_half_of_a_surrogate_pair_is_a_fault_of_its_rows_and_stops_nothing() -> None:
    items = rows_of(contract(1) | {"id": "a\ud800"}, contract(2), cutting=PassageSettings(60, negatives=1))
    faults = [fault_of(item) for item in items if isinstance(item, ImportedRow) and item.group != "2"]
    assert faults and all("surrogate" in (fault or "") for fault in faults)
