import gc
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from dryfit.meta import moves
from dryfit.meta.moves import early_optimizers, refuse_early_optimizer, refuse_early_optimizers, refuse_offload
from dryfit.settings.errors import LoadError

IDS = torch.arange(5, 15)[None]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def offloaded(kind: str, folder: Path) -> LlamaForCausalLM:
    model = llama()
    if kind == "disk":
        return disk_offload(model, str(folder / "weights"), execution_device=torch.device("cpu"))
    return cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_weights_get_no_gradient_and_are_refused(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    model = offloaded(kind, tmp_path)
    if checkpointing:
        with warnings.catch_warnings():  # later versions of transformers renamed it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is not None]

    with pytest.raises(LoadError) as caught:
        refuse_offload(model, doing="training trial 7")
    assert caught.value.doing == "training trial 7"
    assert "model.embed_tokens" in caught.value.found
    assert "tensors are on meta" in caught.value.found
    hint = caught.value.hint
    assert "one device" in hint and "activation checkpointing" in hint and "micro-batch" in hint
    assert "its parameters take" in hint


def test_a_device_map_with_a_part_on_disk_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    table = {"embed_tokens": "cpu", "rotary_emb": "cpu", "norm": "cpu", "layers.0": "cpu", "layers.1": "disk"}
    model = AutoModel.from_pretrained(tmp_path / "model", device_map=table, offload_folder=str(tmp_path / "away"))
    assert model.hf_device_map
    wrapper = nn.Sequential(model)
    with pytest.raises(LoadError) as caught:
        refuse_offload(wrapper, doing="training")
    assert "0.layers.1.self_attn.q_proj" in caught.value.found


def test_anything_left_on_meta_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.table = [torch.empty(2, device="meta")]
    with pytest.raises(LoadError, match="1 tensors are on meta"):
        refuse_offload(model, doing="training")


def test_an_optimizer_built_on_meta_never_changes_the_model_and_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(LoadError, match="2 of its parameters are on meta"):
        refuse_early_optimizer(model, optimizer)
    before = {name: value.clone() for name, value in nn.Linear(3, 3).state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in before.items()}, assign=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(LoadError) as caught:
        refuse_early_optimizer(model, optimizer)
    assert "2 of its parameters are not the model's" in caught.value.found
    assert "2 trainable parameters of the model are not in it (weight, bias)" in caught.value.found
    refuse_early_optimizer(model, torch.optim.AdamW(model.parameters()))


def test_frozen_parameters_may_be_left_out_of_an_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight])
    with pytest.raises(LoadError, match="1 trainable parameters of the model are not in it"):
        refuse_early_optimizer(model, optimizer)
    model.bias.requires_grad_(False)
    refuse_early_optimizer(model, optimizer)
    refuse_early_optimizer(model, torch.optim.SGD(model.parameters()))


class Own(torch.optim.SGD):
    """An optimizer of somebody's own."""


@pytest.mark.slow
def test_optimizers_built_too_early_are_found_wherever_they_are() -> None:
    with torch.device("meta"):
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert early_optimizers(model) == []
    held = {"somewhere": [Own([model.weight], lr=0.1)], "else": torch.optim.AdamW(other.parameters())}
    assert early_optimizers(model) == ["Own, which holds 1 of these 2 parameters"]
    with pytest.raises(LoadError, match="an optimizer was built too early: Own") as caught:
        refuse_early_optimizers(model, doing="materialising Linear")
    assert "materialising Linear" in str(caught.value)
    del caught
    held.clear()
    refuse_early_optimizers(model, doing="materialising Linear")


def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(moves.gc, "get_objects", lambda: seen.append(1) or get_objects())
    return seen


@pytest.mark.slow
def test_the_search_is_spared_where_only_the_model_holds_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = scans(monkeypatch)
    tied = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, tie_word_embeddings=True)
    with torch.device("meta"):
        models = [LlamaForCausalLM(tied), nn.LSTM(2, 3), nn.Sequential(nn.Linear(1, 1))]
    models.append(llama())
    for model in models:
        assert early_optimizers(model) == []
    assert looked == []
    optimizers = [torch.optim.SGD([next(iter(model.parameters()))]) for model in models]
    found = [early_optimizers(model) for model in models]
    assert [len(described) for described in found] == [1, 1, 1, 0]
    assert looked
    assert optimizers


@pytest.mark.slow
def test_an_optimizer_that_was_dropped_does_no_harm() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    gc.disable()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.itself = optimizer
        del optimizer
        assert early_optimizers(model) == []
    finally:
        gc.enable()
