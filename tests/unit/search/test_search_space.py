import json
import time

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dryfit.search.space import Space, apply_params, first_value
from dryfit.settings.errors import ConfigError, LedgerError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import SEARCHABLE, legal_values
from dryfit.settings.tables import TrialSettings


def space(table: dict[str, object]) -> Space:
    return Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": table})))


PER_MODEL = [
    {"choices": [8, 16], "when": {"model.name": "small"}},
    {"choices": [2, 4], "when": {"model.name": "large"}},
]


def test_the_field_decides_the_distribution() -> None:
    made = space(
        {
            "train.epochs": {"low": 1, "high": 5},
            "optim.lr": {"low": 1e-6, "high": 1, "log": True},
            "optim.weight_decay": {"low": 0, "high": 1, "step": 0.25},
            "head.dropout": [0, 0.5],
            "train.precision": ["fp32", "bf16"],
        }
    )
    assert {param.name: param.distribution for param in made.params} == {
        "train.epochs": IntDistribution(1, 5),
        "optim.lr": FloatDistribution(1e-6, 1.0, log=True),
        "optim.weight_decay": FloatDistribution(0.0, 1.0, step=0.25),
        "head.dropout": CategoricalDistribution((0.0, 0.5)),
        "train.precision": CategoricalDistribution(("fp32", "bf16")),
    }


def test_conditions_come_first_and_cases_get_internal_names() -> None:
    made = space({"train.batch_size": PER_MODEL, "model.name": ["small", "large", "other"]})
    assert [param.internal for param in made.params] == ["model.name", "train.batch_size#0", "train.batch_size#1"]
    assert made.names == ("model.name", "train.batch_size")
    large = made.active("train.batch_size", {"model.name": "large"})
    assert large is not None and large.distribution == CategoricalDistribution((2, 4))
    assert made.active("train.batch_size", {"model.name": "other"}) is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"optim.learning_rate": [1e-3]}, ["optim.learning_rate", "no key"]),
        ({"optim.weight_deacy": [0.1]}, ["did you mean optim.weight_decay?"]),
        ({"lr": [1e-3]}, ["did you mean optim.lr?"]),
        ({"execution.micro_batch": [1]}, ["planned, never searched"]),
        ({"data.train": ["a"]}, ["same rows"]),
        ({"study.seed": [1]}, ["cannot be searched"]),
        ({"train.epochs": [0, 1]}, ["train.epochs = 0", "from 1 to"]),
        ({"train.epochs": {"low": 1.0, "high": 3}}, ["not all are integers", "write 8, not 8.0"]),
        ({"train.epochs": {"low": 1, "high": 2000}}, ["train.epochs = 2000", "to 1000"]),
        ({"train.epochs": [True]}, ["train.epochs = true"]),
        ({"optim.lr": {"low": 0, "high": 1}}, ["optim.lr = 0.0", "above 0"]),
        ({"optim.name": {"low": 0, "high": 1}}, ["no number", "adamw"]),
        ({"optim.name": ["adam"]}, ['optim.name = "adam"', "adamw, adafactor, sgd"]),
        ({"train.precision": ["fp8"]}, ["fp32, fp16, bf16"]),
        ({"head.dropout": [0, 0.0]}, ["repeat 0.0"]),
        ({"optim.weight_decay": {"low": 0, "high": 0.5, "step": 0.2}}, ["0.4 or 0.6"]),
        ({"train.epochs": {"low": 1, "high": 4, "step": 2}}, ["high 3 or 5"]),
        ({"train.epochs": {"choices": [1], "when": {"optim.lr": 0.1}}}, ["optim.lr, which is not searched"]),
        ({"train.epochs": {"choices": [1], "when": {"optim.name": "sgd"}}, "optim.name": ["adamw"]}, ["never has"]),
        ({"train.epochs": {"choices": [1], "when": {"optim.name": "s"}}, "optim.name": ["adamw"]}, ["when optim.name"]),
        ({"train.epochs": {"choices": [1], "when": {"train.epochs": 1}}}, ["train.epochs -> train.epochs"]),
    ],
)
def test_what_is_wrong_is_refused_in_words(table: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        space(table)
    for word in words:
        assert word in str(caught.value)


def test_a_circle_is_named() -> None:
    table = {
        "train.epochs": {"choices": [1], "when": {"head.layers": 1}},
        "head.layers": {"choices": [1], "when": {"head.hidden": 8}},
        "head.hidden": {"choices": [8], "when": {"train.epochs": 1}},
    }
    with pytest.raises(ConfigError, match=r"train\.epochs -> head\.layers -> head\.hidden -> train\.epochs"):
        space(table)


def test_overlapping_cases_are_refused() -> None:
    both = [{"choices": [8], "when": {"model.name": ["a", "b"]}}, {"choices": [4], "when": {"model.name": "b"}}]
    with pytest.raises(ConfigError, match="two cases can apply at once"):
        space({"model.name": ["a", "b"], "train.batch_size": both})
    with pytest.raises(ConfigError, match="two cases can apply at once"):
        space({"model.name": ["a", "b"], "train.batch_size": [{"choices": [8]}, both[1]]})


def test_disjointness_through_other_conditions_is_seen() -> None:
    # layers exists for sgd only, so "layers is 1" and "adamw" exclude each other.
    table = {
        "optim.name": ["adamw", "sgd"],
        "head.layers": {"choices": [0, 1], "when": {"optim.name": "sgd"}},
        "train.batch_size": [
            {"choices": [8], "when": {"optim.name": "adamw"}},
            {"choices": [4], "when": {"head.layers": 1}},
        ],
    }
    assert len(space(table).params) == 4
    table["train.epochs"] = {"choices": [1], "when": {"optim.name": "adamw", "head.layers": 1}}
    with pytest.raises(ConfigError, match="can never apply"):
        space(table)


def test_json_gives_the_same_space_back() -> None:
    made = space(
        {"train.batch_size": PER_MODEL, "model.name": ["small", "large"], "optim.lr": {"low": 1e-6, "high": 1}}
    )
    again = Space.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    assert again.groups == made.groups
    assert made.to_json() != space({"model.name": ["small"]}).to_json()
    with pytest.raises(LedgerError):
        Space.from_json('[{"internal": 1}]')


def test_every_searchable_key_can_be_put_and_has_a_range() -> None:
    base = TrialSettings()
    assert apply_params(base, {}) == base
    for key in SEARCHABLE:
        assert legal_values(key.split("."))
    changed = apply_params(base, {"optim.lr": 1, "train.precision": "bf16", "regularization.dropout": 0.25})
    assert (changed.optim.lr, changed.train.precision, changed.regularization.dropout) == (1.0, "bf16", 0.25)


def test_pairs_honour_conditions() -> None:
    base = TrialSettings()
    made = space(
        {
            "model.name": ["a", "b"],
            "train.max_length": [
                {"choices": [64, 128], "when": {"model.name": "a"}},
                {"low": 256, "high": 512, "step": 256, "when": {"model.name": "b"}},
            ],
            "optim.lr": {"low": 1e-5, "high": 1e-3},
        }
    )
    pairs = [(model.name, length) for model, length in made.model_length_pairs(base)]
    assert sorted(pairs) == [("a", 64), ("a", 128), ("b", 256), ("b", 512)]


def test_pairs_fall_back_to_the_base() -> None:
    base = TrialSettings()
    own = [(base.model, base.train.max_length)]
    assert space({"optim.lr": {"low": 1e-5, "high": 1e-3}}).model_length_pairs(base) == own
    assert space({"train.max_length": {"low": 8, "high": 512}}).model_length_pairs(base) == own
    conditional = {"choices": [8], "when": {"optim.lr": 1e-5}}
    two = space({"optim.lr": {"low": 1e-5, "high": 1e-3}, "train.max_length": conditional}).model_length_pairs(base)
    assert [length for _, length in two] == [8, base.train.max_length]


def test_points_are_all_combinations_that_can_be_drawn() -> None:
    cases = [
        {"choices": [4, 8], "when": {"optim.name": "sgd"}},
        {"choices": [8, 16], "when": {"optim.name": "adamw"}},
    ]
    made = space(
        {
            "optim.name": {"choices": ["sgd", "adamw"]},
            "train.batch_size": cases,
            "optim.beta2": {"low": 0.9, "high": 0.99, "when": {"optim.name": "adamw"}},
            "train.max_length": {"low": 64, "high": 512},
        }
    )
    assert made.combinations(["train.batch_size"], 9) == [
        {"train.batch_size": 4},
        {"train.batch_size": 8},
        {"train.batch_size": 16},
    ]
    both = made.combinations(["optim.name", "optim.beta2"], 9)
    assert both == [
        {"optim.name": "sgd"},
        {"optim.name": "adamw", "optim.beta2": 0.9},
        {"optim.name": "adamw", "optim.beta2": 0.99},
    ]
    assert made.combinations(["train.max_length"], 9) == [{"train.max_length": 64}, {"train.max_length": 512}]
    assert made.combinations([], 9) == [{}]
    assert made.combinations(["train.max_length", "train.batch_size"], 5) is None
    assert [first_value(made.cases(name)[0]) for name in ("optim.name", "train.max_length")] == ["sgd", 64]


def test_rows_are_prepared_with_the_most_that_windows_may_share() -> None:
    """The base's own stride may be too large for a length that only smaller ones are searched with."""
    base = TrialSettings()
    cases: tuple[object, ...] = ([3, 12, 6], {"low": 4, "high": 40})
    assert [space({"span.doc_stride": case}).as_prepared(base).span.doc_stride for case in cases] == [12, 40]
    assert space({"optim.lr": [1e-4, 1e-3]}).as_prepared(base) == base


def test_rows_are_prepared_with_the_largest_stride_of_the_shortest_windows() -> None:
    base = TrialSettings()
    lengths = {"train.max_length": [256, 128, 512]}
    strides = {
        "span.doc_stride": [
            {"choices": [16, 32], "when": {"train.max_length": 128}},
            {"choices": [64, 128], "when": {"train.max_length": [256, 512]}},
        ]
    }
    found = space({**lengths, **strides}).as_prepared(base)
    assert found == apply_params(base, {"span.doc_stride": 32})
    assert space({**lengths, "span.doc_stride": [16, 100]}).as_prepared(base).span.doc_stride == 100


def parities(bits: int) -> dict[str, object]:
    """A space in which the parity of some keys is computed in two orders, and a condition asks for both to differ."""
    made: dict[str, object] = {f"own.x{index}": [False, True] for index in range(bits)}
    for name, order in (("p", range(bits)), ("q", reversed(range(bits)))):
        first, *others = order
        before = f"own.x{first}"
        for index in others:
            made[f"own.{name}{index}"] = [
                {"choices": [one != other], "when": {before: one, f"own.x{index}": other}}
                for one in (False, True)
                for other in (False, True)
            ]
            before = f"own.{name}{index}"
        made[f"own.{name}"] = [{"choices": [value], "when": {before: value}} for value in (False, True)]
    return made | {"own.z": [{"choices": [1], "when": {"own.p": True, "own.q": False}}]}


@pytest.mark.parametrize(("bits", "words"), [(4, "can never apply"), (24, "more than 100000 combinations")])
def test_the_search_for_conditions_that_can_hold_has_an_end(bits: int, words: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        space(parities(bits))
    assert time.monotonic() - began_s < 60, "a hundred times what it takes"


def test_a_condition_on_hundreds_of_keys_is_followed_to_its_end() -> None:
    many = {f"own.x{index}": [0, 1] for index in range(900)}
    made = space({**many, "own.z": [{"choices": [1], "when": dict.fromkeys(many, 1)}]})
    assert len(made.params) == 901
