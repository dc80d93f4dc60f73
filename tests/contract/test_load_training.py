"""Models of parts, on several ranks and sharded: C14, C15, C21 and C22, one test for each case."""

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
from dryfit.meta.moves import refuse_early_optimizer, refuse_offload
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, config_of, fresh, llama_config, output, tokens, written
from thinning import examples

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


class Headed(nn.Module):
    """An encoder and a head, built apart."""

    def __init__(self, encoder, head):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, input_ids):
        return self.head(self.encoder(input_ids).last_hidden_state[:, 0])


def test_c14a_encoder_on_meta_and_head_real(tmp_path):
    reference = fresh(BertModel, bert_config())
    written(tmp_path, reference)
    head = fresh(lambda _: nn.Linear(32, 3), None)
    with torch.device("meta"):
        plain = BertModel(bert_config())
    with pytest.raises(RuntimeError, match="expected device meta"):
        Headed(plain, head)(tokens().to("meta"))
    model = Headed(build(lambda: BertModel(bert_config())), head).eval()
    assert leaks(model) and not leaks(model.head)
    with pytest.raises(LoadError, match="encoder.embeddings.word_embeddings.weight"):
        materialise(model)
    materialise(model.encoder, tmp_path)
    report = materialise(model)
    assert not leaks(model)
    assert_same(model, Headed(reference, head).eval())
    assert {"head.weight", "head.bias"} <= set(report.constructed)
    assert report.from_file["encoder.pooler.dense.bias"] == "pooler.dense.bias"
    model(tokens()).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "pooler" not in name)


def step_with(model, optimizer):
    model(tokens()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = BertModel(bert_config(), add_pooling_layer=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids):
        return self.head(self.encoder(input_ids).last_hidden_state[:, 0])


def test_c14b_an_optimizer_built_too_early(tmp_path):
    save_file(fresh(lambda _: Classifier(), None).state_dict(), tmp_path / "whole.safetensors")
    state = load_file(tmp_path / "whole.safetensors")
    with torch.device("meta"):
        plain = Classifier()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain.load_state_dict(state, assign=True)
    for table in ("position_ids", "token_type_ids"):
        setattr(plain.encoder.embeddings, table, torch.zeros(1, 64, dtype=torch.int64))
    step_with(plain, optimizer)
    assert all(torch.equal(value, state[name]) for name, value in plain.named_parameters())  # nothing was trained
    model = build(Classifier)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = leaks(model)
    with pytest.raises(LoadError, match="optimizer was built too early: AdamW"):
        materialise(model, tmp_path / "whole.safetensors")
    assert leaks(model) == before
    del early
    materialise(model, tmp_path / "whole.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # Filled again in place, the same parameters stay the optimizer's.
    materialise(model, tmp_path / "whole.safetensors")
    refuse_early_optimizer(model, optimizer)
    step_with(model.train(), optimizer)
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, state[name])]
    assert "encoder.encoder.layer.0.output.dense.weight" in changed and "head.bias" in changed


# Later versions of transformers have another name for it.
RENAMED = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


@RENAMED
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_c15b_a_layer_on_disk(llama, tmp_path):
    folder, _ = llama
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    plain = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=str(tmp_path / "off")
    ).train()
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(LoadError, match="on meta") as caught:
        refuse_offload(plain, doing="training")
    assert "model.layers.1" in str(caught.value)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert any("layers.1.self_attn.q_proj.lora_A" in name for name in leaks(adapted))
    with pytest.raises(LoadError, match="on meta"):
        refuse_offload(adapted, doing="training")


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


def wrong_in_company(tmp_path, count):
    """How many models come out wrong when 4 threads load while 2 others build plain modules."""
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
        loaded = [loading.submit(load_one, number) for number in range(count // 2)]
        built = [building.submit(plain_values, number % 5) for number in range(count - count // 2)]
        return sum(not future.result() for future in (*loaded, *built))


def maker(kind):
    return BertModel if kind == "bert" else AutoModelForCausalLM.from_config


def test_c21_loading_in_company(tmp_path):
    assert wrong_in_company(tmp_path, 120) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_c21_loading_in_company_two_thousand_times(tmp_path):
    assert wrong_in_company(tmp_path, examples(2000)) == 0


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
