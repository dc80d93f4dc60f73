"""Copy a model for a proof: in double precision, with random weights, without layers that repeat others.

Weights are drawn larger than models begin with (a standard deviation of 0.5, less for large fans), so that no term of a
sum is lost beside the others, and no softmax is nearly flat: at the usual 0.02 a wrong head goes unnoticed.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dryfit.gpu.private_apis.torch_modules import children_of
from dryfit.gpu.slots import Slot, floats_of, slots
from dryfit.meta.private_apis.transformers_models import chooses_experts
from dryfit.meta.propagation import allow_real_inputs
from dryfit.meta.tape import is_deferred, tape_of
from dryfit.parallel.apply import check_plan, connect, mark_sharded, shards_of, slice_tensor, slices_of
from dryfit.parallel.capture import OF_EACH_KIND, kind_of, outermost_lists, renamed
from dryfit.parallel.collectives import Ranks, SimulatedRanks, simulate
from dryfit.parallel.vocabulary_loss import ShardedScores, VocabularyLoss
from dryfit.settings.errors import LoadError, ShardError
from dryfit.settings.sharding import Boundary, ShardPlan, ShardProof
from dryfit.settings.text import few

_STD: Final = 0.5
_MOST_FAN: Final = 3.0
_THIN: Final = 8  # times longer than wide: a matrix of low rank
_SMALLER: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_TO_SMALLER: Final = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Computes everything in fp64, also where the model's code asks for a smaller type.

    Norms and softmaxes ask for fp32. Rounded there, results that differ in the last bit of fp64 may differ by a bit of
    fp32, which could not be told from a wrong plan.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_SMALLER:
            return args[0].double()
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _SMALLER else value


@dataclass(frozen=True, slots=True)
class StandIn:
    """A copy of a model to prove a plan with.

    Attributes:
        module: The copy, in fp64 with random weights, in eval mode.
        plan: The plan, by the copy's names.
        names: The original path of each module that has another path in the copy.
        left_out: Paths of the layers that the copy lacks.
    """

    module: nn.Module
    plan: ShardPlan
    names: Mapping[str, str]
    left_out: tuple[str, ...]

    def original(self, name: str) -> str:
        """Return the original name of a module or parameter of the copy."""
        return renamed(name, self.names)


def stand_in(module: nn.Module, plan: ShardPlan, *, seed: int, whole: bool) -> StandIn:
    """Copy a model with random weights.

    Args:
        module: The model, on the meta device or with weights, which are not read.
        plan: Its plan.
        seed: Of the weights.
        whole: Whether all layers are kept. Otherwise two of each kind are, in each outermost list of layers; layers of
            one kind have the same class, parameters, settings and rows of the plan.

    Raises:
        ShardError: A buffer has no value and cannot be computed.
    """
    dropped = _dropped(module, plan, whole)
    memo: dict[int, Any] = {key: nn.Module() for key in dropped}
    generator = torch.Generator().manual_seed(seed)
    kept_alive = _tensors(module, dropped, generator, memo)
    copied = copy.deepcopy(module, memo)
    del kept_alive
    allow_real_inputs(copied)
    for part in copied.modules():
        # Experts in one kernel (grouped_mm) know no fp64; one after the other they compute the same.
        if isinstance(part, PreTrainedModel) and chooses_experts(part):
            part.set_experts_implementation("eager")
    names = _close_gaps(module, copied, dropped)
    back = {old: new for new, old in names.items()}
    gone = tuple(path for path, layer in module.named_modules() if id(layer) in dropped)
    return StandIn(copied.eval(), _renamed(plan, back, gone), names, gone)


def kept_parameters(module: nn.Module, plan: ShardPlan, *, whole: bool) -> int:
    """Return the number of parameters of a copy, without making one."""
    without = _within(module, _dropped(module, plan, whole))
    kept = {
        id(parameter): parameter.numel()
        for part in module.modules()
        if id(part) not in without
        for parameter in part.parameters(recurse=False)
    }
    return sum(kept.values())


def _dropped(module: nn.Module, plan: ShardPlan, whole: bool) -> set[int]:
    """Return the ids of the layers that a copy lacks."""
    return set[int]() if whole else _repeated(module, plan)


def _within(module: nn.Module, dropped: set[int]) -> set[int]:
    """Return the ids of some layers and of all modules in them."""
    return {id(part) for layer in module.modules() if id(layer) in dropped for part in layer.modules()}


def _tensors(module: nn.Module, dropped: set[int], generator: torch.Generator, memo: dict[int, Any]) -> list[Any]:
    """Enter a replacement for every tensor into the memo of ``deepcopy``; return the slots to keep them alive."""
    places = slots(module)
    without = _within(module, dropped)
    for slot in places:
        old = slot.tensor
        if id(slot.owner) in without or id(old) in memo:
            continue
        if isinstance(old, nn.Parameter) and old.is_floating_point():
            memo[id(old)] = nn.Parameter(_drawn(slot, tuple(old.shape), generator))
            continue
        value = _computed(slot.name, old).detach()
        value = value.double() if value.is_floating_point() else value.clone()
        memo[id(old)] = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
    return places


def _drawn(slot: Slot, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) < 2:
        return drawn * _STD + (1.0 if slot.name.endswith("weight") else 0.0)  # a norm's
    short, long = sorted(shape[-2:])
    if isinstance(slot.owner, nn.Embedding) or short * _THIN > long:
        return drawn * min(_STD, _MOST_FAN / math.sqrt(max(math.sqrt(short * long), 1.0)))
    return drawn * min(
        _STD, 1 / math.sqrt(max(long, 1))
    )  # an adapter's: two of them stand beside one matrix, times a factor


def _computed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not is_deferred(tensor):
        return tensor
    tape = tape_of(tensor)
    try:
        if tape is not None:
            return tape.realise(tensor)[0]
        problem = "it is on meta, and how its constructor filled it is not known"
    except LoadError as error:
        problem = error.found
    raise ShardError("copying a model to prove a plan with", f"{name}: {problem}", hint="build it by dryfit.meta.build")


def _repeated(module: nn.Module, plan: ShardPlan) -> set[int]:
    """Return the ids of the layers after the first two of a kind, in outermost lists."""
    shards = shards_of(module, plan)
    repeated = set[int]()
    for path, layers in outermost_lists(module):
        seen = Counter[object]()
        for index, layer in enumerate(layers):
            kind = kind_of(layer), _rows(f"{path}.{index}" if path else str(index), layer, shards, plan)
            seen[kind] += 1
            if seen[kind] > OF_EACH_KIND:
                repeated.add(id(layer))
    return repeated


def _rows(path: str, layer: nn.Module, shards: Mapping[str, Any], plan: ShardPlan) -> object:
    """Return what the plan says of a layer's parameters and modules."""
    parameters = tuple(
        shards[f"{path}.{name}"].model_copy(update={"tied_to": None}).model_dump_json()
        for name, _ in layer.named_parameters()
    )
    modules = (plan.modules.get(f"{path}.{name}" if name else path) for name, _ in layer.named_modules())
    return parameters, tuple("" if what is None else what.model_dump_json() for what in modules)


def _close_gaps(module: nn.Module, copied: nn.Module, dropped: set[int]) -> dict[str, str]:
    """Remove the dropped layers from a copy's lists; return the old path of each moved layer, by its new one."""
    moved: dict[str, str] = {}
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or not any(id(layer) in dropped for layer in part):
            continue
        stays = [index for index, layer in enumerate(part) if id(layer) not in dropped]
        layers = copied.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        kept = [layers[index] for index in stays]
        children_of(layers).clear()
        layers.extend(kept)
        moved |= {f"{path}.{new}": f"{path}.{old}" for new, old in enumerate(stays) if new != old}
    return moved


def _renamed(plan: ShardPlan, back: Mapping[str, str], gone: tuple[str, ...]) -> ShardPlan:
    def kept(name: str) -> bool:
        return not any(name == path or name.startswith(f"{path}.") for path in gone)

    return ShardPlan(
        degree=plan.degree,
        parameters={renamed(name, back): shard for name, shard in plan.parameters.items() if kept(name)},
        modules={renamed(name, back): what for name, what in plan.modules.items() if kept(name)},
        scores=plan.scores and renamed(plan.scores, back),
    )


# Prove a shard plan: the sharded model must give the whole one's outputs, gradients and trained parameters.
#
# Both run in this process, the ranks as threads, in double precision on enlarged random weights. The whole model runs
# first and its results are recorded; each rank compares its shard with them, so that no rank's gradients are kept.
#
# Where scores stay sharded, the loss over the ranks is compared with that of all scores. Every rank's part of the
# vocabulary has targets of its own, its first and last word among them, so that no word can be taken for another.


_IGNORED: Final = -100
_EACH: Final = 7
"""Every seventh token is not learned."""

Score = Callable[[], torch.Tensor]
"""Runs the model once and returns its scores, or a rank's part of them."""


@dataclass(frozen=True, slots=True)
class LossRecord:
    """A loss of all scores.

    Attributes:
        loss: The weighted sum over tokens.
        gradients: By parameter; None where there was none.
        largest: The largest of all gradients.
    """

    loss: float
    gradients: dict[str, torch.Tensor | None]
    largest: float


def loss_of_all(module: nn.Module, plan: ShardPlan, score: Score, seed: int) -> LossRecord:
    """Return torch's loss of the whole model's scores and its gradients; the module is left without gradients."""
    scores = score()
    targets, weights = _targets(scores.shape[:-1].numel(), plan, seed)
    losses = functional.cross_entropy(scores.flatten(0, -2), targets, ignore_index=_IGNORED, reduction="none")
    loss = (losses * weights).sum()
    loss.backward()
    gradients = {name: _copy(one.grad) for name, one in module.named_parameters()}
    module.zero_grad()
    return LossRecord(float(loss.detach()), gradients, largest_of(gradients.values()))


def loss_error(plan: ShardPlan, score: Score, seed: int, ranks: Ranks, record: LossRecord) -> float:
    """Return the error of a rank's loss, relative where the loss is over 1; gradients stay in the parameters.

    Raises:
        ShardError: The scores are not a rank's part.
    """
    scores = score()
    targets, weights = _targets(scores.shape[:-1].numel(), plan, seed)
    token_loss = VocabularyLoss(ranks, plan.vocabulary)
    loss = token_loss(scores.flatten(0, -2), targets, weights, ignored=_IGNORED)
    loss.backward()
    off = abs(float(loss.detach()) - record.loss) / max(1.0, abs(record.loss))
    return off if off == off else float("inf")


def largest_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the largest absolute value in some gradients."""
    return max((float(one.abs().max()) for one in gradients if one is not None), default=0.0)


def _targets(tokens: int, plan: ShardPlan, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's target and weight."""
    generator = torch.Generator().manual_seed(seed + 2)
    targets = torch.randint(0, plan.vocabulary, (tokens,), generator=generator)
    targets[::_EACH] = _IGNORED
    share = plan.vocabulary // plan.degree
    ends = torch.tensor([end for first in range(0, plan.vocabulary, share) for end in (first, first + share - 1)])
    learned = (targets != _IGNORED).nonzero().flatten()[: len(ends)]
    targets[learned] = ends[: len(learned)]
    return targets, torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


@dataclass(slots=True)
class Witness:
    """Records a model's modules during one pass.

    Attributes:
        outputs: Outputs of each module, in the order in which they ended; the first ones of a module that runs twice.
        inside: Modules that were entered and not left.
    """

    outputs: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def listen(self, module: nn.Module) -> None:
        """Start recording."""
        for path, part in module.named_modules():
            self._handles.append(part.register_forward_pre_hook(partial(self._enter, path)))
            self._handles.append(part.register_forward_hook(partial(self._leave, path)))

    def stop(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, path: str, _module: nn.Module, _args: Any) -> None:
        self.inside.append(path)

    def _leave(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self.inside.pop()
        self.outputs.setdefault(path, tuple(tensor.detach().clone() for tensor in floats_of(output)))


OUTPUT_TOLERANCE: Final = 1e-10
GRADIENT_TOLERANCE: Final = 1e-8
PARAMETER_TOLERANCE: Final = 1e-8
STEPS: Final = 3
MAX_PROOF_BYTES: Final = 8 << 30
"""Memory that a proof may take by default."""

_OWN_TOLERANCE: Final = 1e-6  # of a gradient, relative to the parameter's own largest
_NOISE: Final = 1e-12  # of a gradient that is zero but for rounding, relative to the largest of all
_LEARNING_RATE: Final = 0.01
# Keeps AdamW from dividing rounding by rounding: in a key's bias, or beside adapters with steep gradients. Gradients
# are at most 1, and an error of GRADIENT_TOLERANCE still moves a parameter by PARAMETER_TOLERANCE.
_EPSILON: Final = 1e-2
_BYTES_OF_EACH: Final = 8 * 10  # weight, gradient, two moments, of the whole and of the ranks; activations


@dataclass(frozen=True, slots=True)
class _Record:
    """Results of the whole model.

    Attributes:
        outputs: Floating-point outputs.
        witness: Its modules' outputs.
        gradients: By parameter; None where there was none.
        largest: The largest of all gradients.
        trained: Parameters after the optimizer steps.
        loss: Loss of its scores; None where the plan keeps none sharded.
    """

    outputs: tuple[torch.Tensor, ...]
    witness: Witness
    gradients: dict[str, torch.Tensor | None]
    largest: float
    trained: dict[str, torch.Tensor]
    loss: LossRecord | None


@dataclass(frozen=True, slots=True)
class _RankErrors:
    """Errors of one rank."""

    output: float
    gradient: float
    parameter: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class _Case:
    """A proof's model with its plan, batch and seed."""

    of: StandIn
    inputs: Mapping[str, Any]
    seed: int

    def refused(self, problem: str, allowed: str = "") -> ShardError:
        """Return the error for a plan that fails."""
        return ShardError(
            f"proving a plan that shards a {type(self.of.module).__name__} over {self.of.plan.degree} ranks",
            problem,
            allowed,
            hint="do not use the plan; leave whole what the message names, or run with another degree",
        )


def prove(
    module: nn.Module,
    plan: ShardPlan,
    inputs: Mapping[str, Any],
    *,
    seed: int = 0,
    whole: bool = False,
    most_bytes: int = MAX_PROOF_BYTES,
) -> ShardProof:
    """Prove that a sharded model computes what the whole one does.

    Compared are every floating-point output (1e-10 of the largest), every gradient (1e-8 of the largest of all, and
    1e-6 of the parameter's own largest) and every parameter after three steps of AdamW (1e-8), each on each rank.
    Dropout is off, as in evaluation: random numbers of ranks are not comparable with those of the whole. Where the plan
    keeps scores sharded, a cross entropy over the ranks (1e-10) and its gradients are compared too.

    Of many layers of one kind two are proved, at full width: the others run the same code on the same shapes under the
    same rows of the plan, and differ only in weights, which are random here anyway, and in their number.

    Args:
        module: The whole model, on the meta device or with weights; it is not changed, and weights are not read.
        plan: The plan.
        inputs: Keyword arguments of its call, with values; several rows of different lengths prove more.
        seed: Of the weights and of the weights of outputs in the loss.
        whole: Whether all layers are kept.
        most_bytes: Memory that the proof may take.

    Returns:
        The largest errors, all within the tolerances.

    Raises:
        ShardError: The plan is not the module's; an output, gradient or parameter is wrong (the first module or
            parameter is named); the proof would take more memory than is allowed.
    """
    started = time.perf_counter()
    check_plan(module, plan)
    case = _Case(_stand_in(module, plan, seed, whole, most_bytes), inputs, seed)
    parts = [_part(case.of, rank) for rank in range(plan.degree)]
    try:
        record = _run_whole(case)
    except (IndexError, KeyError, RuntimeError) as error:
        if case.of.left_out:  # the model needs all its layers
            return prove(module, plan, inputs, seed=seed, whole=True, most_bytes=most_bytes)
        raise case.refused(
            f"the whole model fails ({_first_line(error)})", "inputs that it can be called with"
        ) from error
    errors = simulate(plan.degree, lambda ranks: _compare(case, record, parts, ranks))
    return ShardProof(
        degree=plan.degree,
        output_error=max(rank.output for rank in errors),
        gradient_error=max(rank.gradient for rank in errors),
        parameter_error=max(rank.parameter for rank in errors),
        loss_error=max((rank.loss for rank in errors if rank.loss is not None), default=None),
        parameters=len(record.gradients),
        steps=STEPS,
        left_out=case.of.left_out,
        seconds=round(time.perf_counter() - started, 3),
    )


def proof_bytes(module: nn.Module, plan: ShardPlan, *, whole: bool = False) -> int:
    """Estimate the memory that a proof takes, without allocating any.

    Args:
        module: The whole model.
        plan: Its plan.
        whole: Whether all layers are kept.
    """
    return kept_parameters(module, plan, whole=whole) * _BYTES_OF_EACH


def _stand_in(module: nn.Module, plan: ShardPlan, seed: int, whole: bool, most_bytes: int) -> StandIn:
    needed = proof_bytes(module, plan, whole=whole)
    if needed > most_bytes:
        raise ShardError(
            f"proving a plan that shards a {type(module).__name__} over {plan.degree} ranks",
            f"{needed // _BYTES_OF_EACH:,} parameters take about {needed / 2**30:.1f} GiB to prove",
            allowed=f"{most_bytes / 2**30:.1f} GiB",
            hint="prove the plan on a narrower model of the same class (parallel.proof.narrow), or allow more memory",
        )
    return stand_in(module, plan, seed=seed, whole=whole)


def _part(of: StandIn, rank: int) -> nn.Module:
    """Return a rank's shard as a copy of the module; slices are made while copying."""
    slices: dict[int, Any] = dict(slices_of(of.module, of.plan, rank))
    part = copy.deepcopy(of.module, slices)
    mark_sharded(part, rank, of.plan.degree)
    return part


def _run_whole(case: _Case) -> _Record:
    module, witness = case.of.module, Witness()
    with InDouble():
        witness.listen(module)
        outputs = tuple(floats_of(module(**_own(case.inputs))))
        witness.stop()
        if not outputs:
            raise case.refused("the model has no floating-point output", "a model with one")
        # Copies: an output may be a view of a parameter, which the steps change.
        kept = tuple(output.detach().clone() for output in outputs)
        loss = loss_of_all(module, case.of.plan, _score(module, case), case.seed) if case.of.plan.scores else None
        _loss(outputs, case.seed).backward()
        gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in module.named_parameters()
        }
        largest = largest_of(gradients.values())
        if not largest:
            raise case.refused("no parameter gets a gradient", "a model that can be trained")
        _train(module, case, largest)
    trained = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return _Record(kept, witness, gradients, largest, trained, loss)


def _own(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the inputs, which a model may write into."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else copy.deepcopy(value)
        for name, value in inputs.items()
    }


def _loss(outputs: tuple[torch.Tensor, ...], seed: int) -> torch.Tensor:
    """Return a randomly weighted sum of all elements of all outputs."""
    generator = torch.Generator().manual_seed(seed + 1)
    sums = []
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        sums.append((output * weights).sum() / max(output.numel(), 1) ** 0.5)
    return torch.stack(sums).sum()


def _train(module: nn.Module, case: _Case, largest: float) -> None:
    """Make optimizer steps, the first with the present gradients; gradients are scaled to at most 1."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, eps=_EPSILON, foreach=False)
    for step in range(STEPS):
        if step:
            optimizer.zero_grad()
            _loss(tuple(floats_of(module(**_own(case.inputs)))), case.seed).backward()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= largest
        optimizer.step()


def _compare(case: _Case, record: _Record, parts: list[nn.Module], ranks: SimulatedRanks) -> _RankErrors:
    scores = ShardedScores()
    module = connect(parts[ranks.rank], case.of.plan, ranks, scores)
    witness = Witness()
    with InDouble():
        witness.listen(module)
        outputs = _guarded(case, witness, lambda: tuple(floats_of(module(**_own(case.inputs)))))
        witness.stop()
        output = _output_error(case, record, witness, outputs)
        lost = None
        if record.loss is not None:
            scores.stay = True
            lost = _loss_error(case, record, witness, module, ranks)
            scores.stay = False
        _guarded(case, witness, lambda: _loss(outputs, case.seed).backward())
        gradient = _gradient_error(case, record, module, ranks.rank)
        _train(module, case, record.largest)
    return _RankErrors(output, gradient, _parameter_error(case, record, module, ranks.rank), lost)


def _score(module: nn.Module, case: _Case) -> Callable[[], torch.Tensor]:
    return lambda: next(floats_of(module(**_own(case.inputs))))


def _loss_error(case: _Case, record: _Record, witness: Witness, module: nn.Module, ranks: SimulatedRanks) -> float:
    """Return the error of the loss over the ranks; the module is left without gradients."""
    known, plan = record.loss, case.of.plan
    assert known is not None
    off = _guarded(case, witness, lambda: loss_error(plan, _score(module, case), case.seed, ranks, known))
    what = "of the loss over sharded scores, "
    if off > OUTPUT_TOLERANCE:
        raise case.refused(f"{what}the sum is off by {off:.1e}", f"at most {OUTPUT_TOLERANCE:.0e} of it")
    _gradient_error(case, replace(record, gradients=known.gradients, largest=known.largest), module, ranks.rank, what)
    module.zero_grad()
    return off


def _guarded(case: _Case, witness: Witness, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        where = case.of.original(witness.inside[-1]) if witness.inside else "the backward pass"
        raise case.refused(
            f"{where or 'the model'} fails on a rank's slices ({_first_line(error)})",
            allowed="code that computes with whatever sizes its weights have",
        ) from error


def _output_error(case: _Case, record: _Record, witness: Witness, outputs: tuple[torch.Tensor, ...]) -> float:
    error = _distance(outputs, record.outputs)
    if error <= OUTPUT_TOLERANCE:
        return error
    where, first = "the output", error
    for path, expected in record.witness.outputs.items():
        if _inside_of_a_sum(path, case.of.plan):
            continue
        off = _distance(witness.outputs.get(path, ()), expected, same_shapes=True)
        if off > OUTPUT_TOLERANCE:
            where, first = f"{case.of.original(path) or 'the model'}'s output", off
            break
    raise case.refused(f"{where} is off by {first:.1e}", f"at most {OUTPUT_TOLERANCE:.0e} of the largest output")


def _inside_of_a_sum(path: str, plan: ShardPlan) -> bool:
    """Return whether a module lies in one whose output is reduced or gathered: its own output is a partial one."""
    ends = {Boundary.REDUCE, Boundary.GATHER}
    return any(
        (path.startswith(f"{outer}.") or not outer) and path != outer and ends & set(what.outputs.values())
        for outer, what in plan.modules.items()
    )


def _distance(
    actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], *, same_shapes: bool = False
) -> float:
    """Return the largest difference, relative to the largest number over 1; infinite where shapes differ."""
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        return 0.0 if same_shapes else float("inf")
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        if other.numel():
            off = float((one - other).detach().abs().nan_to_num(nan=float("inf")).max())
            worst = max(worst, off / max(1.0, float(other.detach().abs().max())))
    return worst


def _gradient_error(case: _Case, record: _Record, module: nn.Module, rank: int, of: str = "") -> float:
    worst, wrong = 0.0, dict[str, float]()
    shards = shards_of(module, case.of.plan)
    for name, parameter in module.named_parameters():
        expected = record.gradients[name]
        if expected is None and parameter.grad is None:
            continue
        whole = torch.zeros_like(parameter) if expected is None else expected
        local = whole if expected is None else slice_tensor(whole, shards[name], rank, case.of.plan.degree)
        own_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        off = float((own_grad - local).detach().abs().nan_to_num(nan=float("inf")).max()) if local.numel() else 0.0
        own = float(whole.abs().max()) if whole.numel() else 0.0
        worst = max(worst, off / record.largest)
        if off > GRADIENT_TOLERANCE * record.largest or off > _OWN_TOLERANCE * own + _NOISE * record.largest:
            wrong[name] = off / max(own, _NOISE * record.largest)
    if wrong:
        # Gradients flow backward: an error in one passes into those of all modules before it.
        order = {path: index for index, path in enumerate(record.witness.outputs)}
        last = max(wrong, key=lambda name: order.get(name.rpartition(".")[0], -1))
        others = [case.of.original(name) for name in wrong if name != last]
        more = f"; so are those of {len(others)} more ({few(others)})" if others else ""
        raise case.refused(
            f"{of}the gradient of {case.of.original(last)} is off by {wrong[last]:.1e} of its largest{more}",
            f"at most {GRADIENT_TOLERANCE:.0e} of the largest of all gradients, {_OWN_TOLERANCE:.0e} of its own",
        )
    return worst


def _parameter_error(case: _Case, record: _Record, module: nn.Module, rank: int) -> float:
    worst = 0.0
    shards = shards_of(module, case.of.plan)
    for name, parameter in module.named_parameters():
        local = slice_tensor(record.trained[name], shards[name], rank, case.of.plan.degree)
        off = _distance((parameter.detach(),), (local,))
        if off > PARAMETER_TOLERANCE:
            raise case.refused(
                f"{case.of.original(name)} is off by {off:.1e} after {STEPS} optimizer steps",
                f"at most {PARAMETER_TOLERANCE:.0e}",
            )
        worst = max(worst, off)
    return worst


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
