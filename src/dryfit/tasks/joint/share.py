"""The task ``share``: a class and a span by two heads on one encoder of (criterion, text), or text alone."""

from typing import final

from dryfit.meta.construction.construction import build
from dryfit.tasks.base import MakeBase, TaskModel
from dryfit.tasks.joint.class_and_span import ClassAndSpanTask
from dryfit.tasks.joint.two_heads import SharedEncoder


@final
class ShareTask(ClassAndSpanTask):
    """A class and a span of each row, from windows that one encoder reads."""

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return the encoder with its two heads."""
        settings = self.context.settings
        encoder = make(settings.model, self.kind)
        weighting = settings.multitask.weighting
        return build(lambda: SharedEncoder(encoder, self.head, weighting, self.limits), seed=seed)
