import json

from dryfit.settings.study_file import Case, StudyConfig
from dryfit.settings.study_file_text import (
    CASE_KEYS,
    SEARCHABLE,
    TABLES,
    key_description,
    legal_values,
    study_json_schema,
)


def test_the_schema_names_every_key_with_a_description():
    schema = json.loads(json.dumps(study_json_schema()))
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["title"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(StudyConfig.model_fields)
    for table, keys in TABLES.items():
        assert key_description((table,))
        assert "``" not in key_description((table,))
        for key in keys:
            assert key_description((table, key)), f"{table}.{key} has no description"
    assert len(schema["properties"]["space"]["additionalProperties"]["anyOf"]) == 3


def test_every_reference_has_a_target():
    schema = study_json_schema()

    def references(node):
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(schema))
    assert found
    assert all(reference.removeprefix("#/$defs/") in schema["$defs"] for reference in found)


def test_arrays_and_unions_have_json_schemas_own_constraints():
    text = json.dumps(study_json_schema())
    assert '"gt"' not in text
    step = study_json_schema()["$defs"]["Case"]["properties"]["step"]
    assert step["anyOf"][0]["exclusiveMinimum"] == 0


def test_legal_values_in_words():
    assert legal_values(("train", "epochs")) == "an integer from 1 to 1000"
    assert legal_values(("optim", "lr")) == "a number above 0, at most 10"
    assert legal_values(("execution", "device")) == "one of auto, cpu, cuda"
    assert legal_values(("study", "direction")) == "one of maximize, minimize"
    assert legal_values(("space", "optim.lr", "log")) == "true or false"


def test_every_key_has_words_and_every_case_key_too():
    assert set(CASE_KEYS) == set(Case.model_fields)
    for table, keys in TABLES.items():
        for key in keys:
            assert legal_values((table, key)) not in ("", "a table of keys")
    for key in CASE_KEYS:
        assert legal_values(("space", "optim.lr", key))
    assert "optim.lr" in SEARCHABLE
    assert not any(key.startswith(("study.", "data.", "runtime.")) for key in SEARCHABLE)
