"""A rank's weights straight from a checkpoint: of each tensor no more is read than the slices that the rank holds.

Everything else is as :func:`dryfit.meta.materialise` has it: names and prefixes, conversions, ties, weights that may be
missing, and that whatever is wrong is said from the headers, before anything is read. Every rank sees the same headers,
so that all of them refuse the same checkpoint.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dryfit.core.errors import ShardError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.sharding.shard_plan import ShardPlan
from dryfit.meta.files.checkpoint_files import CheckpointFiles, open_checkpoint
from dryfit.meta.files.reading import ReadMode
from dryfit.meta.loading.filling import fill
from dryfit.meta.loading.matching import LoadOptions, Missing
from dryfit.parallel.ranks.apply import SHARDED, mark_sharded, slice_on_rank
from dryfit.parallel.ranks.check import check_plan, shards_of


def load(
    module: nn.Module,
    plan: ShardPlan,
    rank: int,
    checkpoint: Path | str | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
) -> LoadReport:
    """Give a module a rank's slices of its weights, in place; then :func:`dryfit.parallel.ranks.apply.connect` it.

    Args:
        module: The whole module, best on meta (:func:`dryfit.meta.build`); the same on each rank.
        plan: How it is cut.
        rank: Whose slices.
        checkpoint: A folder or file; None: every weight is missing.
        device: Where tensors go.
        dtype: Type of floating parameters; None keeps each one's own.
        missing: Weights the checkpoint may lack; drawn whole from the seed of the construction and cut then, so that
            the ranks hold slices of one tensor.

    Returns:
        Where each tensor came from.

    Raises:
        LoadError: As :func:`dryfit.meta.materialise` does; before anything is read.
        ShardError: The plan is not this module's, or the module is cut already.
        MachineError: There is no such device.
    """
    options = LoadOptions(torch.device(device), dtype, missing, mode=ReadMode.PRIVATE)
    stored = open_checkpoint(Path(checkpoint)) if checkpoint is not None else None
    return fill_slices(module, plan, rank, stored, options)


def fill_slices(
    module: nn.Module, plan: ShardPlan, rank: int, stored: CheckpointFiles | None, options: LoadOptions
) -> LoadReport:
    """Fill a module with a rank's slices from an opened checkpoint; see :func:`load`."""
    if SHARDED in vars(module):
        raise ShardError("loading slices of a model", "it is cut already", allowed="a whole model")
    check_plan(module, plan)
    parts = {
        name: part
        for name, shard in shards_of(module, plan).items()
        if (part := slice_on_rank(shard, rank, plan.degree)) is not None
    }
    report = fill(module, stored, replace(options, parts=parts))
    mark_sharded(module, rank, plan.degree)
    return report
