"""What a change of a study file means: by what can be drawn, in words that name the change."""

from typing import Any

import pytest

from changing import config, own_function, space_of
from dryfit.ledger.events import ComparabilityKey, Compatibility
from dryfit.search.changes import PossibleTrials, comparability_key, compare
from dryfit.search.space import Space
from dryfit.settings.study_file import StudyConfig

SAME, EXTENDS, FORKS = Compatibility


def basis(study: StudyConfig, data: str = "rows", folder: Any = "/here") -> ComparabilityKey:
    return comparability_key(study, Space.from_config(study), data=data, folder=folder)


def searched(space: dict[str, Any], **tables: dict[str, Any]) -> ComparabilityKey:
    return basis(config(space=space, **tables))


def called(space: dict[str, Any], **tables: dict[str, Any]) -> ComparabilityKey:
    return basis(own_function(space, **tables))


@pytest.mark.parametrize(
    ("before", "after", "verdict", "words"),
    [
        ([8, 16], [8, 16], SAME, ""),
        ([8, 16], [16, 8], SAME, ""),
        ([8, 16], [8, 16, 32], EXTENDS, "train.batch_size: [8, 16] became [8, 16, 32]"),
        ([8, 16], [8], FORKS, "became [8]"),
        ([8, 16], [8, 32], FORKS, "became [8, 32]"),
        ({"low": 8, "high": 16}, {"low": 4, "high": 16}, EXTENDS, "8 to 16 became 4 to 16"),
        ({"low": 8, "high": 16}, {"low": 9, "high": 16}, FORKS, "9 to 16"),
        ({"low": 8, "high": 16}, {"low": 8, "high": 16, "log": True}, SAME, "the same values, drawn in another way"),
        ({"low": 8, "high": 16}, {"low": 8, "high": 16, "step": 4}, FORKS, "step 4"),
        ({"low": 8, "high": 16, "step": 4}, {"low": 8, "high": 16, "step": 2}, EXTENDS, "step 2"),
        ({"low": 8, "high": 16, "step": 4}, {"low": 4, "high": 16, "step": 2}, EXTENDS, "step 2"),
        ({"low": 8, "high": 16, "step": 4}, {"low": 7, "high": 17, "step": 2}, FORKS, "step 2"),
        ([8, 16], {"low": 8, "high": 16}, FORKS, "one of [8, 16] became integers from 8 to 16"),
    ],
)
def test_one_key(before: object, after: object, verdict: Compatibility, words: str) -> None:
    change = compare(searched({"train.batch_size": before}), searched({"train.batch_size": after}))
    assert change.verdict is verdict
    assert change.comparable
    assert words in " ".join(change.reasons)
    assert bool(words) == bool(change.reasons)


def test_a_number_is_no_integer() -> None:
    change = compare(called({"x": {"low": 1, "high": 4}}), called({"x": {"low": 1.0, "high": 4.0}}))
    assert change.verdict is FORKS
    assert change.reasons == ("x: integers from 1 to 4 became numbers from 1 to 4",)
    floats = [{"low": 0.0, "high": 1.0, "step": step} for step in (0.2, 0.1, 0.3)]
    assert compare(called({"x": floats[0]}), called({"x": floats[1]})).verdict is EXTENDS
    assert compare(called({"x": floats[1]}), called({"x": floats[0]})).verdict is FORKS
    assert compare(called({"x": {"low": 0.0, "high": 1.0}}), called({"x": floats[0]})).verdict is FORKS
    assert compare(called({"x": floats[0]}), called({"x": {"low": 0.0, "high": 1.0}})).verdict is EXTENDS


def test_a_key_that_is_not_searched_is_the_files_own_value() -> None:
    without, decay = {"optim.lr": [0.1, 0.2]}, {"optim.weight_decay": {"low": 0.0, "high": 0.1}}
    fixed, both = searched(without, optim={"weight_decay": 0.01}), searched(without | decay)
    assert compare(fixed, both) == compare(fixed, both)
    assert compare(fixed, both).verdict is EXTENDS
    assert compare(fixed, both).reasons == ("optim.weight_decay is searched now, it was 0.01",)
    back = compare(both, fixed)
    assert (back.verdict, back.reasons) == (FORKS, ("optim.weight_decay is no longer searched, it is 0.01 now",))
    outside = searched(without, optim={"weight_decay": 0.5})
    assert compare(outside, both).verdict is FORKS
    assert compare(fixed, outside).reasons == ("optim.weight_decay was 0.01, is now 0.5",)
    assert compare(both, searched(without | decay, optim={"weight_decay": 0.5})).verdict is SAME, "it is always drawn"
    assert compare(fixed, searched(without, train={"epochs": 5})).verdict is FORKS
    assert compare(fixed, searched(without, model={"trust_remote_code": True})).verdict is SAME


def test_of_a_function_nobody_knows_what_a_new_parameter_was() -> None:
    one, two = called({"x": [1, 2]}), called({"x": [1, 2], "y": [3]})
    for old, new, said in ((one, two, "y is searched now"), (two, one, "y is no longer searched")):
        assert (compare(old, new).verdict, compare(old, new).reasons) == (FORKS, (said,))


def test_a_key_that_nothing_reads_does_not_matter() -> None:
    space: dict[str, Any] = {"loss.name": ["cross_entropy", "focal"]}
    gamma = {"loss.gamma": {"low": 1.0, "high": 3.0, "when": {"loss.name": "focal"}}}
    plain, searches = searched(space), searched(space | gamma)
    assert compare(plain, searches).verdict is EXTENDS, "2.0 is the default"
    wide = searched(space | {"loss.gamma": gamma["loss.gamma"] | {"high": 4.0}}, loss={"gamma": 9.0})
    assert compare(searches, wide).verdict is EXTENDS, "cross-entropy has no gamma, whatever the file says"
    narrow = compare(wide, searches)
    assert narrow.verdict is FORKS
    assert narrow.reasons == ('loss.gamma (when loss.name = "focal"): 1 to 4 became 1 to 3',)


def test_cases_and_conditions() -> None:
    small = {"choices": [32, 64], "when": {"model.name": "small"}}
    large = {"choices": [8], "when": {"model.name": "large"}}
    models = {"model.name": ["small", "large"]}
    both = searched(models | {"train.batch_size": [small, large]})
    lost = searched(models | {"train.batch_size": [small]}, train={"batch_size": 4})
    change = compare(both, lost)
    assert (change.verdict, change.reasons) == (FORKS, ('train.batch_size lost its case for model.name = "large"',))
    change = compare(searched(models | {"train.batch_size": [small]}, train={"batch_size": 8}), both)
    assert change.verdict is SAME, "the large one had 8 anyway"
    change = compare(lost, both)
    assert (change.verdict, change.reasons) == (
        FORKS,
        ('train.batch_size has a new case for model.name = "large"',),
    )
    renumbered = searched(models | {"train.batch_size": [large, small]})
    assert compare(both, renumbered).verdict is SAME
    always = searched(models | {"train.batch_size": [8, 32, 64]})
    change = compare(both, always)
    assert change.verdict is EXTENDS
    under = searched(
        {"model.name": ["small", "large"], "train.batch_size": {"choices": [8, 16], "when": {"model.name": "small"}}}
    )
    other = searched(
        {"model.name": ["small", "large"], "train.batch_size": {"choices": [8, 16], "when": {"model.name": "large"}}}
    )
    assert compare(under, other).reasons == (
        'train.batch_size is searched where model.name = "large", it was where model.name = "small"',
    )


def test_a_lost_model_takes_its_case_with_it() -> None:
    nine, seven = basis(config()), basis(config(space=space_of(7)))
    change = compare(nine, seven)
    assert change.verdict is FORKS
    assert [reason.partition(":")[0] for reason in change.reasons] == ["model.name"]
    back = compare(seven, nine)
    assert (back.verdict, len(back.reasons)) == (EXTENDS, 1)


@pytest.mark.parametrize(
    ("tables", "data", "said"),
    [
        (
            {"study": {"metric": "accuracy"}},
            "rows",
            "the study's goal was to maximize f1_macro, is now to maximize accuracy",
        ),
        ({"study": {"direction": "minimize"}}, "rows", "was to maximize f1_macro, is now to minimize f1_macro"),
        ({"study": {"also": ["loss"]}}, "rows", "is now to maximize f1_macro, minimize loss"),
        ({}, "others", "the data has changed: fingerprint others, it was rows"),
    ],
)
def test_what_makes_values_incomparable(tables: dict[str, Any], data: str, said: str) -> None:
    change = compare(basis(config()), basis(config(**tables), data))
    assert (change.verdict, change.comparable) == (FORKS, False)
    assert len(change.reasons) == 1 and said in change.reasons[0]


def test_a_goal_that_was_a_default_earlier_is_not_mistaken_for_todays() -> None:
    """Of share and joint the default was f1_macro once: the ledger has the goal itself."""
    today = config(study={"task": "share"})
    earlier = config(study={"task": "share", "metric": "f1_macro"})
    change = compare(basis(earlier), basis(today))
    assert (change.verdict, change.comparable) == (FORKS, False)
    assert change.reasons == ("the study's goal was to maximize f1_macro, is now to maximize combined",)
    assert compare(basis(earlier), basis(earlier)).verdict is SAME


def test_another_task_and_another_function() -> None:
    change = compare(basis(config()), called({"x": [1]}))
    assert (change.verdict, change.comparable) == (FORKS, False)
    assert change.reasons[0] == "study.task was criteria, is now objective"
    one = called({"x": [1]})
    for table, said in (({"function": "mine:g"}, "is now mine:g, version 1"), ({"version": 2}, "mine:f, version 2")):
        change = compare(one, called({"x": [1]}, objective=table))
        assert (change.verdict, change.comparable) == (FORKS, False)
        assert said in change.reasons[0]


def test_what_is_not_learned_may_change() -> None:
    tables = {"study": {"seed": 9, "name": "other"}, "search": {"pruner": "median"}, "runtime": {"parallel": 4}}
    change = compare(basis(config("tpe")), basis(config("random", trials=99, **tables)))
    assert (change.verdict, change.reasons) == (SAME, ())


def test_paths_move_with_the_folder() -> None:
    models = ["/here/small", "/here/large", "/elsewhere"]
    old = searched({"model.name": models})
    there = [name.replace("/here/", "/there/") for name in models]
    new = basis(config(space={"model.name": there}), folder="/there")
    assert compare(old, new).verdict is SAME
    assert compare(old, basis(config(space={"model.name": there}))).verdict is FORKS
    assert (
        compare(
            searched({}, model={"name": "/here/a"}),
            basis(config(space={}, model={"name": "/there/a"}), folder="/there"),
        ).verdict
        is SAME
    )


def test_an_older_ledger_without_the_files_own_values() -> None:
    change = compare(basis(config()).model_copy(update={"own": None}), basis(config()))
    assert (change.verdict, change.comparable) == (FORKS, False)
    assert "nobody wrote down" in change.reasons[0]


def test_which_trials_are_trials_of_another_basis() -> None:
    space: dict[str, Any] = {
        "model.name": ["a", "b"],
        "train.batch_size": [
            {"choices": [8, 16], "when": {"model.name": "a"}},
            {"choices": [16, 32], "when": {"model.name": "b"}},
        ],
    }
    possible = PossibleTrials(searched(space, train={"epochs": 3}))
    own = {"train.epochs": 3, "train.batch_size": 8}

    def fits(params: dict[str, Any], own: dict[str, Any]) -> bool:
        return possible.allows(params, {**possible.own, **own})

    assert fits({"model.name": "a", "train.batch_size": 16}, own)
    assert fits({"model.name": "a"}, own), "it had 8, the file's own"
    assert not fits({"model.name": "b"}, own), "b never has 8"
    assert not fits({"model.name": "c", "train.batch_size": 16}, own)
    assert not fits({"model.name": "a"}, own | {"train.epochs": 2})
    assert not fits({"model.name": "a", "optim.lr": 0.5}, own)
    assert fits({"model.name": "a", "optim.lr": possible.own["optim.lr"]}, own)
    assert possible.searched_values({"model.name": "a"}, {**own, "train.epochs": 2}) == {
        "model.name": "a",
        "train.batch_size": 8,
    }


def test_other_folds_are_other_values() -> None:
    """A mean over other parts of the rows; of a study without folds, their seed is none."""
    study = config()

    def of(**data: int) -> ComparabilityKey:
        return basis(study.model_copy(update={"data": study.data.model_copy(update=data)}))

    once, five = of(), of(folds=5)
    for old, new, said in (
        (once, five, "data.folds was 1, is now 5"),
        (five, once, "data.folds was 5, is now 1"),
        (once, of(folds=5, split_seed=3), "data.folds was 1, is now 5"),
        (five, of(folds=5, split_seed=3), "data.split_seed was 0, is now 3"),
    ):
        change = compare(old, new)
        assert (change.verdict, change.comparable, change.reasons) == (FORKS, False, (said,))
        assert not PossibleTrials(new).allows({}, old.own or {})
    assert compare(once, of(split_seed=3)).verdict is SAME
    before = once.model_copy(update={"own": {k: v for k, v in (once.own or {}).items() if not k.startswith("data.")}})
    assert compare(before, once).verdict is SAME, "an older dryfit had no folds"
    assert compare(before, five).verdict is FORKS
