"""Model configs that anybody may have written: each is loaded, or refused with its key; no code of others runs."""

import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest

import tiny
from dryfit.meta.adapters import base_of_adapter
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_config, load_tokenizer, read_model_json
from dryfit.meta.pretrained import Kind, empty_stack, load_pretrained
from dryfit.settings.errors import DryfitError, LoadError
from dryfit.settings.tables import RegularizationSettings

_KERNEL = "someone/evil-kernel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.tokenizer(tmp_path / "model")
    return tiny.model(tmp_path / "model")


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"_attn_implementation": _KERNEL}, "_attn_implementation"),
        ({"attn_implementation": f"{_KERNEL}@main:attention"}, "attn_implementation"),
        ({"_attn_implementation_internal": _KERNEL}, "_attn_implementation_internal"),
        ({"_attn_implementation": "msa|someone/evil"}, "_attn_implementation"),
        ({"_attn_implementation": {"": "eager", "text_config": _KERNEL}}, "_attn_implementation"),
        ({"_experts_implementation": "sonic-moe"}, "_experts_implementation"),
        ({"text_config": {"vision_config": {"_attn_implementation": _KERNEL}}}, "text_config.vision_config"),
        ({"encoders": [{"attn_implementation": _KERNEL}]}, "encoders.attn_implementation"),
    ],
)
def test_code_from_elsewhere_is_refused_unless_trusted(folder: Path, values: dict[str, Any], key: str) -> None:
    _change(folder / "config.json", **values)
    for load in (load_config, load_tokenizer):
        with pytest.raises(LoadError, match=key) as caught:
            load(FolderSource(str(folder)))
        assert "trust_remote_code" in caught.value.hint
    _change(folder / "config.json", **dict.fromkeys(values))
    _change(folder / "tokenizer_config.json", **values)
    with pytest.raises(LoadError, match=key):
        load_tokenizer(FolderSource(str(folder)))


def test_what_is_trusted_is_read(folder: Path) -> None:
    _change(folder / "config.json", _attn_implementation=_KERNEL)
    assert read_model_json(folder / "config.json", trust=True)["_attn_implementation"] == _KERNEL


def test_an_adapter_for_code_from_elsewhere_is_refused_unless_trusted(tmp_path: Path) -> None:
    mapping = {"base_model_class": "Own", "parent_library": "evil.module"}
    config = {"peft_type": "LORA", "base_model_name_or_path": "somewhere", "auto_mapping": mapping}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="auto_mapping"):
        base_of_adapter(tmp_path, trust=False)
    assert base_of_adapter(tmp_path, trust=True) is not None


@pytest.mark.parametrize(
    "asked",
    [
        {"peft_type": "XLORA", "adapters": {"0": "someone/evil-adapter"}},
        {"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "evil"},
        {"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}},
        {"peft_type": "MULTITASK_PROMPT_TUNING", "prompt_tuning_init_state_dict_path": "/etc/passwd"},
    ],
)
def test_an_adapter_that_would_load_more_than_itself_is_refused_unless_trusted(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    config = {"base_model_name_or_path": "somewhere", **asked}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=[*asked][1]) as caught:
        base_of_adapter(tmp_path, trust=False)
    assert "trust_remote_code" in caught.value.hint
    assert base_of_adapter(tmp_path, trust=True) is not None
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | dict.fromkeys([*asked][1:])))
    assert base_of_adapter(tmp_path, trust=False) is not None, "PEFT writes an entry that is not used as null"


@pytest.mark.parametrize("value", [-1, 10**6, 2.5, "8", [8, 10**6]])
def test_experts_that_no_model_has_are_refused_by_their_key(folder: Path, value: Any) -> None:
    for values in ({"num_local_experts": value}, {"text_config": {"n_routed_experts": value}}):
        _change(folder / "config.json", **values)
        with pytest.raises(LoadError, match=next(iter(values))):
            load_config(FolderSource(str(folder)))
        _change(folder / "config.json", **dict.fromkeys(values))


def test_built_in_implementations_need_no_trust(folder: Path) -> None:
    for name in ("eager", "sdpa", None):
        _change(folder / "config.json", _attn_implementation=name)
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_model_never_runs_without_trust(folder: Path, file: str) -> None:
    mark = folder / "it-ran"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: ...\n")
    mapped = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    kinds = {"model_type": "unheard-of"} if file == "config.json" else {"tokenizer_class": "UnheardOf"}
    for values in ({}, kinds):
        _change(folder / file, auto_map=mapped, **values)
        for load in (load_config, load_tokenizer):
            try:
                load(FolderSource(str(folder)))
            except DryfitError as error:
                assert error.found  # noqa: PT017  both are fine, as long as nothing runs
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("null", "None, no object"),
        ("[1, 2]", "no object"),
        ("", "not JSON"),
        ("\0", "not JSON"),
        ('{"a":' * 300 + "0" + "}" * 300, "nested deeper"),
        ("[" * 100_000, "not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not JSON"),
        ("{}", "model_type|transformers knows"),
    ],
)
def test_a_config_that_is_no_config_is_refused(folder: Path, text: str, found: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(LoadError, match=found):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [-1, 0, 2.5, 10**12, "12", True, [1, -1], {"a": 1}])
def test_a_size_that_no_model_has_is_refused_by_its_key(folder: Path, key: str, value: Any) -> None:
    _change(folder / "config.json", **{key: value})
    with pytest.raises(LoadError, match=key):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


def test_an_unknown_activation_is_refused_by_its_key(folder: Path) -> None:
    _change(folder / "config.json", hidden_act="no-such-function")
    with pytest.raises(LoadError, match=r"hidden_act.*no-such-function"):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


def test_layers_that_the_weights_lack_are_refused_before_any_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer was built")

    _change(folder / "config.json", num_hidden_layers=100_000)
    monkeypatch.setattr("transformers.models.bert.modeling_bert.BertLayer.__init__", build)
    source = FolderSource(str(folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in (
        lambda: load_pretrained(source, Kind.ENCODER),
        lambda: load_pretrained(source, Kind.ENCODER, missing="init"),
        lambda: empty_stack(source, Kind.ENCODER, RegularizationSettings()),
    ):
        with pytest.raises(LoadError, match=r"num_hidden_layers is 100000, and the weights have \d+ layers"):
            load()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_few_layers_too_many_are_told_by_their_weights(folder: Path) -> None:
    _change(folder / "config.json", num_hidden_layers=4)
    with pytest.raises(LoadError, match=r"layer\.2"):
        load_pretrained(FolderSource(str(folder)), Kind.ENCODER)


def test_a_mutated_config_is_loaded_or_refused(folder: Path) -> None:
    made = random.Random(5)
    good = json.loads((folder / "config.json").read_text())
    odd: list[Any] = [None, -1, 0, 3, 2.5, 1e308, 2**63, "", "x" * 9999, "gelu", True, [], {}, [[]], {"a": {}}, [None]]
    wrong: list[str] = []
    for _ in range(150):
        config = dict(good)
        for _ in range(made.randrange(1, 3)):
            key = made.choice([*good, "text_config", "auto_map", "quantization_config", "dtype"])
            config[key] = made.choice(odd)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
        except DryfitError:
            continue
        except Exception as error:
            wrong.append(f"{error!r}: { {key: value for key, value in config.items() if good.get(key) != value} }")
    assert not wrong
