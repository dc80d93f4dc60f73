from dryfit.study.import_formats import ImportedRow, PassageSettings, contractnli_rows, fault_of
from import_files import contract, contractnli

ALL = PassageSettings(passage_chars=60, negatives=None)
"""Passages: the first two sentences (90 characters), the next two (91), the last one."""


def rows_of(*contracts, cutting=ALL, document=None):
    document = contractnli(*contracts) if document is None else document
    return list(contractnli_rows(document, "dev.json", cutting))


def test_half_of_a_surrogate_pair_is_a_fault_of_its_rows_and_stops_nothing() -> None:
    items = rows_of(contract(1) | {"id": "a\ud800"}, contract(2), cutting=PassageSettings(60, negatives=1))
    faults = [fault_of(item) for item in items if isinstance(item, ImportedRow) and item.group != "2"]
    assert faults and all("surrogate" in (fault or "") for fault in faults)
