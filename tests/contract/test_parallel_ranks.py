"""Cut models on real processes with gloo: equal to the whole, alike where they must be, clear where they are not."""

from typing import Any

import pytest

import rank_processes

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks found: all cases in one start, which takes longer than they do."""
    return rank_processes.run(2, tmp_path_factory.mktemp("ranks"))


def test_slices_from_a_folder_train_as_the_whole_and_are_saved_whole(two: Found):
    found = [rank["equality"] for rank in two]
    for rank in found:
        for kind, off in rank.items():
            assert off["logits"] < 1e-10, kind
            assert off["gradients"] < 1e-8, kind
            assert off["parameters"] < 1e-8, kind
    for kind, off in found[0].items():
        assert off["names"]
        assert off["saved"] == 0.0, kind  # the gathered checkpoint is the one that was saved, bit for bit
    assert [sorted(rank) for rank in found] == [["bert", "gpt2", "llama"]] * len(found)


@pytest.mark.parametrize("way", ["plain", "non-reentrant", "reentrant"])
def test_with_dropout_all_ranks_give_what_they_all_hold_the_same_gradients(two: Found, way: str):
    for rank in two:
        assert rank["dropout"][way]
        assert rank["dropout"][f"{way}: generator"]
        assert rank["dropout"].get(f"{way}: as plain", 0.0) < 1e-12  # recomputing drops the same


def test_ranks_drop_the_same_of_what_all_hold_and_other_elements_of_their_own_heads(two: Found):
    for rank in two:
        of_heads, of_all = rank["dropout"]["masks"]
        assert of_all == 1.0
        assert 0.3 < of_heads < 0.7  # half of it by chance
        assert rank["dropout"]["differs from evaluation"]


def test_ranks_that_are_not_alike_say_what_differs_before_they_train(two: Found):
    for rank in two:
        said = rank["refusals"]
        assert said["alike"] == "nothing"
        assert "the plan of rank 1 is not that of rank 0" in said["plan"]
        assert "the random generator's state of rank 1 is not that of rank 0" in said["seed"]
        assert "the mode (train or eval) of rank 1 is not that of rank 0" in said["mode"]
        assert "sharding a Sequential over 2 ranks: the plan is for 3" in said["degree"]


def test_a_loss_over_parts_of_a_vocabulary_is_that_of_all_of_it(two: Found):
    for rank in two:
        assert max(rank["losses"]["loss"], rank["losses"]["gradients"]) < 1e-12
        assert rank["losses"]["said"] == two[0]["losses"]["said"]


def test_a_loss_in_chunks_over_the_ranks_is_that_of_all_scores_of_the_whole_model(two: Found):
    for rank in two:
        for name, off in rank["chunks"].items():
            assert off.pop("stay") == ("whole head" not in name), name
            assert max(off.values()) < 1e-12, (name, off)
