import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_checks import cross_problems
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.study_file_text import SEARCHABLE, dump_toml

# A study file has no NUL character: it is refused where it is read.
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
)
choices = st.one_of(
    st.booleans(), st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False), texts
)
conditions = st.dictionaries(st.sampled_from(SEARCHABLE), st.one_of(choices, st.lists(choices, max_size=3)), max_size=2)


@st.composite
def cases(draw):
    if draw(st.booleans()):
        items = draw(st.lists(choices, min_size=1, max_size=3, unique_by=lambda choice: (type(choice), choice)))
        case = {"choices": items}
    else:
        low, high = sorted(draw(st.lists(st.one_of(st.integers(1, 99), st.floats(0.1, 99)), min_size=2, max_size=2)))
        case = {"low": low, "high": high, "log": draw(st.booleans())}
    return case | ({"when": draw(conditions)} if draw(st.booleans()) else {})


configs = st.fixed_dictionaries(
    {
        "data": st.fixed_dictionaries(
            {
                "train": st.just("/rows/train.csv"),
                "validation": texts.map(lambda name: f"/rows/v{name.replace('/', '')}x"),
            },
            optional={"test": st.just("hub:a/b:test"), "text": texts, "train_limit": st.integers(1, 10**6)},
        ),
    },
    optional={
        "study": st.fixed_dictionaries(
            {}, optional={"max_hours": st.floats(1e-9, 1e9), "trials": st.integers(1, 10**6)}
        ),
        "optim": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-30, 10),
                "name": st.sampled_from(["adamw", "sgd"]),
                "weight_decay": st.just(0),
            },
        ),
        "model": st.fixed_dictionaries({}, optional={"revision": texts, "trust_remote_code": st.booleans()}),
        "space": st.dictionaries(
            st.sampled_from([key for key in SEARCHABLE if key != "model.name"]),
            st.one_of(cases(), st.lists(cases(), min_size=1, max_size=2)),
            max_size=3,
        ),
    },
)


def canonical(config):
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


@given(configs)
def test_a_dumped_config_loads_as_itself(document):
    config = StudyConfig.model_validate_json(json.dumps(document))
    if cross_problems(config) or any("model.name" in (case.when or {}) for c in config.space.values() for case in c):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "frozen.toml")
        path.write_bytes(dump_toml(config).encode())
        loaded = load_study_file(path).config
    assert loaded == config
    assert canonical(loaded) == canonical(config)
