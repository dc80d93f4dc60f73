"""Generated answers, against a loop without cache, padding or batches; and what an exact match is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import tiny_lms
from dryfit.settings.tables import LmSettings
from dryfit.tasks.generation import answer, asked_of, mean_of, sampled, scored_answers
from dryfit.tasks.prompts import Example, PromptPart, PromptTokenizer, sequences
from dryfit.tasks.tiny_lm import write_tiny_lm


def greedy(model: Any, asked: list[int], end: int, most: int) -> list[int]:
    ids = list(asked)
    for _ in range(most):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    return ids[len(asked) :]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_answers_are_the_likeliest_tokens_one_by_one(tmp_path: Path, architecture: str) -> None:
    folder = tiny_lms.causal_lm(tmp_path / architecture, architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    model.generation_config = GenerationConfig(temperature=0.1, do_sample=True, repetition_penalty=9.0)
    prompts = PromptTokenizer(AutoTokenizer.from_pretrained(folder), LmSettings(), 200)
    draw = torch.Generator().manual_seed(2)
    asked = [torch.randint(2, 300, (length,), generator=draw).tolist() for length in (3, 17, 1, 9, 9, 30, 5)]
    plain = [greedy(model, ids, -1, 12) for ids in asked]
    prompts.end_id = plain[3][4]  # so that some answers end and others have no room
    wanted = [prompts.text_of(greedy(model, ids, prompts.end_id, 12)) for ids in asked]
    beats: list[int] = []
    found = answer(model, asked, prompts, max_new_tokens=12, batch_rows=3, beat=lambda: beats.append(1))
    assert found == wanted
    assert len(beats) == 3
    assert len({len(text) for text in wanted}) > 1


def beams(model: Any, asked: list[int], count: int, most: int) -> list[int]:
    """The best of a plain beam search without a cache, of answers that do not end."""
    held: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(most):
        grown: list[tuple[float, list[int]]] = []
        for score, ids in held:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*asked, *ids]]), use_cache=False).logits[0, -1]
            logs = logits.float().log_softmax(-1)
            grown += [(score + float(logs[one]), [*ids, one]) for one in logs.topk(count).indices.tolist()]
        held = sorted(grown, key=lambda one: -one[0])[:count]
    return held[0][1]


@pytest.mark.parametrize("rows", [1, 4])
def test_beams_find_answers_that_are_likelier_as_a_whole(tmp_path: Path, rows: int) -> None:
    folder = tiny_lms.causal_lm(tmp_path / "lm")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    prompts = PromptTokenizer(AutoTokenizer.from_pretrained(folder), LmSettings(), 200)
    prompts.end_id = 10**6  # no answer ends
    draw = torch.Generator().manual_seed(3)
    asked = [torch.randint(2, 300, (length,), generator=draw).tolist() for length in (3, 17, 9, 9, 30)]
    how: dict[str, Any] = {"max_new_tokens": 5, "batch_rows": rows, "beat": lambda: None}
    found = answer(model, asked, prompts, num_beams=3, **how)
    assert found == [prompts.text_of(beams(model, ids, 3, 5)) for ids in asked]
    alone = answer(model, asked, prompts, **how)
    assert found != alone == answer(model, asked, prompts, num_beams=1, **how)
    assert alone == [prompts.text_of(greedy(model, ids, -1, 5)) for ids in asked]


def test_the_exact_match_of_a_split_compares_answers_as_text(tmp_path: Path) -> None:
    folder = tiny_lms.causal_lm(tmp_path / "lm")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = PromptTokenizer(tokenizer, LmSettings(), 200)
    asked = [[5, 6, 7, number] for number in range(10, 16)]
    right = [greedy(model, ids, prompts.end_id, 6) for ids in asked]
    wrong = [[*tokenizer("not ")["input_ids"], *ids] for ids in right]
    examples = [
        Example(str(number), (*ids, *(good if number % 3 else bad), prompts.end_id), len(ids), PromptPart.CRITERIA)
        for number, (ids, good, bad) in enumerate(zip(asked, right, wrong, strict=True))
    ]
    tokens = sequences(examples)
    for rows, share in (([0, 1, 2, 3, 4, 5], 4 / 6), ([1, 2], 1.0), ([0], 0.0)):
        put = asked_of(tokens, rows, prompts)
        found = put.answered(answer(model, put.questions, prompts, max_new_tokens=6, batch_rows=4, beat=lambda: None))
        assert mean_of("exact_match", scored_answers(found, "none")) == pytest.approx(share)
        assert found.ids == tuple(str(row) for row in rows)
        assert found.prompts == tuple(prompts.text_of(asked[row]) for row in rows)
        assert found.quotes == (False,) * len(rows), "they ask for a class"


def test_a_sample_is_the_same_each_time_and_in_order() -> None:
    assert sampled(5, 9, 1) == [0, 1, 2, 3, 4]
    one, again, other = sampled(500, 20, 1), sampled(500, 20, 1), sampled(500, 20, 2)
    assert one == again == sorted(one) and len(set(one)) == 20
    assert one != other


def test_a_tiny_model_and_its_tokenizer_are_written_and_can_be_read(tmp_path: Path) -> None:
    sizes = [
        write_tiny_lm(tmp_path / str(number), tiny_lms.TEXTS, vocab_size=400, seed=seed)
        for number, seed in enumerate((1, 1, 2))
    ]
    assert sizes[0] == sizes[1] == sizes[2] and sizes[0][0] < 300_000
    weights = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3)]
    assert weights[0] == weights[1] != weights[2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "0")
    for text in (*tiny_lms.TEXTS, "unseen \u1f600 \x00"):
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert model.config.vocab_size == len(tokenizer) and model.config.tie_word_embeddings


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_an_answer_has_the_room_that_its_own_prompt_leaves(tmp_path: Path, rows: int) -> None:
    """Beside a prompt that nearly fills the model's positions, others still have theirs."""
    folder = tiny_lms.causal_lm(tmp_path / "gpt2", "gpt2", sizes={"max_position_embeddings": 40})
    model: Any = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    prompts = PromptTokenizer(AutoTokenizer.from_pretrained(folder), LmSettings(), 40)
    prompts.end_id = 10**6  # no answer ends
    draw = torch.Generator().manual_seed(2)
    lengths = {38: 3, 40: 1, 5: 12, 29: 12, 31: 10}
    asked = [torch.randint(2, 300, (length,), generator=draw).tolist() for length in lengths]
    wanted = [prompts.text_of(greedy(model, ids, -1, room)) for ids, room in zip(asked, lengths.values(), strict=True)]
    assert answer(model, asked, prompts, max_new_tokens=12, batch_rows=rows, beat=lambda: None) == wanted
