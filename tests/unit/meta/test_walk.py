from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from dryfit.gpu.slots import Slot, SlotKind, current, leaks, put, put_all, slots

Pair = namedtuple("Pair", "left right")


@dataclass
class Table:
    values: torch.Tensor
    label: str = "t"


@dataclass(frozen=True)
class Frozen:
    values: torch.Tensor
    twice: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.values * 2)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 3, bias=False)
        self.bare = nn.Parameter(torch.ones(2))
        self.none = None
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.register_buffer("gone", None)
        self.scale = torch.tensor(2.0)
        self.tables = [torch.zeros(1), None, {"x": torch.ones(1)}]
        self.pair = Pair(torch.zeros(2), (torch.ones(2),))
        self.cache = OrderedDict(x=torch.zeros(3))
        self.table = Table(torch.zeros(4))
        self.frozen = Frozen(torch.ones(4))
        self.config = BertConfig()
        self.config.stray = torch.zeros(1)
        self.unregistered = [nn.Linear(2, 2)]
        self.count = 3


def by_name(module: nn.Module) -> dict[str, Slot]:
    found = slots(module)
    assert len({slot.name for slot in found}) == len(found)
    return {slot.name: slot for slot in found}


def test_every_place_is_found_in_order() -> None:
    module = nn.Sequential(OrderedDict(first=Everything()))
    found = slots(module)
    assert [slot.name.removeprefix("first.") for slot in found] == [
        "bare",
        "kept",
        "hidden",
        "scale",
        "tables[0]",
        "tables[2]['x']",
        "pair[0]",
        "pair[1][0]",
        "cache['x']",
        "table.values",
        "frozen.values",
        "frozen.twice",
        "lin.weight",
    ]
    kinds = {slot.name.removeprefix("first."): (slot.kind, slot.persistent) for slot in found}
    assert kinds["bare"] == (SlotKind.PARAMETER, True)
    assert kinds["kept"] == (SlotKind.BUFFER, True)
    assert kinds["hidden"] == (SlotKind.BUFFER, False)
    assert kinds["scale"] == kinds["frozen.twice"] == (SlotKind.ATTRIBUTE, False)
    assert {slot.name for slot in found if slot.persistent} == set(module.state_dict())


def test_every_place_can_be_replaced_alone() -> None:
    for name in by_name(Everything()):
        module = Everything()
        tables, table = module.tables, module.table
        before = by_name(module)
        slot = before[name]
        new = torch.full_like(slot.tensor, 7)
        new = nn.Parameter(new) if slot.kind is SlotKind.PARAMETER else new
        put(slot, new)
        after = by_name(module)
        assert list(after) == list(before)
        for key, other in after.items():
            assert (other.kind, other.persistent) == (before[key].kind, before[key].persistent)
            assert other.tensor is (new if key == name else before[key].tensor), (name, key)
            assert current(other) is other.tensor
        assert module.tables is tables
        assert module.table is table
        assert isinstance(module.pair, Pair)
        assert module._parameters.keys() == Everything()._parameters.keys()


def test_a_parameter_place_takes_only_parameters() -> None:
    slot = by_name(Everything())["bare"]
    with pytest.raises(TypeError, match="bare is a parameter"):
        put(slot, torch.zeros(2))


def test_a_parameter_kept_as_a_plain_attribute_stays_one() -> None:
    module = nn.Module()
    module.__dict__["secret"] = nn.Parameter(torch.zeros(2))
    (slot,) = slots(module)
    put(slot, nn.Parameter(torch.ones(2)))
    assert slot.kind is SlotKind.ATTRIBUTE
    assert not list(module.parameters())
    assert module.secret.sum() == 2


def test_ties_are_two_places_and_shared_modules_one_with_two_names() -> None:
    module = nn.Module()
    module.a = nn.Linear(2, 2)
    module.b = nn.Linear(2, 2, bias=False)
    module.b.weight = module.a.weight
    module.box = nn.Sequential(nn.Sequential(module.a))
    module.box[0].register_buffer("seen", torch.zeros(1))
    module.again = module.box
    module.a.extra = (torch.zeros(1),)
    found = by_name(module)
    assert list(found) == ["a.weight", "a.bias", "a.extra[0]", "b.weight", "box.0.seen"]
    assert found["b.weight"].tensor is found["a.weight"].tensor
    assert found["a.weight"].aliases == ("box.0.0.weight", "again.0.0.weight")
    assert found["a.extra[0]"].aliases == ("box.0.0.extra[0]", "again.0.0.extra[0]")
    assert found["box.0.seen"].names == ("box.0.seen", "again.0.seen")
    named = [name for slot in found.values() if slot.persistent for name in slot.names]
    assert sorted(named) == sorted(module.state_dict())


def test_what_contains_itself_ends() -> None:
    module = nn.Module()
    module.child = nn.Linear(1, 1)
    module.child.parent = module
    module.ring = [torch.zeros(1)]
    module.ring.append(module.ring)
    assert [slot.name for slot in slots(module)] == ["ring[0]", "child.weight", "child.bias"]


def test_leaks_are_parameters_buffers_and_attributes() -> None:
    module = Everything()
    assert leaks(module) == ()
    module.lin.to("meta")
    module.hidden = module.hidden.to("meta")
    module.pair = Pair(module.pair.left, (torch.empty(1, device="meta"),))
    assert leaks(module) == ("hidden", "pair[1][0]", "lin.weight")
    assert leaks(nn.Module()) == leaks(nn.Sequential()) == ()


def test_names_are_those_of_a_state_dict_on_real_architectures() -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    llama = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=True))
    for model in (BertModel(BertConfig(**small, vocab_size=64)), llama):
        names = [name for slot in slots(model) if slot.persistent for name in slot.names]
        assert sorted(names) == sorted(model.state_dict())
    found = by_name(llama)
    assert found["lm_head.weight"].tensor is found["model.embed_tokens.weight"].tensor
    assert found["model.rotary_emb.inv_freq"].kind is SlotKind.BUFFER


def test_the_cells_of_a_recurrent_module_are_ties() -> None:
    found = by_name(nn.LSTM(2, 3))
    assert found["_flat_weights[0]"].tensor is found["weight_ih_l0"].tensor


def test_putting_all_keeps_ties_and_what_is_a_parameter() -> None:
    module = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    module["two"].weight = module["one"].weight
    module["one"].bias.requires_grad_(False)
    module.register_buffer("scale", torch.ones(2))
    before = {slot.name: slot.tensor for slot in slots(module)}
    put_all(module, lambda slot: torch.zeros_like(slot.tensor))
    assert module["two"].weight is module["one"].weight
    assert isinstance(module["one"].weight, nn.Parameter)
    assert not module["one"].bias.requires_grad
    after = {slot.name: slot.tensor for slot in slots(module)}
    assert after.keys() == before.keys()
    assert all(after[name] is not before[name] and not after[name].any() for name in before)
