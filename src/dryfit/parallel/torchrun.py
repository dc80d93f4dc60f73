"""One call for tensor parallelism under torchrun: plan, proof, slices of the checkpoint, a model that is ready."""

import os
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from dryfit.meta.configs import load_config
from dryfit.meta.construction import build
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind, fill_pretrained, make_model, stored_kind
from dryfit.parallel.apply import check_ranks, connect, mark_sharded, shard, slices_on_rank
from dryfit.parallel.capture import token_inputs
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.narrow import Narrowing, WideModel, narrow_config, prove_plan, random_tokens
from dryfit.parallel.planner import plan_shards
from dryfit.settings.errors import ConfigError, DryfitError, ShardError
from dryfit.settings.sharding import ShardPlan, ShardProof
from dryfit.settings.tables import ModelSettings

_DOING: Final = "making a model parallel"
_ROWS, _LENGTH = 3, 12


def parallelize(
    model: str | os.PathLike[str] | PreTrainedModel,
    degree: int,
    *,
    task: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Return this rank's part of a model, which computes with the other ranks what the whole model does.

    Every process calls it, started by ``torchrun`` or with a ``torch.distributed`` group of its own. Rank 0 plans and
    proves for all; each rank reads its own slices of the checkpoint. Call the model on the same batch on every rank:
    all get the same outputs, and parameters that are whole the same gradients; an optimizer steps on what a rank
    holds. CUDA devices are used where there are any, that of ``LOCAL_RANK`` by each rank.

    Args:
        model: Hub id or folder; or a model with weights, the same on each rank, which is cut in place.
        degree: Number of ranks; as many as there are processes.
        task: Of a hub id or folder, its head, as for :func:`dryfit.load`; None: that of the checkpoint.
        revision: Of a hub id.
        trust_remote_code: Run code that comes with the model.
        dtype: Of a hub id's or folder's weights; None: fp32.

    Returns:
        The model, in eval mode if it was loaded. The random state of every rank is rank 0's from then on.

    Raises:
        ConfigError: Nothing of the model can be sharded, or the degree does not divide its heads; the checkpoint names
            no head.
        ShardError: There is no process group, or not of as many processes; the proof fails; the ranks are not alike.
        TraceError: The model's code cannot be followed.
        LoadError: A weight is missing, of another shape, or stray.
    """
    device = _joined(degree)
    ranks = ProcessRanks()
    source: ModelSettings | None = None
    kind: Kind | None = None
    if isinstance(model, PreTrainedModel):
        whole = model
        if any(one.is_meta for one in whole.parameters()):
            raise ShardError(_DOING, "it has no weights", "a hub id, a folder, or a model with weights")
    else:
        source = ModelSettings(name=os.fspath(model), revision=revision, trust_remote_code=trust_remote_code)
        kind = _kind(source, task)
        whole = _empty(source, kind)
    plan = _proved_for_all(whole, ranks)
    # Dropout in what all ranks hold must be the same on each.
    torch.set_rng_state(_shared(torch.get_rng_state()))
    if source is None or kind is None:
        shard(whole, plan, ranks.rank)
        made = cast("PreTrainedModel", cast("nn.Module", whole).to(device))
    else:
        parts = slices_on_rank(whole, plan, ranks.rank)
        made = whole
        fill_pretrained(made, source, kind, LoadOptions(device, dtype, parts=parts))
        mark_sharded(made, ranks.rank, degree)
    connect(made, plan, ranks)
    check_ranks(made, plan, ranks)
    return made


def _joined(degree: int) -> torch.device:
    """Join the group that torchrun describes, unless there is one; return this rank's device.

    Raises:
        ShardError: There is no group, or not of this many processes.
    """
    has_cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ShardError(
                _DOING,
                "this process is one by itself: torchrun's variables are not set, nor is there a process group",
                f"{degree} processes",
                f"torchrun --nproc-per-node {degree} script.py",
            )
        _refuse_other_size(int(os.environ["WORLD_SIZE"]), degree)
        if has_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo")
    _refuse_other_size(dist.get_world_size(), degree)
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


def _refuse_other_size(processes: int, degree: int) -> None:
    if processes != degree:
        raise ShardError(
            _DOING,
            f"{processes} processes, and a degree of {degree}",
            "as many processes as ranks",
            f"torchrun --nproc-per-node {degree}, or degree={processes}",
        )


def _kind(source: ModelSettings, task: str | None) -> Kind:
    if task is not None:
        if task not in list(Kind):
            raise ConfigError(_DOING, f"there is no task {task!r}", ", ".join(Kind))
        return Kind(task)
    kind = stored_kind(load_config(source))
    if kind is None:
        raise ConfigError(
            _DOING, f"the config of {source.name} names no head", ", ".join(Kind), 'say it: task="causal-lm"'
        )
    return kind


def _empty(source: ModelSettings, kind: Kind) -> PreTrainedModel:
    config = load_config(source)
    return build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code)).eval()


def _proved_for_all(whole: PreTrainedModel, ranks: ProcessRanks) -> ShardPlan:
    """Plan and prove on rank 0; what it refuses is refused on every rank.

    Raises:
        DryfitError: It is refused.
    """
    found: ShardPlan | DryfitError | None = None
    if ranks.rank == 0:
        try:
            found = plan_shards(whole, ranks.degree)
            _prove(whole, found)
        except DryfitError as error:
            found = error.with_traceback(None)
    found = _shared(found)
    if isinstance(found, DryfitError):
        raise found
    assert found is not None
    return found


def _prove(whole: PreTrainedModel, plan: ShardPlan) -> ShardProof:
    """Prove a plan, on a narrower model of the class where the model is too wide to be proved itself.

    Raises:
        ShardError: It computes something else.
    """

    def narrower(step: Narrowing) -> nn.Module:
        config = narrow_config(whole.config, plan.degree, step)
        return build(lambda: type(whole)(config)).eval()

    return prove_plan(WideModel(whole, plan), narrower, _sample)


def _sample(module: nn.Module) -> Mapping[str, Any]:
    """Return random tokens, as the model is traced with, without padding."""
    generator = torch.Generator().manual_seed(0)
    words = int(cast("Any", module).config.get_text_config().vocab_size)

    def value(name: str, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        return random_tokens(name, given.shape, words, generator).to(given.dtype)

    return {name: value(name, given) for name, given in token_inputs(module)(_ROWS, _LENGTH).items()}


def _shared(value: Any) -> Any:
    """Return rank 0's value on every rank; it is pickled."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
