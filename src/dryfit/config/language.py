"""Checks between keys of a study file with the task ``causal-lm``."""

from dryfit.config.problems import Problem
from dryfit.config.schema import StudyConfig
from dryfit.core.settings.choices import BaseFormat, BuiltInTask, Metric, Precision
from dryfit.core.settings.execution import DeviceKind

_SCALED = (BaseFormat.FP16, BaseFormat.INT8)
_ASKS_LABELS = ("criteria", "both")


def language_problems(config: StudyConfig) -> list[Problem]:
    """Return all contradictions between keys; searched values are checked in each trial."""
    if config.study.task is not BuiltInTask.CAUSAL_LM:
        return []
    return [*_searched(config), *_base(config), *_answers(config), *_generated(config)]


def _searched(config: StudyConfig) -> list[Problem]:
    """Refuse a searched format: it decides which columns rows must have, and what the loss is."""
    if "lm.format" not in config.space:
        return []
    found = "is searched, and losses of different formats do not compare"
    return [Problem(("space", "lm.format"), found, "one format", "run a study of each")]


def _base(config: StudyConfig) -> list[Problem]:
    lora, precision = config.lora, config.train.precision
    if not lora.r and "lora.r" not in config.space:
        return []
    found = f'is "{lora.base}"'
    if lora.base is BaseFormat.INT8 and config.execution.device == DeviceKind.CPU:
        return [Problem(("lora", "base"), f"{found}, and execution.device is cpu", "int8 on CUDA only", 'use "bf16"')]
    searched = {"lora.base", "train.precision"} & config.space.keys()
    if lora.base in _SCALED and precision is Precision.FP32 and not searched:
        found += f", and train.precision is {precision}: gradients would pass through fp16 without a scale"
        allowed = 'train.precision = "fp16" or "bf16" with it'
        return [Problem(("lora", "base"), found, allowed, "or leave it out: the base then has that format")]
    return []


def _answers(config: StudyConfig) -> list[Problem]:
    data, lm = config.data, config.lm
    if lm.format not in _ASKS_LABELS:
        return []
    if data.multi_label:
        found = f'is true, and lm.format is "{lm.format}", whose answer is the word of one label'
        return [Problem(("data", "multi_label"), found, "false, or another lm.format")]
    words = [word.strip() for word in lm.answers.split(",")]
    if "lm.answers" in config.space or (len(set(words)) == data.num_labels == len(words) and all(words)):
        return []
    found = f"is {lm.answers!r}, and data.num_labels is {data.num_labels}"
    return [Problem(("lm", "answers"), found, "a different word for each label, with commas between them")]


def _generated(config: StudyConfig) -> list[Problem]:
    """Refuse exact match as a goal if no answers are generated."""
    lm, goals = config.lm, (config.study.metric, *config.study.also)
    if Metric.EXACT_MATCH not in goals or (lm.format != "text" and lm.generate_rows):
        return []
    why = "there are no answers" if lm.format == "text" else "no answer is generated"
    found = f'asks for exact_match, and with lm.format = "{lm.format}", lm.generate_rows = {lm.generate_rows} {why}'
    return [Problem(("study", "metric"), found, str(Metric.LOSS), "or set lm.generate_rows")]
