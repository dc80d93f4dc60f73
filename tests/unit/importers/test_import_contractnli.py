import pytest

from dryfit.settings.errors import DataError
from dryfit.study.import_files import ImportedRow, LeftOut, Rejected, fault_of
from dryfit.study.import_formats import PassageSettings, contractnli_rows, passages_of
from import_files import HYPOTHESES, SENTENCES, contract, contractnli

ALL = PassageSettings(passage_chars=60, negatives=None)
"""Passages: the first two sentences (90 characters), the next two (91), the last one."""


def rows_of(*contracts, cutting=ALL, document=None):
    document = contractnli(*contracts) if document is None else document
    return list(contractnli_rows(document, "dev.json", cutting))


def one_fault(*contracts, document=None) -> Rejected:
    (fault,) = [item for item in rows_of(*contracts, document=document) if isinstance(item, Rejected)]
    return fault


def test_a_row_for_each_hypothesis_and_passage_with_its_evidence() -> None:
    items = rows_of(contract(7))
    assert all(isinstance(item, ImportedRow) for item in items)
    told = {item.id: (item.label, [item.text[start:end] for start, end in item.evidence]) for item in items}
    assert told == {
        "7:nda-1:0": (0, []),
        "7:nda-1:1": (1, [SENTENCES[3]]),
        "7:nda-1:2": (0, []),
        "7:nda-2:0": (0, []),
        "7:nda-2:1": (1, [SENTENCES[2]]),
        "7:nda-2:2": (0, []),
        "7:nda-3:0": (0, []),
        "7:nda-3:1": (0, []),
        "7:nda-3:2": (0, []),
    }
    assert {item.group for item in items} == {"7"}
    assert {item.criterion for item in items} == set(HYPOTHESES.values())
    assert items[0].text == "\n".join(SENTENCES[:2])
    assert items[0].place == "dev.json, documents[0], nda-1, passage 0"


def test_evidence_that_nothing_but_white_space_parts_is_one_span() -> None:
    both = contract(
        1, {"nda-1": ("Contradiction", [3, 2]), "nda-2": ("Entailment", [4, 0]), "nda-3": ("NotMentioned", [])}
    )
    told = {row.id: row for row in rows_of(both)}
    assert told["1:nda-1:1"].evidence == ((0, 91),)
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


def changed(**values):
    return contract(1) | values


def annotated(choice, spans):
    return contract(1, {"nda-1": (choice, spans), "nda-2": ("NotMentioned", []), "nda-3": ("NotMentioned", [])})


def test_what_does_not_fit_is_told_with_its_path_and_the_rest_is_kept(golden):
    cases = [
        changed(text=None),
        changed(spans=[[0, 5], [3]]),
        changed(spans=[[0, 10_000]]),
        changed(id=1.5),
        changed(annotation_sets=[]),
        annotated("Entailment", []),
        annotated("NotMentioned", [1]),
        annotated("Entailment", [5]),
        annotated("Entailment", ["1"]),
        annotated("Maybe", [1]),
    ]
    faults = [one_fault(bad, contract(2)) for bad in cases]
    golden("import", [(fault.place, fault.reason) for fault in faults])
    for bad in cases:
        good = [item.group for item in rows_of(bad, contract(2)) if isinstance(item, ImportedRow)]
        assert good.count("2") == 9


def test_an_annotation_that_is_rejected_gives_no_row_with_label_0() -> None:
    rows = [item for item in rows_of(annotated("Entailment", [])) if isinstance(item, ImportedRow)]
    assert {row.id.split(":")[1] for row in rows} == {"nda-2", "nda-3"}


def test_a_contract_twice_and_a_second_set_of_annotations() -> None:
    fault = one_fault(contract(1), contract(1))
    assert fault == Rejected("dev.json, documents[1]", "id '1' is there already: dev.json, documents[0]")
    second = contract(1)
    second["annotation_sets"] *= 2
    assert one_fault(second).place == "dev.json, documents[0].annotation_sets[1]"


def test_half_of_a_surrogate_pair_is_a_fault_of_its_rows_and_stops_nothing() -> None:
    items = rows_of(contract(1) | {"id": "a\ud800"}, contract(2), cutting=PassageSettings(60, negatives=1))
    faults = [fault_of(item) for item in items if isinstance(item, ImportedRow) and item.group != "2"]
    assert faults and all("surrogate" in (fault or "") for fault in faults)


def test_hypotheses_and_annotations_that_do_not_meet() -> None:
    document = contractnli(contract(1))
    document["labels"]["nda-4"] = {"hypothesis": "More."}
    assert one_fault(document=document).place.endswith("annotations.nda-4")
    del document["labels"]["nda-4"], document["labels"]["nda-3"]
    assert one_fault(document=document).reason == "labels has no such hypothesis"


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ([], "of type list"),
        ({}, "without keys"),
        ({"documents": []}, "its keys are documents"),
        ({"documents": {}, "labels": {}}, "its keys are documents, labels"),
    ],
)
def test_another_document_is_refused(document, found) -> None:
    with pytest.raises(DataError, match=found):
        rows_of(document=document)


def test_squad_is_recognised() -> None:
    with pytest.raises(DataError, match="import squad"):
        rows_of(document={"version": "v2.0", "data": []})
