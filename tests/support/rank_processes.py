"""What real ranks find: equality with the whole, dropout, refusals, losses over parts of a vocabulary."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import rank_chunks
import rank_groups
import shard_plans as made
from dryfit.meta import materialise
from dryfit.parallel.apply import apply, check_ranks
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.prove import InDouble
from dryfit.parallel.vocabulary_loss import VocabularyLoss
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import ShardPlan
from rank_groups import ERROR, Facts
from rank_loading import LoadedRank

KINDS: dict[str, Callable[..., ShardPlan]] = {
    "bert": made.bert_plan,
    "llama": lambda module, degree: made.llama_plan(module, degree, vocabulary=True),
    "gpt2": made.gpt2_plan,
}


def run(degree: int, folder: Path) -> list[Facts]:
    """Run all cases on processes of their own.

    Args:
        degree: How many processes.
        folder: For what they write.

    Returns:
        What each rank found, by case.
    """
    _save_models(folder)
    for name in rank_chunks.MODELS:
        rank_chunks.planned(name, degree)
    found = rank_groups.run(degree, folder, {name: partial(_in, case, folder) for name, case in CASES.items()})
    for name, said in found.items():
        for rank, facts in enumerate(said):
            assert ERROR not in facts, f"{name}, rank {rank}: {facts[ERROR]}"
    return [{name: said[rank] for name, said in found.items()} for rank in range(degree)]


def _in(case: Callable[[ProcessRanks, Path], Facts], folder: Path, ranks: ProcessRanks) -> Facts:
    return case(ranks, folder)


def _save_models(folder: Path) -> None:
    """Models with weights that are not small, in fp64."""
    for kind in KINDS:
        module = _enlarged(kind)
        module.save_pretrained(folder / kind)


def _enlarged(kind: str, **changes: Any) -> Any:
    module: Any = made.on_meta(kind, **changes)
    materialise(module, missing="init")
    torch.manual_seed(7)
    with torch.no_grad():
        module.double()
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module.eval()


# --- cases -----------------------------------------------------------------------------------------------------------


def equality(ranks: ProcessRanks, folder: Path) -> Facts:
    """Logits, gradients, three optimizer steps, and the checkpoint after them, of slices loaded from a folder."""
    return {kind: _equality(kind, ranks, folder) for kind in KINDS}


def _equality(kind: str, ranks: ProcessRanks, folder: Path) -> Facts:
    expected: Any = made.on_meta(kind)
    materialise(expected, folder / kind, dtype=torch.float64)
    plan = KINDS[kind](expected, ranks.degree)
    part = LoadedRank(lambda: made.on_meta(kind), plan, folder / kind, ranks, dtype=torch.float64)
    module = part.connected()
    with InDouble():
        for model in (module, expected):
            for buffer in model.buffers():
                buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
        off, largest = _step(module, expected, plan, ranks)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4) for model in (expected, module)]
        for _ in range(3):
            for model, optimizer in zip((expected, module), optimizers, strict=True):
                optimizer.zero_grad()
                (_loss(model) / largest).backward()
                optimizer.step()
    state = part.whole_state()
    final = expected.state_dict()
    if ranks.rank == 0:
        module.save_pretrained(folder / f"{kind}-saved", state_dict=dict(state))  # it empties what it is given
    dist.barrier()
    loaded: Any = made.on_meta(kind)
    materialise(loaded, folder / f"{kind}-saved", dtype=torch.float64)
    off["parameters"] = max(_distance(value, final[name]) for name, value in loaded.state_dict().items())
    if ranks.rank == 0:
        off["names"] = list(state) == list(final)
        off["saved"] = max(_distance(value, state[name]) for name, value in loaded.state_dict().items())
    return off


def _step(module: Any, expected: Any, plan: ShardPlan, ranks: ProcessRanks) -> tuple[Facts, float]:
    outputs = [part.eval()(**made.batch()).logits for part in (module, expected)]
    for part in (module, expected):
        _loss(part).backward()
    grads = {name: parameter.grad for name, parameter in expected.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    worst = 0.0
    for name, parameter in module.named_parameters():
        shard = plan.parameters[name]
        local = grads[name]
        if shard.dim is not None:
            cuts = [local.narrow(shard.dim, a, b - a) for a, b in shard.slices(ranks.rank, ranks.degree)]
            local = torch.cat(cuts, shard.dim)
        worst = max(worst, float((parameter.grad - local).abs().max()) / largest)
    return {"logits": _distance(*outputs), "gradients": worst}, largest


def _loss(module: Any) -> torch.Tensor:
    logits = module(**made.batch()).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits * weights).sum()


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max()) / max(1.0, float(other.detach().abs().max()))


def dropout(ranks: ProcessRanks, folder: Path) -> Facts:
    """A training step with dropout, with and without checkpointing: what all ranks hold must get the same gradients."""
    facts: Facts = {}
    steps: dict[str, dict[str, torch.Tensor]] = {}
    for way in ("plain", "non-reentrant", "reentrant"):
        module = _enlarged("bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
        plan = made.bert_plan(module, ranks.degree)
        module = apply(module, plan, ranks).train()
        if way != "plain":
            module.activation_checkpointing_enable({"use_reentrant": way == "reentrant"})
            module.enable_input_require_grads()
        torch.manual_seed(11)
        _loss(module).backward()
        steps[way] = {name: parameter.grad for name, parameter in module.named_parameters()}
        whole = [steps[way][name] for name, shard in plan.parameters.items() if shard.dim is None]
        flat = torch.cat([gradient.flatten() for gradient in whole])
        facts[way] = all(torch.equal(flat, other) for other in ranks.all_gather(flat, "gradients"))
        state = torch.get_rng_state().double()
        facts[f"{way}: generator"] = all(torch.equal(state, other) for other in ranks.all_gather(state, "state"))
    for way in ("non-reentrant", "reentrant"):
        pairs = [(steps[way][name], gradient) for name, gradient in steps["plain"].items()]
        facts[f"{way}: as plain"] = max(_distance(*pair) for pair in pairs)
    facts["differs from evaluation"] = _differs(ranks)
    facts["masks"] = _masks(ranks)
    return facts


def _differs(ranks: ProcessRanks) -> bool:
    module = _enlarged("bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    module = apply(module, made.bert_plan(module, ranks.degree), ranks)
    logits = [module.train(mode)(**made.batch()).logits for mode in (True, False)]
    return not torch.allclose(*logits)


def _masks(ranks: ProcessRanks) -> list[float]:
    """How much of what is dropped is dropped at the same place on the other rank, in a region and outside."""
    module = _enlarged("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, attn_implementation="eager")
    module = apply(module, made.bert_plan(module, ranks.degree), ranks).train()
    dropped: dict[int, torch.Tensor] = {}
    original = nn.functional.dropout

    def listening(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(torch.ones_like(value), *args, **kwargs)
        dropped.setdefault(value.dim(), (out == 0).double())  # four dimensions: attention's; three: what all hold
        return out * value

    nn.functional.dropout = listening
    try:
        torch.manual_seed(3)
        module(**made.batch())
    finally:
        nn.functional.dropout = original
    agree = []
    for dimensions in (4, 3):
        one, other, *_ = ranks.all_gather(dropped[dimensions], "masks")
        agree.append(float((one == other).double().mean()))
    return agree


def refusals(ranks: ProcessRanks, folder: Path) -> Facts:
    """What ranks say that are not alike."""
    facts: Facts = {}
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rows = made.PlanBuilder(plain, ranks.degree)
    rows.column("0")
    plan = rows.plan()

    def said(name: str, do: Callable[[], Any]) -> None:
        try:
            do()
            facts[name] = "nothing"
        except ShardError as error:
            facts[name] = str(error)

    def part(changed: ShardPlan = plan) -> nn.Module:
        return apply(copy.deepcopy(plain), changed, ranks)

    torch.manual_seed(0)
    said("alike", lambda: check_ranks(part(), plan, ranks))
    other = made.PlanBuilder(plain, ranks.degree).plan() if ranks.rank else plan
    said("plan", lambda: check_ranks(part(other), other, ranks))
    torch.manual_seed(ranks.rank)
    said("seed", lambda: check_ranks(part(), plan, ranks))
    torch.manual_seed(0)
    said("mode", lambda: check_ranks(part().train(ranks.rank == 0), plan, ranks))
    said("degree", lambda: apply(copy.deepcopy(plain), plan.model_copy(update={"degree": 3}), ranks))
    return facts


def losses(ranks: ProcessRanks, folder: Path) -> Facts:
    """A loss over parts of a vocabulary, by torch and over the ranks: what each is off by, and its bits."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(129, 512, generator=generator, dtype=torch.float64) * 9
    targets = torch.randint(0, 512, (129,), generator=generator)
    targets[::5] = -100
    whole = scores.clone().requires_grad_()
    expected = functional.cross_entropy(whole, targets, reduction="sum")
    expected.backward()
    part = scores.chunk(ranks.degree, 1)[ranks.rank].clone().requires_grad_()
    loss = VocabularyLoss(ranks, 512)(part, targets)
    loss.backward()
    assert whole.grad is not None and part.grad is not None
    return {
        "loss": abs(loss.item() / expected.item() - 1),
        "gradients": float((part.grad - whole.grad.chunk(ranks.degree, 1)[ranks.rank]).abs().max()),
        "said": loss.item().hex(),
    }


def chunks(ranks: ProcessRanks, folder: Path) -> Facts:
    """A loss in chunks of tokens over the ranks, of several models."""
    return {name: rank_chunks.of_model(name, ranks) for name in rank_chunks.MODELS}


CASES: dict[str, Callable[[ProcessRanks, Path], Facts]] = {
    "equality": equality,
    "dropout": dropout,
    "refusals": refusals,
    "losses": losses,
    "chunks": chunks,
}
