"""Cross entropy over ranks that have parts of the vocabulary, against torch's own of all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dryfit.parallel import vocabulary_loss
from dryfit.parallel.collectives import Ranks, simulate
from dryfit.parallel.vocabulary_loss import VocabularyLoss
from dryfit.settings.errors import ShardError

IGNORED = -100
TOKENS, WORDS = 257, 1000


def whole(
    scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, their weighted sum and its gradient, by torch."""
    leaf = scores.clone().requires_grad_()
    losses = F.cross_entropy(leaf, targets, ignore_index=IGNORED, reduction="none")
    total = (losses * weights).sum()
    total.backward()
    assert leaf.grad is not None
    return losses.detach(), total.detach(), leaf.grad


def on_rank(
    ranks: Ranks, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, by a rank that has a part of the scores."""
    share = scores.shape[1] // ranks.degree
    leaf = scores[:, ranks.rank * share : (ranks.rank + 1) * share].clone().requires_grad_()
    loss = VocabularyLoss(ranks, scores.shape[1])
    total = loss(leaf, targets, weights, ignored=IGNORED)
    total.backward()
    assert leaf.grad is not None
    return loss.of_tokens(leaf.detach(), targets, ignored=IGNORED), total.detach(), leaf.grad


def drawn(seed: int, *, scale: float = 8.0, ignored: float = 0.2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, WORDS, generator=generator, dtype=torch.float64) * scale + 30
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    left_out = torch.rand(TOKENS, generator=generator) < ignored
    return scores, targets.masked_fill(left_out, IGNORED), torch.rand(TOKENS, generator=generator, dtype=torch.float64)


CASES: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "some are ignored": lambda: drawn(0),
    "none is": lambda: drawn(1, ignored=0.0),
    "all are": lambda: drawn(2, ignored=2.0),
    "scores far apart": lambda: drawn(3, scale=300.0),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_all_scores(case: str, degree: int) -> None:
    given = CASES[case]()
    losses, total, gradient = whole(*given)
    found = simulate(degree, lambda ranks: on_rank(ranks, *given))
    share = WORDS // degree
    for rank, (own, summed, part) in enumerate(found):
        assert torch.equal(own, found[0][0]) and torch.equal(summed, found[0][1])
        assert float((own - losses).abs().max()) < 1e-12 * max(1.0, float(losses.max()))
        assert float((summed - total).abs()) <= 1e-12 * max(1.0, float(total))
        assert float((part - gradient[:, rank * share : (rank + 1) * share]).abs().max()) < 1e-12


def test_words_that_are_ruled_out_and_tokens_that_are_no_numbers_are_as_for_torch() -> None:
    scores, targets, weights = drawn(4)
    targets[:4] = torch.tensor([WORDS - 1, 0, WORDS // 2, IGNORED])
    scores[0, : WORDS // 2] = -torch.inf  # all that one rank has
    scores[1, 1:] = -torch.inf
    scores[2, WORDS // 2] = -torch.inf  # the target itself
    scores[3] = torch.nan  # of a token that is not learned
    losses, _, gradient = whole(scores, targets, weights)
    (own, _, first), (_, _, second) = simulate(2, lambda ranks: on_rank(ranks, scores, targets, weights))
    assert torch.isinf(losses[2]) and losses[1] == losses[3] == 0
    assert torch.allclose(own, losses, rtol=1e-12, atol=1e-12)
    assert torch.allclose(torch.cat([first, second], 1), gradient, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    scores, targets, weights = drawn(5)
    half = (scores - 30).to(dtype)
    losses, _, gradient = whole(half.double(), targets, weights)
    (own, total, first), (_, _, second) = simulate(2, lambda ranks: on_rank(ranks, half, targets, weights))
    assert own.dtype is total.dtype is torch.float32 and first.dtype is dtype
    assert torch.allclose(own.double(), losses, rtol=1e-6, atol=1e-5)
    assert torch.allclose(torch.cat([first, second], 1).double(), gradient, rtol=1e-2, atol=1e-6)


def test_a_target_that_no_rank_has_is_no_number_to_learn_from() -> None:
    scores, targets, weights = drawn(6)
    targets[7] = WORDS
    (own, _, _), _ = simulate(2, lambda ranks: on_rank(ranks, scores, targets, weights))
    assert torch.isinf(own[7]) and int(torch.isinf(own).sum()) == 1


def test_scores_that_were_put_together_are_refused() -> None:
    scores, targets, _ = drawn(7)
    with pytest.raises(ShardError, match=f"scores of {WORDS} words") as caught:
        simulate(2, lambda ranks: VocabularyLoss(ranks, WORDS)(scores, targets))
    assert caught.value.allowed == "500, a rank's part of the 1000 words"


def test_nothing_as_large_as_the_scores_is_kept_beside_them() -> None:
    scores, targets, _ = drawn(8)

    def kept(ranks: Ranks) -> list[torch.Tensor]:
        share = WORDS // ranks.degree
        leaf = scores[:, ranks.rank * share : (ranks.rank + 1) * share].clone().requires_grad_()
        found: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            VocabularyLoss(ranks, WORDS).of_tokens(leaf, targets)
        return [one for one in found if one.data_ptr() != leaf.data_ptr()]

    for found in simulate(2, kept):
        assert found and max(one.numel() for one in found) == TOKENS


RANGES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "off by one": lambda words, rank, degree: (rank * words // degree + 1, (rank + 1) * words // degree + 1),
    "swapped": lambda words, rank, degree: ((1 - rank) * words // degree, (2 - rank) * words // degree),
}


@pytest.mark.parametrize("mutant", RANGES)
def test_a_wrong_range_gives_another_loss(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(9)
    losses, _, _ = whole(*given)
    monkeypatch.setattr(vocabulary_loss, "vocabulary_range", RANGES[mutant])
    found: list[Any] = simulate(2, lambda ranks: on_rank(ranks, *given))
    assert float((found[0][0] - losses).abs().max()) > 0.1
