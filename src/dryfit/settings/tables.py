"""The tables of a study file that decide what is learned, or name the user's own code."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dryfit.settings.choices import BaseFormat, ComputeFormat, Direction, Fusion, OptimizerName, Precision, Weighting
from dryfit.settings.user_code import NAME_PATTERN

# Keys that act only under some values of another key, their switch.
#
# Setting a key that then has no effect is an error. The study file is checked by this table before anything starts,
# and so are each trial's resolved settings.


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


# The base class of all tables of settings, and the table ``[own]`` of a user's own task.


Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Base of every settings table: frozen, strictly typed, and an unknown key is an error.

    Validate from JSON (``model_validate_json``): only there does strict mode take the text of an enum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Knob: TypeAlias = bool | int | float | str
"""A value of a key that a user's own task declares."""

OWN_KEY: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")
"""Pattern of the names of such keys."""


class OwnSettings(Settings):
    """``[own]``: keys that a task of your own declares."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Knob] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """Its keys with their values; attributes of this class may have the same names."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _named(self) -> "OwnSettings":
        for name in self.knobs:
            if not OWN_KEY.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a key: a small letter, then small letters, digits and _")
        return self


# The tables of a study file that decide *what is learned*: data, model, training, task.
#
# They are in core because both planes read them: the control plane checks and searches them, a trial's child process
# trains by them. Every field has its range, so that a bad value is refused before anything starts.


PACKAGED_MODEL: Final = "minilm"
"""Name of the encoder in the extra ``demo``."""

HUB_PREFIX: Final = "hub:"
"""Prefix of the names of hub data sets; any other source is a file."""

HUB_DEFAULT_SPLIT: Final = "train"
"""The split of a hub data set if none is named."""


class DataSettings(Settings):
    """``[data]``: where the rows are and which columns hold what.

    Either ``train`` and ``validation`` (and optionally ``test``) name a source each, or ``file`` names one source
    that is split by group. A source is a JSONL, CSV or Parquet file, or ``hub:NAME[:SPLIT]`` for a hub data set.
    """

    train: str | None = Field(
        default=None, description="training rows: a .jsonl, .csv or .parquet file, or hub:NAME:SPLIT"
    )
    validation: str | None = Field(default=None, description="rows every trial is scored on")
    test: str | None = Field(default=None, description="rows no search may see; optional")
    file: str | None = Field(default=None, description="one source instead of three, split below by group")
    validation_fraction: Fraction = Field(default=0.2, description="share of the groups of `file` used for validation")
    test_fraction: Fraction = Field(default=0.0, description="share of the groups of `file` kept for test")
    split_seed: int = Field(default=0, ge=0, description="seed of the split of `file`, and of `folds`")
    folds: int = Field(
        default=1,
        ge=1,
        le=20,
        description="a trial trains so many times, each time on train and validation without one part of their groups, "
        "on which it is scored: its value is the mean; 1: it trains once",
    )
    id: str = Field(default="id", description="column with a unique row id; made from the line number if absent")
    text: str = Field(default="text", description="column with the text")
    criterion: str = Field(default="criterion", description="column with the criterion; text alone is used if absent")
    label: str = Field(
        default="label",
        description="column with the label: an integer from 0, or a name; with multi_label a list of them; with "
        "num_labels = 1 a number",
    )
    group: str = Field(
        default="group", description="column whose values may not cross splits; each row alone if absent"
    )
    evidence: str = Field(
        default="evidence", description="column with [start, end) character spans; checked where present"
    )
    num_labels: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="number of classes, that of `labels` if these are given; 1 without multi_label: regression",
    )
    labels: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        strict=False,  # the validator below sees a list, as JSON has it
        description="names of the classes, from class 0 on; empty: integers, or the names of the training rows, sorted",
    )
    multi_label: bool = Field(
        default=False, description="a row may have any number of classes: each is decided for itself"
    )
    train_limit: int | None = Field(default=None, ge=1, description="use only the first rows of train")
    validation_limit: int | None = Field(default=None, ge=1, description="use only the first rows of validation")

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, table: Any) -> Any:
        """Let names alone say how many classes there are."""
        named = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
        labels = named.get("labels")
        counted = isinstance(labels, list | tuple) and "num_labels" not in named
        return {**named, "num_labels": len(cast("list[Any]", labels))} if counted and labels else cast("Any", table)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if any(not name.strip() or name != name.strip() for name in self.labels):
            raise ValueError("data.labels has a name that is empty, or has white space around it")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("data.labels has a name twice")
        return self

    @property
    def is_regression(self) -> bool:
        """Whether a label is a number that is to be met, and no class: one output, as transformers reads it too."""
        return self.num_labels == 1 and not self.multi_label

    def class_name(self, label: int) -> str:
        """Return the name of a class; its number where classes have no names."""
        return self.labels[label] if self.labels else str(label)


class ModelSettings(Settings):
    """``[model]``: which pretrained encoder."""

    name: str = Field(
        default=PACKAGED_MODEL, min_length=1, description="hub id, folder, or `minilm` (the packaged encoder)"
    )
    revision: str | None = Field(default=None, description="hub revision; the resolved commit is recorded")
    trust_remote_code: bool = Field(default=False, description="run code that comes with the model")


class TrainSettings(Settings):
    """``[train]``: how long and on what batches."""

    epochs: int = Field(default=2, ge=1, le=1000, description="passes over the training rows")
    batch_size: int = Field(default=16, ge=1, le=65536, description="EFFECTIVE batch: rows behind one optimizer step")
    max_length: int = Field(default=160, ge=8, le=131072, description="tokens a row is cut to")
    precision: Precision = Field(
        default=Precision.FP32,
        description="number format: fp32, tf32 (CUDA from capability 8.0), fp16 (CUDA only), bf16, or auto "
        "(fp32 or bf16: measured)",
    )
    group_by_length: bool = Field(default=True, description="batch rows of similar length together (less padding)")
    evals_per_epoch: int = Field(
        default=1, ge=1, le=1000, description="validations, reports and pruning points an epoch"
    )
    early_stopping: int = Field(
        default=0, ge=0, le=4096, description="stop after so many validations without a better one; 0: never"
    )
    early_stopping_min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="how much better than the last better validation one must be to count as better"
    )


class OptimSettings(Settings):
    """``[optim]``: the optimizer."""

    name: OptimizerName = Field(
        default="adamw",
        description="optimizer; lion, and adamw8bit and paged ones (CUDA moves their state), need extras lion, 8bit",
    )
    lr: Positive = Field(default=5e-5, le=10, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.01, description="not applied to norms and biases"
    )
    beta1: Fraction = Field(
        default=0.9, description="AdamW of any kind, radam, nadam, lion: decay of the first moment; sgd: momentum"
    )
    beta2: Fraction = Field(
        default=0.999,
        description="AdamW of any kind, radam, nadam: decay of the second moment; lion: of the only one (usually 0.99)",
    )
    eps: Positive = Field(default=1e-8, le=1, description="AdamW of any kind, radam, nadam: added to the denominator")
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="learning rate factor per encoder layer, from the head down; 1: none"
    )
    head_lr_factor: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0, description="learning rate of the head / lr"
    )


class SchedSettings(Settings):
    """``[sched]``: the learning rate over time."""

    name: Literal["linear", "cosine", "cosine_restarts", "polynomial", "one_cycle", "constant"] = Field(
        default="linear", description="shape after the warm-up"
    )
    warmup_ratio: Fraction = Field(default=0.06, description="share of the steps spent warming up")
    cycles: int = Field(default=2, ge=1, le=1000, description="cosine_restarts: cosines one after another")
    power: Annotated[float, Field(gt=0, le=10)] = Field(
        default=2.0, description="polynomial: exponent of the share of steps left; 1 is linear"
    )


class HeadSettings(Settings):
    """``[head]``: from token vectors to class scores."""

    pooling: Literal["cls", "mean", "max", "attention"] = Field(
        default="mean", description="how token vectors become one; attention learns a weight for each token"
    )
    layers: int = Field(default=0, ge=0, le=8, description="hidden layers between pooling and scores")
    hidden: int = Field(default=128, ge=1, le=65536, description="width of those layers")
    activation: Literal["gelu", "relu", "tanh", "silu"] = Field(default="gelu", description="their activation")
    dropout: Fraction = Field(default=0.1, description="dropout before each linear layer of the head")
    threshold: Literal["fixed", "calibrated"] = Field(
        default="fixed",
        description="when a class is found: fixed (the likeliest; with multi_label at one half), or at a probability "
        "fitted on validation (two classes, or multi_label)",
    )


class LossSettings(Settings):
    """``[loss]``: what is minimised."""

    name: Literal["cross_entropy", "focal"] = Field(default="cross_entropy", description="loss function")
    label_smoothing: Fraction = Field(default=0.0, description="cross_entropy: probability spread over all classes")
    gamma: Annotated[float, Field(ge=0, le=10)] = Field(
        default=2.0, description="focal: how much easy rows are played down"
    )
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="focal, two classes or multi_label: weight of class 1, 1 - alpha of 0; unset: none"
    )
    class_balance: Literal["none", "weighted", "effective"] = Field(
        default="none", description="weight classes by inverse frequency, or by effective number of rows"
    )
    effective_beta: Fraction = Field(
        default=0.999, description="class_balance effective: how much each further row of a class still adds"
    )


class SpanSettings(Settings):
    """``[span]``: from long texts to windows, and from their scores to one span or none."""

    doc_stride: int = Field(
        default=64, ge=0, le=131072, description="tokens of a text that two windows next to each other share"
    )
    max_answer_len: int = Field(default=64, ge=1, le=131072, description="tokens of a span at most")
    topk: int = Field(default=20, ge=1, le=100, description="starts and ends of a window that are put together")
    nms_iou: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="of spans that overlap more (characters, intersection / union) only the best stays"
    )
    reranker: Literal["sum", "product", "softmax"] = Field(
        default="sum", description="score of a span: its logits' sum, its ends' probabilities, or its share of them"
    )
    null_policy: Literal["none", "threshold", "ratio", "calibrated"] = Field(
        default="calibrated", description="when a row has no span: never, by a number, or by one fitted on validation"
    )
    null_threshold: Annotated[float, Field(ge=-1000, le=1000)] = Field(
        default=0.0, description="null_policy threshold: no span where null is better than the best by more than this"
    )
    null_ratio: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=1.0, description="null_policy ratio: no span where null is more than so many times as probable"
    )
    negatives: Annotated[float, Field(ge=0, le=1000)] | None = Field(
        default=None, description="windows without a span that are trained on for each with one; unset: all"
    )


class MultitaskSettings(Settings):
    """``[multitask]``: a class and a span learned at once; for the tasks share and joint."""

    criteria_weight: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="fixed: weight of the class's loss; that of the span has the rest"
    )
    weighting: Weighting = Field(
        default=Weighting.FIXED,
        description="fixed: by criteria_weight; uncertainty: two learned variances weigh the losses",
    )
    criteria_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of an epoch's windows that train the class, the others the span; unset: both"
    )


class JointSettings(Settings):
    """``[joint]``: the encoder of the criterion beside that of the text; for the task joint."""

    criteria_model: str | None = Field(
        default=None, min_length=1, description="the criterion's encoder, as model.name; unset: the same model"
    )
    criterion_length: int = Field(default=64, ge=8, le=131072, description="tokens a criterion is cut to")
    fusion: Fusion = Field(
        default=Fusion.CONCAT, description="how the criterion's vector meets the vectors of the text's tokens"
    )
    share_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="share of the layers, from the embeddings up, that both encoders have in common"
    )


class RegularizationSettings(Settings):
    """``[regularization]``: what holds the model back."""

    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = Field(default=1.0, description="gradient clipping; 0: none")
    dropout: Fraction | None = Field(default=None, description="hidden dropout of the encoder; unset: as pretrained")
    attention_dropout: Fraction | None = Field(
        default=None, description="attention dropout of the encoder; unset: as is"
    )
    freeze_layers: int = Field(
        default=0, ge=0, le=1000, description="embeddings and so many first layers stay as they are"
    )
    frozen_dropout: bool = Field(
        default=True, description="dropout in frozen layers too; false: what is frozen stays in eval mode"
    )


class LoraSettings(Settings):
    """``[lora]``: small trainable adapters beside frozen weights; for the task causal-lm."""

    r: int = Field(default=16, ge=0, le=4096, description="rank of the adapters; 0: none, all weights are trained")
    alpha: Positive = Field(default=32.0, description="adapters are scaled by alpha / r")
    dropout: Fraction = Field(default=0.05, description="dropout before the adapters")
    targets: str = Field(
        default="all-linear", description="linear layers that get one: all-linear, or names with commas: q_proj,v_proj"
    )
    base: BaseFormat | None = Field(
        default=None,
        description="number format of the frozen weights: fp32, fp16, bf16, or of their linear layers nf4 or int8 "
        "(the extra 8bit); unset: that of train.precision",
    )
    double_quant: bool = Field(default=False, description="nf4: the scales of the weights are quantised too")
    compute: ComputeFormat | None = Field(
        default=None,
        description="nf4, int8: what layers compute in, and the number format of all that is not quantised; "
        "unset: that of train.precision",
    )


_PROMPT_FIELDS: Final = frozenset({"criterion", "text"})


class LmSettings(Settings):
    """``[lm]``: what a causal language model is shown of a row, and what of that it learns; for the task causal-lm."""

    format: Literal["text", "instruction", "criteria", "evidence", "both"] = Field(
        default="criteria",
        description="text (each text as it is), instruction (criterion asks, text answers), criteria (answer: the "
        "label's word), evidence (answer: the evidence), or both: two prompts a row",
    )
    criteria_prompt: str = Field(
        default="Criterion: {criterion}\nText: {text}\nDoes the text meet the criterion? Answer: ",
        description="criteria, both: the prompt",
    )
    evidence_prompt: str = Field(
        default="Criterion: {criterion}\nText: {text}\nQuote the evidence for the criterion: ",
        description="evidence, both: the prompt",
    )
    answers: str = Field(
        default="no,yes", description="criteria, both: words of the labels from 0, with commas between them"
    )
    no_evidence: str = Field(
        default="none", min_length=1, description="evidence, both: the answer where a row has no evidence"
    )
    mix: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="both: weight of a token of the criteria answers; 1 - mix for the evidence answers"
    )
    chat: Literal["auto", "on", "off"] = Field(
        default="auto", description="the tokenizer's chat template around prompt and answer: auto where it has one"
    )
    learn_prompt: bool = Field(default=False, description="learn the tokens of the prompt too, not the answer's alone")
    packing: bool = Field(
        default=False, description="several rows in one sequence of max_length, none of which sees another"
    )
    generate_rows: int = Field(
        default=32, ge=0, le=100_000, description="validation rows that are answered, to be measured; 0: none"
    )
    max_new_tokens: int = Field(default=32, ge=1, le=4096, description="longest answer that is generated, in tokens")
    num_beams: int = Field(
        default=1,
        ge=1,
        le=64,
        description="beams of the search for an answer; 1: the likeliest token each time",
    )
    metric: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        default=None,
        description="a function of your own that measures answers: `package.module:function`, or `file.py:function`",
    )

    @field_validator("criteria_prompt", "evidence_prompt")
    @classmethod
    def _has_text(cls, prompt: str) -> str:
        names = [name for _, name, spec, turn in Formatter().parse(prompt) if name is not None or spec or turn]
        if "text" not in names or not _PROMPT_FIELDS.issuperset(names):
            raise ValueError("a prompt has {text}, may have {criterion}, and writes any other brace twice: {{ }}")
        return prompt


class TrialSettings(Settings):
    """All tables that decide what is learned; any of their keys may be searched."""

    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    optim: OptimSettings = OptimSettings()
    sched: SchedSettings = SchedSettings()
    head: HeadSettings = HeadSettings()
    loss: LossSettings = LossSettings()
    span: SpanSettings = SpanSettings()
    multitask: MultitaskSettings = MultitaskSettings()
    joint: JointSettings = JointSettings()
    regularization: RegularizationSettings = RegularizationSettings()
    lora: LoraSettings = LoraSettings()
    lm: LmSettings = LmSettings()
    own: OwnSettings = OwnSettings()

    def value(self, key: str) -> Any:
        """Return the value of a key by its dotted name: ``optim.lr``."""
        table, _, name = key.partition(".")
        return getattr(getattr(self, table), name)

    def is_changed(self, key: str) -> bool:
        """Whether a key, by its dotted name, differs from its default."""
        table, _, name = key.partition(".")
        settings: Settings = getattr(self, table)
        field = type(settings).model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data=dict(settings))
        return getattr(settings, name) != default


# The tables of a study file that name a user's own code: ``objective``, ``trainer`` and ``script``.


_NAME = r"^[^:]+:[\w.]+$"


class OwnCode(Settings):
    """What all these tables say of the code that they name."""

    version: int = Field(
        default=1, ge=0, description="another number: earlier values do not compare, and a new generation begins"
    )
    preload: tuple[str, ...] = Field(
        default=(), description="installed modules that are imported once, before any trial: what it needs and is slow"
    )
    secrets: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(), description="names of environment variables with secrets that it reads; no trial has any other"
    )


class OwnFunction(OwnCode):
    """What two of them say of a function, beside its name."""

    paths: tuple[str, ...] = Field(
        default=(".",),
        description="folders it is imported from, beside installed packages; unset: this file's, and the current one",
    )


class CalledCode(OwnFunction):
    """The user's own code of a study, whichever table names it.

    Attributes:
        function: ``place:name`` of a function, or the command of a script.
        paths: Of a script, the folder that it is run in.
    """

    function: str
    goals: tuple[str, ...] = Field(
        default=("value",), min_length=1, description="names of the numbers it returns, in their order"
    )
    directions: tuple[Direction, ...] | None = Field(
        default=None, description="a direction for each of the goals; unset: all are minimized"
    )


class ObjectiveSettings(CalledCode):
    """``[objective]``: a function of your own, for the task ``objective``."""

    function: str = Field(
        pattern=_NAME,
        description="what is called for each trial: `package.module:function`, or `file.py:function`",
    )


class TrainerSettings(OwnFunction):
    """``[trainer]``: a function that makes your own Trainer, for the task ``trainer``."""

    make: str = Field(
        pattern=_NAME,
        description="what makes the Trainer of a trial: `package.module:function`, or `file.py:function`",
    )


class ScriptSettings(OwnCode):
    """``[script]``: a training script of your own with its arguments, for the task ``script``."""

    command: str = Field(
        min_length=1,
        description="what is run for each trial: `train.py --lr {lr}`, with a placeholder for each key of `[space]`",
    )
    folder: str = Field(default=".", description="folder that it is run in; unset: this file's")
    results: str | None = Field(
        default=None,
        pattern=r"^[^/]",
        description="a file of JSON lines that it writes below `{folder}`: a report each, with `step` and the metric",
    )
