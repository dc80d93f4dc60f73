"""Trials of causal language models: resumed bit for bit, adapters alone on disk, and every key acts."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import dryfit
import tiny
import tiny_lms
import trials
from dryfit.settings.errors import LoadError
from dryfit.settings.tables import LmSettings, LoraSettings
from dryfit.settings.training_messages import MergeRequest, StopReason
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.generation import answer
from dryfit.tasks.prompts import PromptTokenizer
from dryfit.training.export import merge
from parts import need_package

# PEFT itself asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

JUDGE = Path(__file__).parents[2] / "examples" / "answers.py"
LM = {"format": "both", "max_new_tokens": 3, "generate_rows": 4, "answers": "never, always walk"}
TRAIN = {"epochs": 1, "evals_per_epoch": 2, "max_length": 160, "batch_size": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lms.causal_lm(tmp_path_factory.mktemp("lm") / "qwen2", attention_dropout=0.1)


def trial(folder: Path, model: Path, *, study: dict[str, Any] | None = None, **tables: dict[str, Any]) -> trials.Trial:
    merged = {"train": TRAIN, "lm": LM, "lora": {"r": 4, "dropout": 0.1}}
    merged = {name: {**merged.get(name, {}), **tables.get(name, {})} for name in {*merged, *tables}}
    unread = {"text": {"answers", "generate_rows"}, "instruction": {"answers"}, "evidence": {"answers"}}
    merged["lm"] = {k: v for k, v in merged["lm"].items() if k not in unread.get(merged["lm"]["format"], set())}
    if merged["lora"]["r"] == 0:
        merged["lora"] = {"r": 0}
    rows = tiny.data(folder / "data", train=24, validation=8)
    return trials.Trial(folder, encoder=model, data=rows, study={"task": "causal-lm", **(study or {})}, **merged)


def weights_of(done: trials.Trial) -> dict[str, torch.Tensor]:
    return done.best_weights("adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_stopped_trial_goes_on_as_if_it_had_not_been(tmp_path: Path, model: Path, packing: bool) -> None:
    tables = {"lm": {**LM, "packing": packing}}
    whole = trial(tmp_path / "whole", model, **tables)
    result, channel = whole.run()
    assert len(channel.points) == 2 and set(channel.points[0].metrics) == {"loss", "exact_match", "token_f1"}
    other = trial(tmp_path / "other", model, **tables)
    points = []
    for _ in range(9):
        found, heard = other.run(stop_at=1)
        points += heard.points
        if found.stopped_by is None:
            break
        assert found.stopped_by is StopReason.REQUEST
        (newest, *_) = sorted((other.folder / "checkpoints").iterdir(), reverse=True)
        assert (newest / "adapter_model.safetensors").is_file() and not (newest / "model.safetensors").exists()
    assert (points, found) == (list(channel.points), result)
    assert trials.same_weights(weights_of(other), weights_of(whole))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model: Path) -> trials.Trial:
    """A trial whose model has learned something."""
    made = trial(tmp_path_factory.mktemp("done"), model, train={**TRAIN, "epochs": 2}, optim={"lr": 2e-2})
    _, channel = made.run()
    assert channel.points[-1].metrics["loss"] < 0.95 * channel.points[0].metrics["loss"]
    return made


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


IDS = torch.randint(2, 300, (2, 20), generator=torch.Generator().manual_seed(4))


def test_the_best_weights_are_adapters_alone_and_open_in_plain_peft(done: trials.Trial, model: Path) -> None:
    best = done.folder / "best"
    assert {path.name for path in best.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "dryfit.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    stored = weights_of(done)
    assert all("lora_" in name for name in stored) and any(values.abs().sum() > 0 for values in stored.values())
    ours = dryfit.load(best)
    assert isinstance(ours, CausalLm) and not ours.training
    plain, auto = _plain_peft(model, best), _auto_peft(best)
    assert torch.equal(scores(ours.decoder, IDS), scores(plain, IDS))
    assert torch.equal(scores(ours.decoder, IDS), scores(auto, IDS))
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    assert not torch.equal(scores(base, IDS), scores(plain, IDS))


def test_a_base_that_was_moved_along_with_its_adapters_is_found(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    made = trial(before / "study", tiny_lms.causal_lm(before / "model"))
    made.run()
    wanted = scores(dryfit.load(before / "study" / "best").decoder, IDS)
    before.rename(after)
    best = after / "study" / "best"
    assert torch.equal(scores(dryfit.load(best).decoder, IDS), wanted)
    (after / "model").rename(after / "elsewhere")
    with pytest.raises(LoadError, match="before/model: there is no such folder"):
        dryfit.load(best)


def _plain_peft(model: Path, best: Path) -> Any:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(best)).eval()


def _auto_peft(best: Path) -> Any:
    return peft.AutoPeftModelForCausalLM.from_pretrained(str(best)).eval()


def test_merged_it_opens_in_plain_transformers(done: trials.Trial, tmp_path: Path) -> None:
    best, out = done.folder / "best", tmp_path / "merged"
    body = MergeRequest(model_dir=str(best), out=str(out), threads=1)
    merge(body, trials.ScriptedChannel(tmp_path / "channel"))
    assert not (out / "adapter_config.json").exists() and not (out / "dryfit.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    wanted = scores(dryfit.load(best).decoder, IDS)
    assert float((scores(merged, IDS) - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("I sleep")["input_ids"] == AutoTokenizer.from_pretrained(best)("I sleep")["input_ids"]


def test_predictions_are_what_the_model_writes(done: trials.Trial, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "criterion": "feel sad", "text": "we never sleep and feel sad"},
        {"id": "b", "criterion": "feel sad " * 90, "text": "we walk"},
        {"id": "c", "text": "we walk"},
    ]
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    first, second, third = trials.predicted(done.folder / "best", source, tmp_path / "out.jsonl")[1]
    assert set(first) == {"row", "id", "answer", "label", "evidence"}
    assert "tokens without its text" in second["error"] and "column 'criterion' is missing" in third["error"]
    # The same by hand, from the folder alone.
    model, tokenizer = _auto_peft(done.folder / "best"), AutoTokenizer.from_pretrained(done.folder / "best")
    prompt = LmSettings().criteria_prompt.format(criterion=rows[0]["criterion"], text=rows[0]["text"])
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(3):
        ids = torch.cat([ids, scores(model, ids)[:, -1:].argmax(-1)], dim=1)
        if int(ids[0, -1]) == tokenizer.eos_token_id:
            break
    written = ids[0, -3:].tolist() if int(ids[0, -1]) != tokenizer.eos_token_id else ids[0].tolist()
    if int(ids[0, -1]) == tokenizer.eos_token_id:
        written = written[len(tokenizer(prompt)["input_ids"]) : -1]
    assert first["answer"] == tokenizer.decode(written, skip_special_tokens=True).strip()


# Key: what it is changed to, and under which tables.
LORA = {"r": 6, "alpha": 5.0, "dropout": 0.5, "targets": "q_proj,v_proj", "base": "bf16"}
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"lora.{key}": (value, {}) for key, value in LORA.items()},
    "lora.double_quant": (True, {"base": "nf4"}),
    "lora.compute": ("bf16", {"base": "nf4"}),
    "lm.format": ("evidence", {}),
    "lm.criteria_prompt": ("{text}? ", {}),
    "lm.evidence_prompt": ("{text}! ", {}),
    "lm.answers": ("no,yes", {}),
    "lm.no_evidence": ("nothing", {}),
    "lm.mix": (0.9, {}),
    "lm.chat": ("off", {"chat": True}),
    "lm.learn_prompt": (True, {}),
    "lm.packing": (True, {}),
    "lm.generate_rows": (0, {}),
    "lm.max_new_tokens": (1, {}),
    "lm.num_beams": (4, {}),
    "lm.metric": (f"{JUDGE}:judged", {}),
}


def test_every_key_is_tried() -> None:
    tables = {"lora": LoraSettings, "lm": LmSettings}
    assert set(KEYS) == {f"{table}.{key}" for table, cls in tables.items() for key in cls.model_fields}


def _seen(folder: Path, model: Path, **tables: Any) -> tuple[Any, ...]:
    """What one step came to: the metrics of a validation, and the adapters."""
    made = trial(folder, model, **{"train": {**TRAIN, "batch_size": 24, "evals_per_epoch": 1}, **tables})
    _, channel = made.run()
    sums = {name: one.sum().item() for name, one in weights_of(made).items()}
    return [point.metrics for point in channel.points], sums


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_lms.causal_lm(tmp_path_factory.mktemp("chat") / "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for one in messages %}<{{ one.content }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def usual_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usual")


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, usual_folder: Path, model: Path, chatting: Path) -> dict[bool, Any]:
    return {False: _seen(usual_folder, model), True: _seen(tmp_path_factory.mktemp("chats"), chatting)}


@pytest.mark.every(2)
@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_changes_training_or_what_is_measured(
    tmp_path: Path, model: Path, chatting: Path, usual: dict[bool, Any], usual_folder: Path, key: str
) -> None:
    value, how = KEYS[key]
    table, _, name = key.partition(".")
    base = {"lm": LM, "lora": {"r": 4, "dropout": 0.1}}[table]
    chats, own = "chat" in how, {key: value for key, value in how.items() if key != "chat"}
    found = _seen(tmp_path, chatting if chats else model, **{table: {**base, **own, name: value}})
    if own:
        assert found != _seen(tmp_path / "usual", model, **{table: {**base, **own}}), key
        return
    if key == "lm.num_beams":  # likewise
        assert _all_predicted(tmp_path / "best", tmp_path) != _all_predicted(usual_folder / "best", tmp_path)
        return
    if key == "lm.max_new_tokens":  # the answers may all be wrong either way: what is written is compared
        assert _answer(tmp_path / "best", 1) != _answer(tmp_path / "best", 9)
        return
    assert found != usual[chats], key


def _all_predicted(folder: Path, out: Path) -> list[dict[str, Any]]:
    source = tiny.write_jsonl(out / "rows.jsonl", tiny.rows(8, seed=5))
    return trials.predicted(folder, source, out / f"{folder.parent.name}.jsonl")[1]


def _answer(folder: Path, tokens: int) -> int:
    model: Any = dryfit.load(folder)
    prompts = PromptTokenizer(AutoTokenizer.from_pretrained(folder), LmSettings(), 160)
    return len(answer(model.decoder, [[5, 6, 7]], prompts, max_new_tokens=tokens, batch_rows=1, beat=lambda: None)[0])


def test_a_function_of_the_users_own_measures_answers_and_can_be_the_goal(tmp_path: Path, model: Path) -> None:
    """The worked example; a folder that was saved has its name alone, and predicts without it."""
    lm = {**LM, "format": "criteria", "metric": f"{JUDGE}:judged"}
    made = trial(tmp_path, model, study={"metric": "answer_f1", "direction": "maximize"}, lm=lm)
    resolved = made.resolve()
    assert resolved.revisions["answers.py:judged"]
    result, channel = made.run()
    assert [set(point.metrics) for point in channel.points] == [{"loss", "exact_match", "answer_f1", "in_words"}] * 2
    assert result.value == max(point.metrics["answer_f1"] for point in channel.points)
    facts = json.loads((tmp_path / "best" / "dryfit.json").read_text("utf-8"))
    assert facts["input"]["settings"]["lm"]["metric"] == "answers.py:judged"
    assert len(_all_predicted(tmp_path / "best", tmp_path)) == 8


def test_an_instruction_is_all_that_a_row_to_predict_must_have(tmp_path: Path, model: Path) -> None:
    made = trial(tmp_path, model, lm={"format": "instruction", "generate_rows": 2}, lora={"r": 0})
    _, channel = made.run()
    assert set(channel.points[0].metrics) == {"loss", "exact_match"}
    assert (tmp_path / "best" / "model.safetensors").is_file() and (tmp_path / "best" / "config.json").is_file()
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"criterion": "feel sad"}])
    assert set(_predicted(tmp_path / "best", source)) == {"row", "id", "text"}


def test_plain_text_needs_neither_labels_nor_criteria(tmp_path: Path, model: Path) -> None:
    made = trial(tmp_path, model, lm={"format": "text"})
    for name in ("train", "validation"):
        path = tmp_path / "data" / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        tiny.write_jsonl(path, [{"text": row["text"]} for row in rows])
    _, channel = made.run()
    assert set(channel.points[0].metrics) == {"loss"}
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "we never"}])
    assert set(_predicted(tmp_path / "best", source)) == {"row", "id", "text"}


def _predicted(folder: Path, source: Path) -> dict[str, Any]:
    (line,) = trials.predicted(folder, source, source.with_suffix(".out"))[1]
    return line


QUANTISED = {
    "int8": ({"base": "int8"}, BitsAndBytesConfig(load_in_8bit=True)),
    "nf4": (
        {"base": "nf4", "double_quant": True},
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_a_trial_on_a_quantised_base(tmp_path: Path, model: Path, name: str) -> None:
    """It learns, stops, goes on, is loaded, predicts and is merged."""
    need_package("bitsandbytes")
    keys, how = QUANTISED[name]
    tables = {"lora": {"r": 4, **keys}, "train": {**TRAIN, "precision": "bf16"}, "optim": {"lr": 2e-2}}
    made = trial(tmp_path / "trial", model, **tables)
    _, channel = made.run()
    assert channel.points[-1].metrics["loss"] < 0.99 * channel.points[0].metrics["loss"]
    stopped = trial(tmp_path / "stopped", model, **tables)
    assert stopped.run(stop_at=3)[0].stopped_by is StopReason.REQUEST
    stopped.run()
    assert trials.same_weights(weights_of(stopped), weights_of(made))

    best, out = made.folder / "best", tmp_path / "merged"
    ours = dryfit.load(best)
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=how, dtype=torch.bfloat16, device_map="cpu")
    for part in base.modules():  # else a forward pass in eval mode stores weights in another order on some CPUs
        vars(part).update({"support_avx512bf16_for_cpu": False} if hasattr(part, "support_avx512bf16_for_cpu") else {})
    assert torch.equal(scores(ours.decoder, IDS), scores(peft.PeftModel.from_pretrained(base, str(best)).eval(), IDS))
    merge(MergeRequest(model_dir=str(best), out=str(out), threads=1), trials.ScriptedChannel(tmp_path / "channel"))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    assert {one.dtype for one in merged.parameters()} == {torch.bfloat16}
    wanted = scores(dryfit.load(best, dtype=torch.float32).decoder, IDS)
    assert float((scores(merged.float(), IDS) - wanted).abs().max()) < 3e-2 * float(wanted.abs().max())
    # The matrices that adapters were merged into are those that the trained model computes with.
    assert float((scores(ours.decoder, IDS).float() - wanted).abs().max()) < 6e-2 * float(wanted.abs().max())
    assert "quantization_config" not in json.loads((out / "config.json").read_text("utf-8"))
    source = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"criterion": "sleep", "text": "we never"}])
    assert "label" in _predicted(best, source)
