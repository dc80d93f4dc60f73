"""Models on several threads and sharded, and optimizers that were built too early: C14, C21 and C22."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BertModel, LlamaForCausalLM
from transformers.initialization import TORCH_INIT_FUNCTIONS, TORCH_MODULES_TO_PATCH

import dryfit
from dryfit.meta import build, leaks, materialise
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, config_of, fresh, llama_config, output, perturb, ties, tokens, written

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


# ---- PEFT adapters, built without memory or put on a loaded model: C13, and what PEFT itself makes of the same files

# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(**changes):
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    return peft.LoraConfig(**wanted)


def plain_base(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def saved_adapter(folder, base, **changes):
    """An adapter that PEFT saved, whose every tensor is away from its initial value."""
    adapted = perturb(peft.get_peft_model(plain_base(base), lora(**changes)))
    with torch.random.fork_rng(devices=[]):
        adapted.save_pretrained(folder)
    return folder


def test_c13a_lora_built_on_meta_with_its_base(llama):
    folder, reference = llama
    with torch.device("meta"):
        plain = peft.get_peft_model(LlamaForCausalLM(llama_config(**TIED)), lora())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        plain.to("cpu")
    model = build(lambda: peft.get_peft_model(LlamaForCausalLM(llama_config(**TIED)), lora())).eval()
    with pytest.raises(LoadError, match="8 missing \\(base_model.model.model.layers.0.self_attn.q_proj.lora_A"):
        materialise(model, folder)
    report = materialise(model, folder, missing=["*lora_*"])
    assert torch.equal(output(model), output(reference))  # B is zero: LoRA begins as its base
    layers = dict(model.named_parameters())
    for name, weight in layers.items():
        if "lora_A" in name:
            assert name in report.random
            bound = 1 / 32**0.5  # kaiming_uniform with a = sqrt(5)
            assert weight.abs().max() <= bound
            assert float(weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.2)
        elif "lora_B" in name:
            assert not weight.any() and name in report.constructed
        else:
            key = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(weight, reference.get_parameter(key)), name
        assert weight.requires_grad == ("lora_" in name)
    assert ties(model) == {frozenset({"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"})}
    assert sum(name in report.from_file for name in layers) == len(list(reference.parameters()))


def test_c13a_c13b_adapters_left_on_meta(llama):
    folder, reference = llama
    base = plain_base(folder)
    plain = peft.get_peft_model(base, lora(), low_cpu_mem_usage=True)
    assert output_of_plain(plain).device.type == "cpu"  # it runs, and its adapters do not exist
    found = leaks(plain)
    assert len(found) == 8 and all("lora_" in name for name in found)
    with pytest.raises(LoadError, match="lora_A"):
        materialise(plain)
    with pytest.raises(LoadError, match="lora_A.*on meta, and how its constructor filled it is not known"):
        materialise(plain, missing=["*lora_*"])
    assert leaks(plain) == found
    # The same option where dryfit builds.
    base = dryfit.load(folder, task="causal-lm")
    model = build(lambda: peft.get_peft_model(base, lora(), low_cpu_mem_usage=True)).eval()
    assert len(leaks(model)) == 8
    materialise(model, missing=["*lora_*"])
    assert not leaks(model)
    assert torch.equal(output(model), output(reference))


def output_of_plain(model):
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def test_c13c_an_adapter_without_one_of_its_tensors(llama, tmp_path):
    folder, _ = llama
    adapter = saved_adapter(tmp_path / "adapter", folder)
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    lost = next(key for key in state if key.endswith("layers.1.self_attn.v_proj.lora_B.weight"))
    whole = dryfit.load(folder, task="causal-lm", attach=adapter)
    reference = peft.PeftModel.from_pretrained(plain_base(folder), adapter)
    assert torch.equal(output(whole), output(reference.eval()))
    save_file({key: value for key, value in state.items() if key != lost}, file)
    with pytest.warns(UserWarning, match="missing"):
        plain = peft.PeftModel.from_pretrained(plain_base(folder), adapter, low_cpu_mem_usage=True).eval()
    assert len(leaks(plain)) == 1
    assert not torch.equal(output_of_plain(plain), output(reference))  # on the CPU, without an error
    with pytest.raises(LoadError, match="1 missing \\(.*layers.1.self_attn.v_proj.lora_B.default.weight"):
        dryfit.load(folder, task="causal-lm", attach=adapter)
    save_file({**state, "base_model.model.model.layers.7.self_attn.v_proj.lora_B.weight": state[lost].clone()}, file)
    with pytest.raises(LoadError, match="layers.7"):
        dryfit.load(folder, task="causal-lm", attach=adapter)
    save_file({**state, lost: state[lost][:, :2].contiguous()}, file)
    with pytest.raises(LoadError, match="v_proj.lora_B.default.weight: \\[16, 2\\] in the file, not \\[16, 4\\]"):
        dryfit.load(folder, task="causal-lm", attach=adapter)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_adapters_stay_in_fp32_on_a_half_base(llama, tmp_path, dtype):
    folder, _ = llama
    adapter = saved_adapter(tmp_path / "adapter", folder)
    reference = peft.PeftModel.from_pretrained(plain_base(folder, dtype or torch.float32), adapter).eval()
    model = dryfit.load(folder, task="causal-lm", dtype=dtype, attach=adapter)
    assert_same(model, reference)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert torch.equal(output(model), output(reference))


def test_a_half_base_on_meta_keeps_its_tables(llama):
    folder, _ = llama
    model = build(lambda: peft.get_peft_model(LlamaForCausalLM(llama_config(**TIED)), lora())).eval()
    materialise(model, folder, dtype=torch.bfloat16, missing=["*lora_*"])
    assert {p.dtype for name, p in model.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert model.get_base_model().model.rotary_emb.inv_freq.dtype == torch.float32


CASES = {
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"use_dora": True},
    "rslora with bias": {"use_rslora": True, "bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "trained head": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning", "ignore:.*embedding.*:UserWarning")
def test_attaching_equals_peft(case, tied, tmp_path):
    folder = written(tmp_path / "base", fresh(LlamaForCausalLM, llama_config(tie_word_embeddings=tied)))
    adapter = saved_adapter(tmp_path / "adapter", folder, **CASES[case])
    reference = peft.PeftModel.from_pretrained(plain_base(folder), adapter).eval()
    model = dryfit.load(folder, task="causal-lm", attach=adapter)
    assert torch.equal(output(model), output(reference))
    theirs = reference.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    origins = model.load_report.origins()
    assert not leaks(model) and {str(origins[name]) for name, _ in model.named_parameters()} == {"file"}


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`:UserWarning")
def test_an_adapter_is_not_taken_for_a_model(llama, tmp_path):
    folder, _ = llama
    adapter = saved_adapter(tmp_path / "adapter", folder)
    model = build(lambda: LlamaForCausalLM(llama_config(**TIED)))
    with pytest.raises(LoadError) as caught:
        materialise(model, adapter / "adapter_model.safetensors")
    assert "lora_A" in str(caught.value) and "attach" in caught.value.hint
    with pytest.raises(LoadError, match="no adapter_config.json"):
        dryfit.load(folder, task="causal-lm", attach=folder)
    other = written(tmp_path / "other", fresh(LlamaForCausalLM, llama_config(num_hidden_layers=3)))
    with pytest.raises(LoadError, match="missing .*layers.2"):
        dryfit.load(other, task="causal-lm", attach=adapter)
