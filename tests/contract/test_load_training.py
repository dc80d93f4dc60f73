"""Models on several threads and sharded, and optimizers that were built too early: C14, C21 and C22."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BertModel, LlamaForCausalLM
from transformers.initialization import TORCH_INIT_FUNCTIONS, TORCH_MODULES_TO_PATCH

import dryfit
from dryfit.meta import build, leaks, materialise
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, config_of, fresh, llama_config, output, tokens, written

TIED = {"tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def unswapped():
    """What transformers swaps while a model is built is put back: builds that overlap leave it swapped for good."""
    modules = [sys.modules[name] for name in TORCH_MODULES_TO_PATCH if name in sys.modules]
    found = [(one, name, getattr(one, name)) for one in modules for name in TORCH_INIT_FUNCTIONS if hasattr(one, name)]
    yield
    for module, name, function in found:
        setattr(module, name, function)


@pytest.fixture
def llama(tmp_path):
    """A folder with a tied Llama, and the same model."""
    reference = fresh(LlamaForCausalLM, llama_config(**TIED))
    return written(tmp_path / "llama", reference), reference


def test_c14b_an_optimizer_built_too_early(tmp_path):
    save_file(nn.Linear(3, 3).state_dict(), tmp_path / "whole.safetensors")
    model = build(lambda: nn.Linear(3, 3))
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(LoadError, match="optimizer was built too early: AdamW"):
        materialise(model, tmp_path / "whole.safetensors")
    assert leaks(model) == ("weight", "bias")
    del early
    materialise(model, tmp_path / "whole.safetensors")


class Slow(BertModel):
    """A model whose constructor waits."""

    inside, go_on = threading.Event(), threading.Event()

    def __init__(self, config):
        super().__init__(config)
        Slow.inside.set()
        assert Slow.go_on.wait(60)


def plain_values(seed):
    """What a thread that knows nothing of dryfit builds: whole numbers, whose sums no CPU rounds."""
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(12.0).view(3, 4) + seed)
        linear.bias.zero_()
    tied = LlamaForCausalLM(llama_config(**TIED, num_hidden_layers=1))
    right = linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
    right &= torch.equal(linear(torch.ones(1, 4)), (torch.arange(12.0).view(3, 4) + seed).sum(1)[None])
    right &= tied.lm_head.weight is tied.model.embed_tokens.weight
    right &= {p.dtype for p in tied.parameters()} == {torch.float32} and not leaks(tied)
    right &= bool(torch.equal(tied.model.norm.weight, torch.ones(32)))
    return right and 0 < float(tied.lm_head.weight.detach().std()) < 0.1


def test_c21_a_thread_held_inside_a_constructor(tmp_path):
    reference = fresh(BertModel, bert_config())
    written(tmp_path, reference)
    seen = {}
    names = ("linspace", "empty", "zeros", "ones", "tensor")
    before = [getattr(torch, name) for name in names] + [nn.init.normal_, nn.Module.__setattr__]
    for way in ("plain", "dryfit"):
        Slow.inside.clear(), Slow.go_on.clear()
        with ThreadPoolExecutor(2) as pool:
            if way == "plain":
                held = pool.submit(partial(Slow.from_pretrained, tmp_path, dtype=torch.bfloat16))
            else:
                held = pool.submit(build, lambda: Slow(bert_config()))
            assert Slow.inside.wait(60)
            seen[way] = pool.submit(plain_values, 1).result()
            if way == "dryfit":
                now = [getattr(torch, name) for name in names] + [nn.init.normal_, nn.Module.__setattr__]
                assert now == before and torch.get_default_dtype() == torch.float32
            Slow.go_on.set()
            model = held.result()
    assert seen == {"plain": False, "dryfit": True}
    materialise(model, tmp_path, dtype=torch.bfloat16)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(torch.bfloat16)), name


def maker(kind):
    return BertModel if kind == "bert" else AutoModelForCausalLM.from_config


def test_c21_loading_in_company(tmp_path):
    """No model comes out wrong when 4 threads load while 2 others build plain modules."""
    folders = []
    for kind, changes in (
        ("llama", TIED),
        ("bert", {}),
        ("mixtral", {"num_local_experts": 2, "num_key_value_heads": 2}),
    ):
        reference = fresh(maker(kind), config_of(kind, **changes))
        folders.append((written(tmp_path / kind, reference), "encoder" if kind == "bert" else "causal-lm"))
    references = [dryfit.load(folder, task=task) for folder, task in folders]
    halves = [dryfit.load(folder, task=task, dtype=torch.bfloat16) for folder, task in folders]

    def load_one(number):
        which, half = number % len(folders), number // len(folders) % 2
        folder, task = folders[which]
        model = dryfit.load(folder, task=task, dtype=torch.bfloat16 if half else None)
        assert_same(model, (halves if half else references)[which])
        return True

    with ThreadPoolExecutor(4) as loading, ThreadPoolExecutor(2) as building:
        loaded = [loading.submit(load_one, number) for number in range(60)]
        built = [building.submit(plain_values, number % 5) for number in range(60)]
        assert all(future.result() for future in (*loaded, *built))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_c22_sharded_models(llama, group):
    folder, reference = llama
    expected = output(reference)
    model = build(lambda: LlamaForCausalLM(llama_config(**TIED))).eval()
    materialise(model, folder)
    shard(model, group)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens()).logits, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Sharded before it is filled: refused, and nothing changed.
    early = shard(build(lambda: LlamaForCausalLM(llama_config(**TIED))).eval(), group)
    before = leaks(early)
    with pytest.raises(LoadError, match="model.embed_tokens.weight \\(DTensor\\)") as caught:
        materialise(early, folder)
    assert "then shard" in caught.value.hint
    assert leaks(early) == before
    assert torch.equal(early.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
