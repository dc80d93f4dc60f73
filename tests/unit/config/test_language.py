"""What contradicts each other in a study file of a causal language model."""

from pathlib import Path

import pytest

from dryfit.config.load import load_study_text
from dryfit.core.errors import ConfigError

TEXT = """
[study]
task = "causal-lm"
metric = "loss"
[data]
train = "a.jsonl"
validation = "b.jsonl"
[model]
name = "x/y"
"""


def check(*overrides: str) -> None:
    load_study_text(TEXT, Path("study.toml"), overrides)


def test_what_is_legal() -> None:
    check()
    check("lora.base=fp16", "train.precision=bf16")
    check("lora.r=0")
    check("lora.base=int8", "train.precision=bf16")
    check("lora.base=int8", "lora.compute=fp16", "train.precision=fp16")
    check("lora.base=nf4", "lora.double_quant=true", "lora.compute=bf16")
    check("lora.base=nf4")
    check('space.lora.base=["nf4","bf16"]', "train.precision=bf16")
    check("data.num_labels=3", "lm.answers=a,b,c", "study.metric=exact_match")
    check("data.multi_label=true", "lm.format=evidence")
    check("lm.format=evidence", "study.metric=token_f1")
    check("lm.metric=judge.py:rouge", "study.metric=rouge", "study.direction=maximize", "space.lm.num_beams=[1,4]")
    check(
        'space.lora.base=["fp16","fp32"]', 'space.train.precision=["bf16"]', "space.lm.mix=[0.5,0.9]", "lm.format=both"
    )


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["lora.base=fp16"], "gradients would pass through fp16 without a scale"),
        (["lora.base=int8"], "LLM.int8() computes in 16 bits"),
        (["lora.base=int8", "train.precision=bf16", "lora.compute=fp32"], "LLM.int8() computes in 16 bits"),
        (["lora.base=nf4", "train.precision=bf16", "lora.compute=fp16"], "without a scale"),
        (["lora.double_quant=true"], "lora.base nf4"),
        (["lora.base=bf16", "lora.compute=bf16"], "lora.base nf4 or int8"),
        (["lora.base=nf4", "execution.tp=2"], "execution.tp and execution.dp"),
        (["lora.base=nf4", "execution.dp=2"], "execution.tp and execution.dp"),
        (["lora.r=0", "lora.alpha=4.0"], "lora.r of 1 or more"),
        (["data.num_labels=3"], "a different word for each label"),
        (["lm.answers=yes,yes"], "a different word for each label"),
        (["data.multi_label=true"], "whose answer is the word of one label"),
        (["study.metric=exact_match", "lm.generate_rows=0"], "no answer is generated"),
        (["study.metric=exact_match", "lm.format=text"], "there are no answers"),
        (["study.metric=f1_macro"], "loss, exact_match, token_f1"),
        (["study.metric=token_f1"], 'with lm.format = "criteria" none is quoted'),
        (["study.metric=rouge"], "loss, exact_match, token_f1"),
        (["lm.metric=judge.py:rouge", "study.metric=rouge"], "rouge is a metric of judge.py:rouge: nobody else knows"),
        (["lm.metric=judge.py:rouge", "study.metric=f1"], "loss, exact_match, token_f1"),
        (["lm.metric=judge.py:rouge", "lm.generate_rows=0"], "no answer is generated"),
        (["lm.metric=judge.py:rouge", "lm.format=text"], "lm.metric"),
        (['space.lm.metric=["a.py:b","a.py:c"]'], "values of different metrics do not compare"),
        (["lm.metric=rouge"], "lm.metric"),
        (['space.lm.format=["criteria","both"]'], "losses of different formats do not compare"),
        (["lm.mix=0.3"], "with lm.format both"),
        (["lm.format=text", "lm.learn_prompt=true"], "with lm.format"),
        (["lm.criteria_prompt=no place for it"], "text"),
        (["lm.criteria_prompt={text} {other}"], "text"),
        (["head.layers=1"], "not read by study.task = causal-lm"),
        (["regularization.freeze_layers=1"], "not read by study.task = causal-lm"),
    ],
)
def test_what_is_refused_and_why(overrides: list[str], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert found in str(caught.value)
