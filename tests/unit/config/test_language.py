"""What contradicts each other in a study file of a causal language model."""

from pathlib import Path

from dryfit.settings.study_file_reading import load_study_text
from golden import Golden, refusal

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


def test_what_is_refused_and_why(golden: Golden) -> None:
    cases = [
        ["lora.base=fp16"],
        ["lora.base=int8"],
        ["lora.base=int8", "train.precision=bf16", "lora.compute=fp32"],
        ["lora.base=nf4", "train.precision=bf16", "lora.compute=fp16"],
        ["lora.double_quant=true"],
        ["lora.base=bf16", "lora.compute=bf16"],
        ["lora.base=nf4", "execution.tp=2"],
        ["lora.base=nf4", "execution.dp=2"],
        ["lora.r=0", "lora.alpha=4.0"],
        ["data.num_labels=3"],
        ["lm.answers=yes,yes"],
        ["data.multi_label=true"],
        ["study.metric=exact_match", "lm.generate_rows=0"],
        ["study.metric=exact_match", "lm.format=text"],
        ["study.metric=f1_macro"],
        ["study.metric=token_f1"],
        ["study.metric=rouge"],
        ["lm.metric=judge.py:rouge", "study.metric=rouge"],
        ["lm.metric=judge.py:rouge", "study.metric=f1"],
        ["lm.metric=judge.py:rouge", "lm.generate_rows=0"],
        ["lm.metric=judge.py:rouge", "lm.format=text"],
        ['space.lm.metric=["a.py:b","a.py:c"]'],
        ["lm.metric=rouge"],
        ['space.lm.format=["criteria","both"]'],
        ["lm.mix=0.3"],
        ["lm.format=text", "lm.learn_prompt=true"],
        ["lm.criteria_prompt=no place for it"],
        ["lm.criteria_prompt={text} {other}"],
        ["head.layers=1"],
        ["regularization.freeze_layers=1"],
    ]
    golden("study", [refusal(check, *case) for case in cases])
