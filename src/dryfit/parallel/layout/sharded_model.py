"""Build a rank's shard of a trial's model by tensor parallelism or FSDP, according to the execution plan."""

from pathlib import Path

from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.execution import ExecutionPlan
from dryfit.parallel.layout.fsdp import FsdpLayout
from dryfit.parallel.layout.layout import Layout
from dryfit.parallel.layout.model_slices import ModelRecipe, empty_model
from dryfit.parallel.layout.processes import ProcessGroup, RankGroup
from dryfit.parallel.layout.proved_plans import PLANS_FOLDER, proved_plan
from dryfit.parallel.layout.tensor_parallel import TensorParallelLayout
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.heads import freeze


def sharded_model(
    recipe: ModelRecipe, task: Task, group: ProcessGroup, plan: ExecutionPlan, cache_dir: Path
) -> tuple[TaskModel, LoadReport, Layout]:
    """Build this rank's shard, ready to train with the others.

    Args:
        recipe: How the model is made.
        task: Whose model it is.
        group: The processes, several of them.
        plan: Says how many there are, and whether they share tensors or rows.
        cache_dir: Keeps proved shard plans.

    Raises:
        ConfigError: The model cannot be sharded so.
        ShardError: The shard plan is wrong, or the ranks are not alike.
    """
    assert isinstance(group, RankGroup)
    whole = empty_model(recipe)
    if plan.dp > 1:
        layout = FsdpLayout(recipe, group)
    else:
        folder = cache_dir / PLANS_FOLDER
        # Rank 0 plans and proves, for all.
        shards = group.share(proved_plan(whole, task, group.size, folder).plan if group.rank == 0 else None)
        assert shards is not None
        layout = TensorParallelLayout(recipe, shards, group)
    model, report = layout.load(whole)
    freeze(model, recipe.regularization.freeze_layers, dropout=recipe.regularization.frozen_dropout)
    layout.connect(model)
    return model, report, layout
