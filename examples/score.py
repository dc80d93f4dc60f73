"""How much of something a text says, as a number: Huber loss, mean squared error and Spearman's rank correlation."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from scipy.stats import spearmanr
from sklearn.metrics import mean_squared_error

from dryfit.tasks.base import Batch
from dryfit.tasks.encoder import EncoderTask
from dryfit.tasks.rows import Readable, Row
from dryfit.tasks.tokens import TokenSet


class ScoreTask(EncoderTask):
    required = frozenset()  # of dryfit's own columns it needs none but the text
    further = ("score",)  # this one stands in each row's extra
    knobs = MappingProxyType({"delta": 1.0})  # keys of [own], with their defaults
    num_outputs = 1

    def labels(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.tensor([float(row.extra["score"]) for row in rows])

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(float(len(batch["labels"])))

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        scores = batch["labels"].to(outputs)
        return F.huber_loss(outputs[:, 0], scores, reduction="sum", delta=self.context.own["delta"])

    def metric_names(self) -> tuple[str, ...]:
        return "spearman", "mse"

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        guess, truth = kept[:, 0].numpy(), tokens.labels_R.numpy()
        return {"spearman": spearmanr(truth, guess).statistic, "mse": mean_squared_error(truth, guess)}

    def predictions(
        self, kept: torch.Tensor, tokens: TokenSet, rows: Sequence[Readable]
    ) -> Iterator[dict[str, object]]:
        for score in kept[:, 0].tolist():
            yield {"score": score}
