"""Prompts and answers as tokens: what is learned is the answer and its end, in any script, and is never cut."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_lms
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.tables import LmSettings
from dryfit.tasks.lm_loss import IGNORED, labelled
from dryfit.tasks.prompts import PromptTokenizer, answer_words, exchanges, questions, sequences
from dryfit.tasks.rows import Row, UnlabelledRow
from dryfit.tasks.tiny_lm import END, train_tokenizer

SMALL, LARGE = (train_tokenizer(tiny_lms.TEXTS, vocab_size=size) for size in (0, 700))
WITH_CHAT = train_tokenizer(tiny_lms.TEXTS, vocab_size=400)
WITH_CHAT.chat_template = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("no", "yes")
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60) | st.sampled_from(tiny_lms.TEXTS)


def row_of(text: str, *, criterion: str | None = "sad?", label: int = 1, spans: Any = ()) -> Row:
    return Row("r1", text, criterion, label, "g", tuple(spans), "rows.jsonl line 1")


def learned_text(tokenizer: Any, example: Any, *, learn_prompt: bool = False) -> str:
    batch = labelled(sequences([example]), [0], pad_id=0, learn_prompt=learn_prompt, packing=False, mix=None)
    kept = batch["labels"][0][batch["labels"][0] != IGNORED].tolist()
    return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", [SMALL, LARGE, WITH_CHAT], ids=["bytes", "merges", "chat"])
@pytest.mark.parametrize("kind", ["both", "instruction"])
@given(text=TEXT, criterion=TEXT, ends=st.tuples(st.integers(0, 59), st.integers(1, 60)))
def test_what_is_learned_is_the_answer_and_its_end(
    tokenizer: Any, kind: Any, text: str, criterion: str, ends: tuple[int, int]
) -> None:
    start, end = min(ends[0], len(text) - 1), min(max(ends), len(text))
    spans = [(start, end)] if start < end else []
    row = row_of(text, criterion=criterion, spans=spans)
    lm = LmSettings(format=kind)
    prompts = PromptTokenizer(tokenizer, lm, 4000)
    asked = exchanges(row, lm, WORDS)
    wanted = {"criteria": ["yes"], "evidence": [text[start:end] if spans else "none"], "instruction": [text]}
    wanted["both"] = wanted["criteria"] + wanted["evidence"]
    found = list(prompts.examples(asked))
    assert [learned_text(tokenizer, one) for one in found] == [answer + END for answer in wanted[kind]]
    for one, exchange in zip(found, asked, strict=True):
        assert one.cut == 0
        assert prompts.text_of(one.ids[one.prompt_tokens :]) == exchange.answer
        shown = tokenizer.decode(one.ids[: one.prompt_tokens], clean_up_tokenization_spaces=False)
        assert exchange.prompt() in shown


@given(text=TEXT, length=st.integers(8, 40))
def test_a_plain_text_is_learned_whole_in_pieces(text: str, length: int) -> None:
    lm = LmSettings(format="text")
    found = list(PromptTokenizer(LARGE, lm, length).examples(exchanges(row_of(text), lm, ())))
    assert all(len(one.ids) <= length for one in found)
    whole = [one for example in found for one in example.ids]
    assert LARGE.decode(whole, clean_up_tokenization_spaces=False) == text + END
    assert len(found) == 1 or found[1].name == "r1 (piece 2)"


@given(text=st.text(min_size=1, max_size=400), length=st.integers(20, 120))
def test_only_the_text_of_a_prompt_is_cut_and_little_more_than_must_be(text: str, length: int) -> None:
    lm = LmSettings(criteria_prompt="A {criterion} B {text} C")
    prompts = PromptTokenizer(LARGE, lm, length)
    (exchange,) = exchanges(row_of(text), lm, WORDS)
    (example,) = prompts.examples([exchange])
    assert len(example.ids) <= length
    assert learned_text(LARGE, example) == "yes" + END
    shown = LARGE.decode(example.ids[: example.prompt_tokens], clean_up_tokenization_spaces=False)
    kept = len(text) - example.cut
    assert shown == f"A sad? B {text[:kept]} C"
    if example.cut:
        (longer,) = PromptTokenizer(LARGE, lm, 10_000).examples(
            exchanges(row_of(text[: kept + 8]), lm, WORDS)
        )  # eight characters more take at least two tokens and so have no room
        assert len(longer.ids) > length or example.cut < 8


def test_special_words_in_a_text_are_no_special_tokens() -> None:
    lm = LmSettings()
    (example,) = PromptTokenizer(LARGE, lm, 400).examples(exchanges(row_of(f"a {END} b"), lm, WORDS))
    assert example.ids.count(LARGE.eos_token_id) == 1


@pytest.mark.parametrize(
    ("lm", "row", "found"),
    [
        (LmSettings(criteria_prompt="x" * 90 + "{text}"), row_of("t"), "its prompt has .* tokens without its text"),
        (LmSettings(format="evidence"), row_of("ab " * 90, spans=[(0, 200)]), "the answer has .* tokens"),
        (LmSettings(format="instruction"), row_of("t", criterion="why? " * 50), "without its text"),
        (LmSettings(), row_of("t", criterion=None), "the row has no criterion"),
        (LmSettings(format="instruction"), row_of("t", criterion=None), "the row has no criterion"),
    ],
)
def test_what_has_no_room_is_told_with_its_row(lm: LmSettings, row: Row, found: str) -> None:
    with pytest.raises(DataError, match=found) as caught:
        list(PromptTokenizer(LARGE, lm, 40).examples(exchanges(row, lm, WORDS)))
    assert "rows.jsonl line 1" in str(caught.value)


def test_a_prompt_without_a_criterion_needs_none() -> None:
    lm = LmSettings(criteria_prompt="{text}?")
    assert exchanges(row_of("t", criterion=None), lm, WORDS)[0].prompt() == "t?"


def test_evidence_of_several_spans_is_on_lines() -> None:
    lm = LmSettings(format="evidence")
    (exchange,) = exchanges(row_of("one two three", spans=[(0, 3), (8, 13)]), lm, WORDS)
    assert exchange.answer == "one\nthree"


def test_both_asks_twice_and_names_each() -> None:
    asked = exchanges(row_of("t"), LmSettings(format="both"), WORDS)
    assert [one.name for one in asked] == ["r1 (criteria)", "r1 (evidence)"]


def test_learning_the_prompt_learns_all_but_the_first_token() -> None:
    lm = LmSettings()
    (example,) = PromptTokenizer(LARGE, lm, 400).examples(exchanges(row_of("I sleep"), lm, WORDS))
    text = LARGE.decode(example.ids[1:], clean_up_tokenization_spaces=False)
    assert learned_text(LARGE, example, learn_prompt=True) == text


def test_a_question_keeps_room_for_its_answer() -> None:
    lm = LmSettings(format="both")
    prompts = PromptTokenizer(LARGE, lm, 100)
    for exchange in questions(UnlabelledRow("p1", "sleep " * 50, "sad?", "x"), lm):
        ids, cut = prompts.question(exchange, room=20)
        assert len(ids) <= 80 and cut > 0
    (plain,) = questions(UnlabelledRow(None, "I sleep", None, "x"), LmSettings(format="text"))
    assert LARGE.decode(prompts.question(plain, room=20)[0]) == "I sleep"


@pytest.mark.parametrize("answers", ["yes", "yes,no,maybe", "yes,yes", "yes,", ","])
def test_there_is_one_word_for_each_label(answers: str) -> None:
    with pytest.raises(ConfigError, match="data.num_labels is 2"):
        answer_words(LmSettings(answers=answers), 2)
    assert answer_words(LmSettings(answers=" a , b c"), 2) == ("a", "b c")


def test_a_chat_template_is_taken_where_there_is_one(tmp_path: Path) -> None:
    row = row_of("I sleep")
    for chat, shown in (("auto", True), ("on", True), ("off", False)):
        lm = LmSettings(chat=chat)
        (example,) = PromptTokenizer(WITH_CHAT, lm, 400).examples(exchanges(row, lm, WORDS))
        text = WITH_CHAT.decode(example.ids[: example.prompt_tokens])
        assert (text.startswith("<user>") and text.endswith("</user><assistant>")) == shown
    assert PromptTokenizer(LARGE, LmSettings(), 40) is not None
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptTokenizer(LARGE, LmSettings(chat="on"), 40)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = train_tokenizer(["a"], vocab_size=0)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no token that ends a text"):
        PromptTokenizer(endless, LmSettings(), 40)
