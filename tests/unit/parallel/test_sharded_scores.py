"""Where scores may stay on their ranks, and what a proof finds of plans that let them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shard_plans as made
from dryfit.meta import build
from dryfit.parallel import vocabulary_loss
from dryfit.parallel.apply import connect, shard
from dryfit.parallel.collectives import Ranks, simulate
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import prove
from dryfit.parallel.vocabulary_loss import ShardedScores
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import Boundary, ShardPlan

FEATURES, WORDS = 16, 24
COPY, GATHER = Boundary.COPY, Boundary.GATHER


class Head(nn.Module):
    """Features, and scores of words that something is done with."""

    def __init__(self, behind: Callable[[torch.Tensor], object] = lambda scores: scores) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 48), nn.Linear(48, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> object:
        return self.behind(self.head(x + self.down(F.gelu(self.up(x)))))


def features(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.empty(rows, length, FEATURES, device="meta")}


def planned(module: nn.Module, *, loss_over_ranks: bool = True) -> ShardPlan:
    return plan_shards(module, 2, inputs=features, tokens=1, loss_over_ranks=loss_over_ranks)


X = {"x": torch.randn(3, 7, FEATURES, generator=torch.Generator().manual_seed(2))}

STAY: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda scores: scores,
    "a soft cap": lambda scores: (scores / 3).tanh() * 3,
    "a cast in a tuple": lambda scores: (scores.float(),),
}
DO_NOT: dict[str, Callable[[torch.Tensor], object]] = {
    "a softmax": lambda scores: scores.log_softmax(-1),
    "a mean": lambda scores: scores - scores.mean(-1, keepdim=True),
    "words left out": lambda scores: scores[..., :20],
    "another output": lambda scores: (scores, scores.amax(-1)),
    "a part that depends on where": lambda scores: scores + torch.arange(WORDS, device=scores.device),
}


@pytest.mark.parametrize("behind", STAY)
def test_scores_stay_where_nothing_needs_them_together(behind: str) -> None:
    module = build(lambda: Head(STAY[behind]))
    plan = planned(module)
    assert (plan.scores, plan.vocabulary) == ("head", WORDS)
    assert plan.modules["head"].outputs == {"0": GATHER}
    proof = prove(module, plan, X)
    assert proof.loss_error is not None
    assert max(proof.loss_error, proof.gradient_error) < 1e-12


@pytest.mark.parametrize("behind", DO_NOT)
def test_scores_do_not_stay_where_something_does(behind: str) -> None:
    plan = planned(build(lambda: Head(DO_NOT[behind])))
    assert plan.scores is None and plan.vocabulary == 0


def test_a_plan_made_without_a_loss_is_as_ever() -> None:
    module = build(Head)
    plan = planned(module, loss_over_ranks=False)
    assert plan.scores is None and plan.modules["head"].outputs == {"0": GATHER}
    assert prove(module, plan, X).loss_error is None


@pytest.mark.slow
def test_a_vocabulary_pays_sooner_where_its_scores_stay() -> None:
    module = made.on_meta("llama", vocab_size=4096, num_hidden_layers=1)
    before, after = (plan_shards(module, 2, tokens=1024, loss_over_ranks=stay) for stay in (False, True))
    assert before.parameters["lm_head.weight"].dim is None and "send more" in before.whole["lm_head.weight"]
    assert after.parameters["lm_head.weight"].dim == 0 and after.scores == "lm_head"
    assert (
        after.parameters["model.layers.0.mlp.up_proj.weight"] == before.parameters["model.layers.0.mlp.up_proj.weight"]
    )


RANGES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "off by one": lambda words, rank, degree: (rank * words // degree + 1, (rank + 1) * words // degree + 1),
    "swapped": lambda words, rank, degree: ((1 - rank) * words // degree, (2 - rank) * words // degree),
    "all begin at 0": lambda words, rank, degree: (0, words // degree),
}


@pytest.mark.parametrize("mutant", RANGES)
def test_a_wrong_range_of_words_is_refused(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(Head)
    plan = planned(module)
    monkeypatch.setattr(vocabulary_loss, "vocabulary_range", RANGES[mutant])
    with pytest.raises(ShardError, match="of the loss over sharded scores, the sum is off"):
        prove(module, plan, X)


@pytest.mark.parametrize("behind", ["a softmax", "a mean"])
def test_scores_that_are_needed_together_are_refused_whoever_says_that_they_may_stay(behind: str) -> None:
    module = build(lambda: Head(DO_NOT[behind]))
    plan = planned(build(Head))
    assert prove(module, plan.model_copy(update={"scores": None}), X).output_error < 1e-12
    with pytest.raises(ShardError, match="of the loss over sharded scores"):
        prove(module, plan, X)


def test_gradients_of_the_loss_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(Head)
    plan = planned(module)
    backward = vocabulary_loss._CrossEntropy.backward

    def without_targets(ctx: object, gradient: torch.Tensor) -> object:
        made_NV, *others = backward(ctx, gradient)
        return made_NV.clamp_min(0), *others

    monkeypatch.setattr(vocabulary_loss._CrossEntropy, "backward", staticmethod(without_targets))
    with pytest.raises(ShardError, match=r"of the loss over sharded scores, the gradient of head\.\w+ is off"):
        prove(module, plan, X)


@pytest.mark.parametrize(("scores", "said"), [("up", "does not put them together"), ("nowhere", "does not put them")])
def test_a_plan_that_names_another_module_is_not_the_models(scores: str, said: str) -> None:
    module = build(Head)
    with pytest.raises(ShardError, match=f"{scores} has scores that stay sharded, and {said}"):
        prove(module, planned(module).model_copy(update={"scores": scores}), X)


def test_they_stay_in_calls_of_the_model_and_not_of_its_parts() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Head()

        def forward(self, x: torch.Tensor) -> object:
            return self.inner(x)

    module = build(Around)
    plan = planned(module)

    def widths(ranks: Ranks) -> list[int]:
        part = Around()
        shard(part, plan, ranks.rank)
        connect(part, plan, ranks, ShardedScores.in_calls_of(part))
        with pytest.raises(RuntimeError):
            part(torch.zeros(2, 3))  # of another width: the switch is off again behind an error
        return [one(X["x"]).shape[-1] for one in (part.inner, part, part.inner, part.eval())]

    assert plan.scores == "inner.head"
    assert simulate(2, widths) == [[WORDS, WORDS // 2, WORDS, WORDS // 2]] * 2
