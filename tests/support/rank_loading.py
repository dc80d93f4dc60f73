"""A pretrained model on one rank, filled and put together by the code that trials use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind, fill_pretrained
from dryfit.parallel import layout
from dryfit.parallel.collectives import AbsentRanks, Ranks
from dryfit.parallel.processes import RankGroup
from dryfit.parallel.tensor_parallel import TensorParallelLayout
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.sharding import ShardPlan
from dryfit.settings.tables import ModelSettings, RegularizationSettings
from dryfit.tasks.base import MakeBase, TaskModel


class Bare(TaskModel):
    """A pretrained model as a task's, with nothing on it."""

    drawn = ()

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def base(self) -> PreTrainedModel:
        """The pretrained model."""
        return self.inner


class LoadedRank:
    """A rank's slices of a model, read from a folder.

    Args:
        on_meta: Constructs the model without memory.
        plan: Of that model.
        folder: Holds its weights.
        ranks: The rank's end of the collectives; a number stands for a rank without the others.
        dtype: Of the weights; None keeps each parameter's own.
        device: Where they go.
    """

    def __init__(
        self,
        on_meta: Callable[[], nn.Module],
        plan: ShardPlan,
        folder: Path,
        ranks: Ranks | int,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        ends = AbsentRanks(ranks, plan.degree) if isinstance(ranks, int) else ranks
        group = cast("RankGroup", SimpleNamespace(rank=ends.rank, size=ends.degree, tensors=ends))
        source = ModelSettings(name=str(folder))

        def make(base: MakeBase) -> TaskModel:
            return Bare(base(source, Kind.CAUSAL_LM))

        self._on_meta, self._dtype = on_meta, dtype
        with self._constructing():
            recipe = layout.ModelRecipe(make, RegularizationSettings(), device)
            whole = layout.empty_model(recipe)
            self._layout = TensorParallelLayout(recipe, _of_inner(plan), group)
            self._model, self.report = self._layout.load(whole)

    @contextmanager
    def _constructing(self) -> Iterator[None]:
        """Trials construct encoders and decoders from files; here any architecture is constructed by its test."""

        def fill(model: Any, source: ModelSettings, kind: Kind, _frozen: None, options: LoadOptions) -> LoadReport:
            return fill_pretrained(model, source, kind, replace(options, dtype=self._dtype))

        with (
            mock.patch.object(layout, "empty_stack", side_effect=lambda *_, **__: self._on_meta()),
            mock.patch.object(layout, "fill_frozen", side_effect=fill),
        ):
            yield

    @property
    def module(self) -> Any:
        """The pretrained model."""
        return self._model.base()

    def connected(self) -> Any:
        """Let it compute with the others."""
        self._layout.connect(self._model)
        return self.module

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state, put together on rank 0; empty on the others. Every rank calls it."""
        with self._constructing():
            whole = self._layout.whole(self._model)
        return whole.base().state_dict() if whole is not None else {}


def _of_inner(plan: ShardPlan) -> ShardPlan:
    """A plan with the names that parameters and modules have within :class:`Bare`."""
    parameters = {
        f"inner.{name}": row.model_copy(update={"tied_to": row.tied_to and f"inner.{row.tied_to}"})
        for name, row in plan.parameters.items()
    }
    modules = {f"inner.{path}".removesuffix("."): row for path, row in plan.modules.items()}
    return plan.model_copy(update={"parameters": parameters, "modules": modules})
