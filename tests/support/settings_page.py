"""The page of a trial's settings, rendered from the types that check them.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/settings_page.py``.
"""

import json
from enum import Enum
from pathlib import Path

from dryfit.config.schema import StudyConfig
from dryfit.config.schema_json import TABLES, key_description, legal_values
from dryfit.core.settings.choices import Metric
from dryfit.core.settings.switches import TRIAL_NEEDS
from dryfit.core.settings.tables import DataSettings, Settings, TrialSettings
from dryfit.core.settings.task_facts import BUILT_IN, OWN_TABLE, metrics_of_classes, reads

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

_INTRODUCTION = """\
# Settings of a trial

Every key of the tables below but those of `[data]` may be searched: `"optim.lr" = {low = 1e-5, high = 1e-4, log =
true}` in `[space]`. A key that the value of another key leaves unread is refused where it is set, and where it is
searched without a `when`. `dryfit schema` prints the other tables too. Formulas and sources stand at the end.

"""

_DEFINITIONS = """\
## Classes

With `data.multi_label = false` a row has one of `num_labels` classes and the model's scores go through a softmax;
two classes are two scores. With `data.multi_label = true` a row has any number of the classes, none included:
`label` holds a list of class numbers (in CSV as JSON, `"[0, 2]"`), each score goes through a sigmoid of its own,
and a class counts as found at a probability of one half. Every class must have training rows; with `multi_label` it
must also be absent in some.

With `data.num_labels = 1` and no `multi_label` a label is a number: regression, for *criteria* and your own
tasks. The model has one score, which is the number; the loss is the mean squared error, of numbers as they
stand in the rows: a head begins near 0, so numbers of mean 0 and deviation 1 are learned soonest.
`study.metric` is then `mse` unless it is said. `[loss]` and `head.threshold` are not read, and refused. A trial
has collapsed where its numbers spread over less than a hundredth of the standard deviation of the right ones.

`head.threshold = "calibrated"` finds a class above a probability that is fitted on the validation rows instead: of
two classes that of class 1, by `study.metric` where it depends on the decision (`f1_macro`, `f1`, `accuracy`,
`balanced_accuracy`, `mcc`), else by `f1_macro`; with `multi_label` one for each class, by the F1 of that class,
whatever the metric: together they are the best by `f1_macro`, and not always by `accuracy`, for which a row must be
right in all classes. More than two classes of which a row has one are refused. Every cut between two rows is tried,
and one half; of equally good ones the nearest to one half is taken. It is kept with the weights and decides
validation, test, `dryfit predict`, and for an ensemble what the mean of its members says. Probabilities, and so
`loss`, `auroc` and `ece`, do not depend on it. As any choice by validation it makes validation look a little better
than it is. A model that is trained with validation gets the threshold of its trial's best weights, and one half,
with a word, where they are gone.

## Number formats

`train.precision` is the format of forward and backward passes; weights and optimizer state are fp32. `fp16` and
`bf16` run under autocast. `tf32` is fp32 whose products of matrices read 10 of the 23 bits of each fraction and add up
in fp32: on tensor cores, so on a GPU from compute capability 8.0 on, and refused elsewhere. It changes what is learned,
and takes the memory of `fp32`. With `fp32` convolutions may still run in TF32 there: that is torch's own rule, and no
setting of torch is changed.

## Pooling

`cls` takes the vector of the classification token, `mean` and `max` go over the tokens of a row, padding left out.
`attention` is a mean with learned weights, `softmax(v . tanh(W h + b))` over a row's tokens (Yang et al. 2016,
"Hierarchical Attention Networks for Document Classification", equations 5 to 7). `W` is as wide as the encoder.
These weights belong to the head: they learn at `lr * head_lr_factor`.

## Losses

The loss of a batch is the weighted mean over its rows: the sum of weight times loss, divided by the sum of weights.
With `multi_label` it is the weighted mean over all (row, class) pairs, so the number of classes does not change its
scale. It is summed micro-batch by micro-batch and divided by the whole batch's weights: how a batch is cut changes
nothing but rounding.

| name | one class of several | any number of classes |
|---|---|---|
| `cross_entropy` | `-log p` of the row's class: torch's `CrossEntropyLoss` | torch's `BCEWithLogitsLoss` |
| `focal` | `a * (1 - p)^gamma * -log p` of the row's class | the same of each class's presence or absence |

Focal loss is equation 5 of Lin et al. 2017 (arXiv:1708.02002). `a` is 1 where `alpha` is unset; otherwise `alpha`
for class 1 (a class that is present) and `1 - alpha` for class 0 (one that is absent). With more than two classes,
of which a row has one, `alpha` is refused. `alpha` is part of the loss, `class_balance` part of the mean: both may
be set, and then multiply. Unlike `class_balance`, `alpha` makes the loss smaller as a whole.

`label_smoothing = s` gives the row's class `1 - s + s / C` and each other one `s / C` (Szegedy et al. 2016,
arXiv:1512.00567, section 7). With `multi_label` a target `y` becomes `y * (1 - s) + s / 2`.

`class_balance` weighs a class with `n` training rows by `1 / n` (`weighted`), or by `(1 - b) / (1 - b^n)` with `b =
effective_beta` (`effective`: Cui et al. 2019, arXiv:1901.05555, equation 2), scaled so that an average row weighs
one. With `multi_label` each class is a problem of two sides, the rows that have it and those that do not, and each
side is weighed so; all classes then have the same share in the loss.

Of spans the classes are the tokens that one may start or end with: those of the text, and null
([tasks.md](tasks.md#evidence)). The loss of a window is the mean of its start's and its end's, that of a batch the
mean over its windows; `s / C` is spread over these tokens alone.

## Optimizers

`adamw`, `radam` (Liu et al. 2020, arXiv:1908.03265), `nadam` (Dozat 2016) and `sgd` are torch's, `adafactor`
(Shazeer and Stern 2018, arXiv:1804.04235) is transformers' with its own step sizes off, `lion` (Chen et al. 2023,
arXiv:2302.06675) comes from the extra `lion`, `adamw8bit` and the paged ones (Dettmers et al. 2023, arXiv:2305.14314)
from the extra `8bit`. Weight decay is decoupled in all of them but `sgd`, and not applied to norms and biases.
`layer_decay` and `freeze_layers` need layers that have weights of their own: ALBERT's are shared, and both are
refused there. With `frozen_dropout = false`, which new study files and presets have, frozen embeddings and layers stay
in eval mode, so that trials can share what they compute ([execution.md](execution.md#frozen-layers-compute-once)).

## Schedules

The rate of each group of parameters is its own peak times a factor. But for `one_cycle` the factor rises linearly
from 0 over `warmup_ratio` of the steps (at most all but the last), and then, with `x` going from 0 to 1 over the
rest:

| name | factor after the warm-up |
|---|---|
| `linear` | `1 - x` |
| `cosine` | `(1 + cos(pi x)) / 2` |
| `cosine_restarts` | the cosine `cycles` times, each from 1 to 0 |
| `polynomial` | `(1 - x)^power` |
| `constant` | 1 |

`one_cycle` is torch's `OneCycleLR` (Smith and Topin 2018, arXiv:1708.07120): it rises as a cosine from 1/25 to 1
over `warmup_ratio` of the steps and falls as one to 1/250000. Momentum is not cycled: betas stay what the study
says. A warm-up of one step or less is none.

## Metrics

All are computed on the validation rows. `loss`, `ece`, `mse` and `mae` are minimised, the others maximised, unless
`study.direction` says otherwise.

"""

_METRICS = {
    Metric.F1_MACRO: "mean over the classes of F1; 0 for a class that neither a row nor a guess has",
    Metric.F1: "F1 of class 1",
    Metric.ACCURACY: "share of rows whose guess is right; with `multi_label` right in every class",
    Metric.BALANCED_ACCURACY: "mean recall of the classes that are there",
    Metric.MCC: "Matthews' correlation coefficient; 0 where it is not defined",
    Metric.AUROC: (
        "area under the ROC curve: of class 1 of two, else each class against the rest, the mean of those that some "
        "rows have and some have not; NaN where there is none"
    ),
    Metric.ECE: (
        "expected calibration error, 15 bins of equal width, l1 (Guo et al. 2017, arXiv:1706.04599): of the "
        "likeliest class's probability; with `multi_label` of each class's presence, over all (row, class) pairs"
    ),
    Metric.LOSS: (
        "plain cross entropy (binary with `multi_label`; of a regression `mse`), whatever the training loss: trials "
        "compare by it; of causal-lm the mean over the learned tokens, of share and joint the mean of the class's and "
        "the span's"
    ),
    Metric.TOKEN_F1: (
        "F1 over the words of the span found and of the best-matching true one; 1 where both are none; of causal-lm "
        "over those of the quoted and the wanted evidence"
    ),
    Metric.EXACT_MATCH: "share of rows whose span, or whose generated answer, is exactly a true one; none for none",
    Metric.SPAN_IOU: "intersection over union of the characters of the span found and of the best-matching true one",
    Metric.NULL_PRECISION: "of the rows where no span was found, the share that has none; 0 where one was always found",
    Metric.NULL_RECALL: "of the rows that have no span, the share where none was found; NaN where all have one",
    Metric.TOKEN_F1_HAS: "`token_f1` of the rows that have a true span; NaN where there is none",
    Metric.SPAN_BALANCED: (
        "the mean of `token_f1_has` and `null_recall`, so that rows with and without a span count alike; where one of "
        "them is NaN, the other"
    ),
    Metric.COMBINED: "the mean of `f1_macro` and `token_f1`",
    Metric.MSE: "mean squared error; with `data.num_labels = 1`, as the next three",
    Metric.MAE: "mean absolute error",
    Metric.PEARSON: "Pearson's correlation of the numbers; NaN where one of the two sides has one number alone",
    Metric.SPEARMAN: "Spearman's: that of their ranks, of equal numbers the mean rank; NaN likewise",
}


def render() -> str:
    """The whole page."""
    tables = [_table(table) for table in ("data", *TrialSettings.model_fields)]
    metrics = ["| metric | what | tasks | one class of several | `multi_label` |", "|---|---|---|---|---|"]
    metrics += [f"| `{metric}` | {_METRICS[metric]} | {_tasks(metric)} | {_whose(metric)} |" for metric in Metric]
    source = "\nscikit-learn computes them, SciPy correlations, torch the loss, dryfit itself the calibration error.\n"
    return _INTRODUCTION + "\n".join(tables) + "\n" + _DEFINITIONS + "\n".join(metrics) + "\n" + source


def _table(table: str) -> str:
    if table == OWN_TABLE:
        said = "their names, defaults and types are its own ([own-task.md](own-task.md))"
        return f"## `[{table}]`\n\n{key_description((table,)).capitalize()}: {said}.\n"
    lines = [f"## `[{table}]`", "", key_description((table,)).capitalize() + _readers(table), ""]
    lines += ["| key | default | takes | what |", "|---|---|---|---|"]
    needs = {one.key: one.condition for one in TRIAL_NEEDS}
    for key in TABLES[table]:
        what = key_description((table, key))
        if f"{table}.{key}" in needs:
            what += f". Read with {needs[f'{table}.{key}']}"
        lines.append(f"| `{key}` | {_default(table, key)} | {legal_values((table, key))} | {what} |")
    return "\n".join(lines) + "\n"


def _default(table: str, key: str) -> str:
    settings: Settings = getattr(StudyConfig(), table)
    value = type(settings).model_fields[key].default
    if value is None:
        return "unset"
    return f"`{json.dumps(value.value if isinstance(value, Enum) else value)}`"


def _readers(table: str) -> str:
    """The tasks that read a table, where not all do."""
    trained = [task for task, facts in BUILT_IN.items() if not facts.calls_function]
    if table not in TrialSettings.model_fields or all(reads(task, table) for task in trained):
        return ""
    return f" Read by {', '.join(task for task in trained if reads(task, table))}."


def _tasks(metric: Metric) -> str:
    kinds = (DataSettings(), DataSettings(num_labels=1))
    return ", ".join(
        task
        for task, facts in BUILT_IN.items()
        if any(metric in facts.metrics(data) for data in (kinds if facts.numbers else kinds[:1]))
    )


def _whose(metric: Metric) -> str:
    if metric not in metrics_of_classes(DataSettings()):
        return "|"
    of_two, of_more = (metric in metrics_of_classes(DataSettings(num_labels=classes)) for classes in (2, 3))
    several = metric in metrics_of_classes(DataSettings(num_labels=3, multi_label=True))
    return f"{'yes' if of_more else 'two classes' if of_two else 'no'} | {'yes' if several else 'no'}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
