"""Tokenizers that are a sentencepiece model alone: read as their authors' library reads them, in parallel children."""

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

import encoders
import trials
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import check_packages, load_tokenizer
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.settings.errors import LoadError, MachineError
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.wire import LOG_FILE, Note
from runtime_jobs import GENEROUS, Harness, request
from tokenizer_jobs import ids_of

KINDS = list(encoders.SENTENCEPIECE)
VARIABLES = ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY")
COMPLAINTS = ("huggingface/tokenizers", "TOKENIZERS_PARALLELISM", "Descriptors cannot", "PROTOCOL_BUFFERS", "Warning:")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sentencepiece")
    for name in KINDS:
        encoders.tokenizer(place / name, name)
        assert {path.name for path in (place / name).iterdir()} == {"config.json", encoders.SENTENCEPIECE[name][0]}
    return {name: place / name for name in KINDS}


def plain(text: str) -> str:
    return text


def without_accents(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFKD", text) if unicodedata.category(char) != "Mn")


# What transformers does to a text before the sentencepiece model sees it, as the models' own authors did.
BEFORE: dict[str, Callable[[str], str]] = {
    "xlnet": without_accents,
    "albert": lambda text: without_accents(text).lower(),
}


def reference(folder: Path, name: str, texts: list[str]) -> list[list[int]]:
    """Ids by sentencepiece itself; XLM-R numbers pieces one higher, and its unknown piece is 3."""
    file = encoders.SENTENCEPIECE[name][0]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / file))
    ids = processor.encode([BEFORE.get(name, plain)(text) for text in texts])
    if name != "xlm-roberta":
        return ids
    return [[index + 1 if index else 3 for index in row] for row in ids]


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_sentencepiece_itself(folders: dict[str, Path], name: str) -> None:
    texts = [*encoders.words(300, seed=7), "an unseen ξ and 龍龍 here", "  two  spaces ", "tabs\tand\nlines"]
    if name.startswith("deberta"):
        texts = [text for text in texts if unicodedata.normalize("NFKC", text) == text]
        assert len(texts) > 100
    tokenizer = load_tokenizer(FolderSource(str(folders[name])))
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    different = [
        (text, have, want)
        for text, have, want in zip(texts, found, reference(folders[name], name, texts), strict=True)
        if have != want
    ]
    assert not different


def test_deberta_normalises_less_than_its_model_says(folders: dict[str, Path]) -> None:
    """transformers 5 leaves out the normaliser compiled into the model. Once this fails, the docs may drop it."""
    text = encoders.SCRIPTS[0]
    folder = folders["deberta-v3"]
    tokenizer = load_tokenizer(FolderSource(str(folder)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id in ids
    assert tokenizer.unk_token_id not in reference(folder, "deberta-v3", [text])[0]


def test_a_bpe_model_that_would_be_read_as_unigram_is_refused(tmp_path: Path) -> None:
    for name in KINDS:
        folder = tmp_path / name
        encoders.tokenizer(folder, name)
        (folder / encoders.SENTENCEPIECE[name][0]).write_bytes(encoders.sentencepiece_model(name, "bpe"))
        with pytest.raises(LoadError, match="it is a BPE model") as caught:
            load_tokenizer(FolderSource(str(folder)))
        assert encoders.SENTENCEPIECE[name][0] in caught.value.doing
        assert "tokenizer.json" in caught.value.allowed
        assert "PreTrainedTokenizerFast" in caught.value.hint


def test_a_bpe_model_as_tokenizer_json_is_read_as_it_is(tmp_path: Path) -> None:
    """What the refusal advises."""
    file = tmp_path / "bpe.model"
    file.write_bytes(encoders.sentencepiece_model("xlm-roberta", "bpe"))
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    vocab = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    merges = generate_merges(vocab, scores, skip_tokens=["<s>", "</s>", "<unk>"])
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    folder = tmp_path / "folder"
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}), encoding="utf-8")
    texts = encoders.words(100, seed=3)
    found = load_tokenizer(FolderSource(str(folder)))(texts, add_special_tokens=False)["input_ids"]
    assert found == sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(texts)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "XLMRobertaTokenizer"}), encoding="utf-8"
    )
    with pytest.raises(LoadError, match="loading the tokenizer"):
        load_tokenizer(FolderSource(str(folder)))


def exits_of(harness: Harness) -> list[ChildExited]:
    return [event for event in harness.events if isinstance(event, ChildExited)]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
@pytest.mark.parametrize(
    ("isolation", "at_once"), [(Isolation.FORKSERVER, 4), pytest.param(Isolation.FRESH, 2, marks=pytest.mark.slow)]
)
def test_children_side_by_side_cut_texts_alike(
    tmp_path: Path,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    isolation: Isolation,
    at_once: int,
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    preload = ("dryfit.training.trial_jobs", "dryfit.training.resolve", "tokenizer_jobs")
    with Harness(tmp_path, isolation=isolation, preload=preload, entry="tokenizer_jobs:run_job") as harness:
        waiting = [f"{name}-{turn}" for name in KINDS for turn in range(2)]
        for start in range(0, len(waiting), at_once):
            together = waiting[start : start + at_once]
            for key in together:
                name, _, turn = key.rpartition("-")
                body = request("tokens", folder=str(folders[name]), seed=int(turn))
                harness.supervisor.start(ChildSpec(key, tmp_path / key, body, GENEROUS))
            while len(exits_of(harness)) < start + len(together):
                harness.events += harness.supervisor.wait(1.0)
        for event in exits_of(harness):
            assert event.result is not None and isinstance(event.result.answer, TrainResult), event.evidence.log_tail
        said = {
            event.key: json.loads(event.message.text)
            for event in harness.events
            if isinstance(event, ChildMessage) and isinstance(event.message, Note)
        }
    assert said.keys() == set(waiting)
    for key, facts in said.items():
        name, _, turn = key.rpartition("-")
        assert facts["ids"] == ids_of(folders[name], int(turn)), key
        assert facts["protobuf"] == "upb"
        assert (facts["forced"], facts["forked"]) == (None, 0)
        log = (tmp_path / key / LOG_FILE).read_text(encoding="utf-8")
        assert not any(word in log for word in COMPLAINTS), log


def test_a_trial_needs_no_tokenizer_once_the_rows_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.model(tmp_path / "model", "xlnet")
    trial = trials.small(tmp_path, encoder=tmp_path / "model", train={"max_length": 64, "epochs": 1})
    body = trial.request()  # resolves

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.setattr(trial, "request", lambda **_: body)
    result, _ = trial.run()
    assert result.steps == 5
    with pytest.raises(AssertionError, match="a tokenizer was loaded"):
        trial.folder.joinpath("cache").rename(tmp_path / "elsewhere")
        trial.resolve()


@pytest.mark.parametrize(("module", "package"), [("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MachineError) as caught:
        check_packages(tmp_path / "spm.model")
    assert caught.value.found == f"{package} is not installed"
    assert caught.value.hint == f"pip install {package}"
