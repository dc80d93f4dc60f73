import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, T5Config, T5EncoderModel

from dryfit.gpu.slots import leaks, slots
from dryfit.meta.propagation import ShapeSpec, allow_real_inputs, as_specs, refuse_real_inputs, shapes
from dryfit.settings.errors import LoadError

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 72, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**COMMON, "num_key_value_heads": 1, "head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": COMMON,
    "roberta": COMMON,
    "electra": {**COMMON, "embedding_size": 16},
    "albert": {**COMMON, "embedding_size": 16},
    "convbert": {**COMMON, "embedding_size": 32, "num_attention_heads": 4, "head_ratio": 2},
    "mpnet": COMMON,
    "deberta-v2": {
        **COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False
    },
    "distilbert": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "modernbert": {**COMMON, "reference_compile": False, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2},
    "xlnet": {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "llama": DECODER,
    "mistral": {**DECODER, "sliding_window": 8},
    "qwen2": DECODER,
    "gemma2": DECODER,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 72},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
}  # fmt: skip


def build(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    if name == "t5":
        return T5EncoderModel(T5Config(**ARCHITECTURES[name], **more)).eval()
    return AutoModel.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name], **more)).eval()


def really(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """The same answer from the real model."""
    seen: dict[str, list[Any]] = {}
    handles = [
        part.register_forward_hook(
            lambda _m, _a, out, name=name: seen.setdefault(name, []).append(as_specs(out)) and None
        )
        for name, part in model.named_modules()
    ]
    with torch.no_grad():
        output = model(**inputs)
    for handle in handles:
        handle.remove()
    return as_specs(output), {name: tuple(calls) for name, calls in seen.items()}


def ids(rows: int = 2, columns: int = 11) -> torch.Tensor:
    return torch.randint(5, 60, (rows, columns), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_equal_to_the_real_model(name: str) -> None:
    model = build(name)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    inputs = {"input_ids": ids(), "attention_mask": mask}
    want, per_module = really(model, inputs)
    assert shapes(model, inputs).output == want
    state = torch.get_rng_state()
    meta = model.to("meta")
    specs = {"input_ids": ShapeSpec((2, 11), torch.int64), "attention_mask": mask.to("meta")}
    got = shapes(meta, specs)
    assert got.output == want
    assert dict(got.modules) == per_module
    assert got.output["last_hidden_state"].shape[:2] == (2, 11)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(leaks(meta)) == len(slots(meta))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in meta.modules())


@pytest.mark.parametrize("name", ["bert", "llama", "deberta-v2"])
def test_types_of_half_precision_and_training_mode(name: str) -> None:
    model = build(name).to(torch.bfloat16).train()
    want, per_module = really(model, {"input_ids": ids()})
    got = shapes(model.to("meta"), {"input_ids": ids()})
    assert got.output == want
    assert dict(got.modules) == per_module
    assert got.output["last_hidden_state"].dtype is torch.bfloat16


class Mixed(nn.Module):
    """A real head on a body that may be on meta, with plain attributes; what it stores must not come back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.scale = torch.ones(3, dtype=torch.float64)
        self.tables = (torch.zeros(1, 3),)
        self.last = None

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        hidden, (state, _) = self.body(x)
        self.last = hidden
        scores = self.head(hidden[:, -1].double()) * self.scale + self.tables[0]
        return {"scores": torch.cat([scores, scores]) if twice else scores, "state": [state], "twice": twice}


@pytest.mark.parametrize("where", ["cpu", "meta", "mixed"])
def test_plain_attributes_and_mixed_modules(where: str) -> None:
    module = Mixed()
    if where != "cpu":
        (module if where == "meta" else module.body).to("meta")
    if where == "meta":
        module.scale = module.scale.to("meta")
    before = [(slot.name, slot.tensor) for slot in slots(module)]
    got = shapes(module, (ShapeSpec((5, 7, 4)),))
    f64 = torch.float64
    assert got.output == {"scores": ShapeSpec((5, 3), f64), "state": [ShapeSpec((1, 5, 6))], "twice": False}
    assert got.modules["head"] == (ShapeSpec((5, 3), f64),)
    assert module.last is None
    after = [(slot.name, slot.tensor) for slot in slots(module)]
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is two for (_, one), (_, two) in zip(after, before, strict=True))
    assert shapes(module, {"x": torch.ones(5, 7, 4), "twice": True}).output["scores"] == ShapeSpec((10, 3), f64)


class Asks(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x * self.weight)


@pytest.mark.parametrize(
    "what, said",
    [
        (lambda x: x if x.sum() > 0 else x[:1], "aten._local_scalar_dense.default reads the values"),
        (lambda x: x[:, : int(x.max())], "aten._local_scalar_dense.default reads the values"),
        (lambda x: x[x > 0], "the shape aten.nonzero.default gives depends on the values"),
        (lambda x: torch.unique(x), "depends on the values"),
    ],
)
def test_what_depends_on_values_is_refused_by_name(what: Callable[[torch.Tensor], Any], said: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), Asks(what))
    with pytest.raises(LoadError) as caught:
        shapes(module, (torch.ones(2, 3),))
    assert "in 1 (Asks)" in caught.value.found
    assert said in caught.value.found
    assert not module._forward_hooks and not module[1]._forward_hooks


def test_errors_of_the_model_are_its_own() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        shapes(module, (torch.ones(2, 4),))
    assert caught.value.__notes__ == ["propagating shapes through Sequential, in 0 (Linear)"]
    assert not module[0]._forward_pre_hooks


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.stream = (number for number in range(3))
    with pytest.raises(LoadError, match="cannot be copied"):
        shapes(module, (torch.ones(1, 2),))


def test_nothing_is_allocated_for_a_large_model() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=8, hidden_size=8192, intermediate_size=28672)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    got = shapes(model, {"input_ids": ShapeSpec((4, 4096), torch.int64), "use_cache": True})
    assert got.output["last_hidden_state"] == ShapeSpec((4, 4096, 8192))
    assert len(got.output["past_key_values"]) == 8


@pytest.fixture
def empty() -> BertModel:
    with torch.device("meta"):
        model = BertModel(BertConfig(**COMMON))
    return model.eval()


def test_real_inputs_into_an_empty_model_are_refused(empty: BertModel) -> None:
    assert empty(ids()).last_hidden_state.is_meta  # what torch makes of it
    assert refuse_real_inputs(empty) is empty
    total = len(list(empty.parameters()))
    for model in (empty, copy.deepcopy(empty)):
        for args, kwargs in (((ids(),), {}), ((), {"input_ids": ids()}), ((ids().to("meta"), ids()), {})):
            with pytest.raises(LoadError, match="the model has no weights yet") as caught:
                model(*args, **kwargs)
            assert f"{total} of {total} parameters are on meta" in caught.value.found
            assert "materialise" in caught.value.hint
        with pytest.raises(LoadError, match="1 of 1 parameters"):
            model.embeddings.word_embeddings(ids())
    assert list(empty.state_dict()) == list(BertModel(BertConfig(**COMMON)).state_dict())


def test_meta_and_fake_inputs_pass(empty: BertModel) -> None:
    # Constructed values stay real in a model built by dryfit; they are no input.
    empty.embeddings.position_ids = torch.arange(72)[None]
    empty.embeddings.token_type_ids = torch.zeros(1, 72, dtype=torch.int64)
    refuse_real_inputs(empty)
    assert empty(ids().to("meta")).last_hidden_state.is_meta
    with pytest.raises(LoadError):
        empty(ids())
    assert shapes(empty, {"input_ids": ids()}).output["last_hidden_state"].shape == (2, 11, 32)


def test_a_failing_call_leaves_no_trace(empty: BertModel) -> None:
    refuse_real_inputs(empty)
    empty.encoder.layer[1].register_forward_hook(lambda module, args, output: output[0, 0, 0].item())
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        empty(ids().to("meta"))
    with pytest.raises(LoadError):
        empty(ids())
    with pytest.raises(LoadError):
        empty(ids())


def test_the_refusal_ends_with_the_weights_or_on_request(empty: BertModel) -> None:
    refuse_real_inputs(refuse_real_inputs(empty))
    hooks = [len(part._forward_pre_hooks) for part in empty.modules()]
    assert max(hooks) == 1
    full = BertModel(BertConfig(**COMMON)).eval()
    empty.load_state_dict(full.state_dict(), assign=True)
    empty.embeddings.position_ids = full.embeddings.position_ids
    empty.embeddings.token_type_ids = full.embeddings.token_type_ids
    assert torch.equal(empty(ids()).last_hidden_state, full(ids()).last_hidden_state)
    allow_real_inputs(empty)
    for part in empty.modules():
        tables = (part._forward_pre_hooks, part._forward_hooks, part._forward_pre_hooks_with_kwargs)
        assert not any((*tables, part._forward_hooks_always_called))


def test_a_wrapper_without_arguments_does_not_hide_real_tensors(empty: BertModel) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Any:
            return self.model(ids())

    with pytest.raises(LoadError, match="no weights yet"):
        refuse_real_inputs(Wrapper(empty))()
