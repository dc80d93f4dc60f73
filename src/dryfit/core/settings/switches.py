"""Keys that act only under some values of another key, their switch.

Setting a key that then has no effect is an error. The study file is checked by this table before anything starts, and
so are each trial's resolved settings.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Needs:
    """``key`` is read only where ``switch`` has one of ``values``.

    Attributes:
        words: The condition in words; made from the values if empty.
    """

    key: str
    switch: str
    values: tuple[str | int | None, ...]
    words: str = ""
    may_idle: bool = False
    """Whether it may be set where it does not act: new files say it in advance, for whoever turns the switch."""

    @property
    def condition(self) -> str:
        """The condition under which the key acts, in words."""
        return self.words or f"{self.switch} {' or '.join(map(str, self.values))}"


_ADAPTIVE: Final = ("adamw", "adamw8bit", "radam", "nadam", "paged_adamw", "paged_adamw8bit")
_HIDDEN_LAYERS: Final = tuple(range(1, 9))
_SOME: Final = tuple(range(1, 4097))
_FREEZES: Final = "regularization.freeze_layers"
_ASKS: Final = ("instruction", "criteria", "evidence", "both")

TRIAL_NEEDS: Final = (
    Needs("train.early_stopping_min_delta", "train.early_stopping", _SOME, "train.early_stopping of 1 or more"),
    Needs("optim.beta1", "optim.name", (*_ADAPTIVE, "lion", "sgd")),
    Needs("optim.beta2", "optim.name", (*_ADAPTIVE, "lion")),
    Needs("optim.eps", "optim.name", _ADAPTIVE),
    Needs("sched.cycles", "sched.name", ("cosine_restarts",)),
    Needs("sched.power", "sched.name", ("polynomial",)),
    Needs("head.hidden", "head.layers", _HIDDEN_LAYERS, "head.layers of 1 or more"),
    Needs("head.activation", "head.layers", _HIDDEN_LAYERS, "head.layers of 1 or more"),
    Needs("loss.label_smoothing", "loss.name", ("cross_entropy",)),
    Needs("loss.gamma", "loss.name", ("focal",)),
    Needs("loss.alpha", "loss.name", ("focal",)),
    Needs("loss.effective_beta", "loss.class_balance", ("effective",)),
    Needs("regularization.frozen_dropout", _FREEZES, _SOME, f"{_FREEZES} of 1 or more", may_idle=True),
    *(Needs(f"lora.{key}", "lora.r", _SOME, "lora.r of 1 or more") for key in ("alpha", "dropout", "targets", "base")),
    Needs("lora.double_quant", "lora.base", ("nf4",)),
    Needs("lora.compute", "lora.base", ("nf4", "int8")),
    Needs("lm.criteria_prompt", "lm.format", ("criteria", "both")),
    Needs("lm.answers", "lm.format", ("criteria", "both")),
    Needs("lm.evidence_prompt", "lm.format", ("evidence", "both")),
    Needs("lm.no_evidence", "lm.format", ("evidence", "both")),
    Needs("lm.mix", "lm.format", ("both",)),
    Needs("lm.chat", "lm.format", _ASKS),
    Needs("lm.learn_prompt", "lm.format", _ASKS),
    Needs("lm.generate_rows", "lm.format", _ASKS),
    Needs("lm.metric", "lm.format", _ASKS),
    Needs("multitask.criteria_weight", "multitask.weighting", ("fixed",)),
    Needs("joint.share_ratio", "joint.criteria_model", (None,), "joint.criteria_model unset: one model for both"),
    Needs("span.null_threshold", "span.null_policy", ("threshold",)),
    Needs("span.null_ratio", "span.null_policy", ("ratio",)),
)
