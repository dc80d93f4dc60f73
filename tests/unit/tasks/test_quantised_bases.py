"""Quantised bases: equal to transformers' own, loaded strictly, planned to the byte, and with the right gradients."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantised
import tiny_lms
from dryfit.meta import quantised_layers
from dryfit.meta.pretrained import DTYPES, Kind, load_frozen
from dryfit.settings.choices import BaseFormat, BuiltInTask, Precision
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.execution import WEIGHT_FORMATS, PlanSubject, WeightFormat, base_format, check_sharded
from dryfit.settings.tables import LoraSettings, ModelSettings, TrainSettings, TrialSettings
from dryfit.tasks.causal_lm import CausalLm, check_packing
from dryfit.training.model import enable_checkpointing
from dryfit.training.step import backward_batch
from dryfit.training.step_tracer import step_parts
from parts import need_package
from quantised import FORMATS, INT8, NF4, NF4_TWICE, batch, by_transformers, loaded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes", "ignore::DeprecationWarning:bitsandbytes")
ARCHITECTURES = ("gpt2", "llama", "mistral", "qwen2")
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module", autouse=True)
def _package() -> None:
    need_package("bitsandbytes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: tiny_lms.causal_lm(root / name, name) for name in ARCHITECTURES}


def ours(folder: Path, base: WeightFormat, **how: Any) -> Any:
    return load_frozen(ModelSettings(name=str(folder)), Kind.CAUSAL_LM, base, device="cpu", **how)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return weights, buffers and scales, as bitsandbytes writes them."""
    return dict(model.state_dict())


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    found, wanted = tensors(one), tensors(other)
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: one.dtype for name, one in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_base_has_the_numbers_that_transformers_gives_it(
    folders: dict[str, Path], architecture: str, name: str
) -> None:
    base = FORMATS[name]
    mine, plain = ours(folders[architecture], base), quantised.by_transformers(folders[architecture], base)
    assert any(key.endswith((".SCB", ".absmax")) for key in tensors(plain))
    assert_same(mine, plain)
    ids = quantised.batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(mine(input_ids=ids).logits, plain(input_ids=ids).logits)
    layers = sum(type(one).__name__ in ("Linear4bit", "Linear8bitLt") for one in plain.modules())
    assert f"{layers} weights quantised from float32" in mine.load_report.notes
    assert set(mine.load_report.from_file) == {key for key, _ in mine.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_that_was_quantised_before_is_loaded_strictly(
    folders: dict[str, Path], tmp_path: Path, architecture: str, name: str
) -> None:
    base, plain = FORMATS[name], quantised.by_transformers(folders[architecture], FORMATS[name])
    plain.save_pretrained(tmp_path)
    again = quantised.by_transformers(tmp_path, base)
    mine = ours(tmp_path, base)
    assert_same(mine, again)
    assert set(mine.load_report.from_file) == {key for key, _ in mine.named_parameters()}
    assert not mine.load_report.random
    assert any("were quantised in the file" in note for note in mine.load_report.notes)
    ids = quantised.batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(mine(input_ids=ids).logits, again(input_ids=ids).logits)


@pytest.mark.parametrize("base", [INT8, NF4, NF4_TWICE], ids=["int8", "nf4", "nf4 twice"])
def test_the_matrices_of_a_base_are_those_that_it_computes_with(folders: dict[str, Path], base: WeightFormat) -> None:
    layer = ours(folders["llama"], base).get_submodule(LAYER)
    matrix = ours(folders["llama"], base, as_matrices=torch.float64).get_submodule(LAYER)
    assert type(matrix) is torch.nn.Linear and matrix.weight.dtype == torch.float64
    # In fp32 the layer and its matrix multiply the same numbers.
    one = torch.eye(layer.in_features)
    found = layer.train()(one.requires_grad_()).detach().T.double()
    tolerance = 2.0**-7 if base.compute is Precision.BF16 else 1e-6
    torch.testing.assert_close(found, matrix.weight.detach(), rtol=tolerance, atol=1e-3 if base is INT8 else 1e-6)


def _trained(folder: Path, lora: LoraSettings, how: str, *, validated: bool) -> tuple[Any, Any]:
    task, model, _ = quantised.loaded(folder, lora, precision=Precision.FP32)
    if how != "none":
        enable_checkpointing(model.base(), reentrant=how == "reentrant")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(1))
        if validated:
            ids = quantised.batch()["input_ids"]
            model.eval()(ids, torch.ones_like(ids))
    model.train()
    return task, model


def _gradients(task: Any, model: CausalLm) -> dict[str, torch.Tensor]:
    model.zero_grad()
    backward_batch(
        model, quantised.batch(), task, micro_batch=2, backward=lambda loss: loss.backward(), autocast=nullcontext
    )
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("how", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gradients_are_those_over_the_matrices_before_and_after_a_validation(
    folders: dict[str, Path], tmp_path: Path, architecture: str, double_quant: bool, how: str
) -> None:
    folder, matrices = folders[architecture], tmp_path / "matrices"
    base = WeightFormat(BaseFormat.NF4, 4, Precision.FP32, quantised=True, double_quant=double_quant)
    shutil.copytree(folder, matrices)
    ours(folder, base, as_matrices=torch.float32).save_pretrained(matrices)
    wanted = _gradients(*_trained(matrices, LoraSettings(r=4, dropout=0.0, base=BaseFormat.FP32), how, validated=False))
    lora = LoraSettings(r=4, dropout=0.0, base=BaseFormat.NF4, double_quant=double_quant)
    for validated in (False, True):
        found = _gradients(*_trained(folder, lora, how, validated=validated))
        assert found.keys() == wanted.keys() and all(one.abs().max() > 1e-6 for one in wanted.values())
        for name, gradient in found.items():
            scale = float(wanted[name].abs().max())
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def _planned(folder: Path, base: WeightFormat) -> torch.nn.Module:
    lora = LoraSettings(r=4, base=base.name, double_quant=base.double_quant, compute=base.compute)
    settings = TrialSettings(
        model=ModelSettings(name=str(folder)), train=TrainSettings(precision=base.compute), lora=lora
    )
    subject = PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=lora)
    return step_parts(subject, checkpointing=False, reentrant=False).model


def _bytes(model: Any) -> int:
    """Return the bytes of a base: parameters, buffers, and scales wherever bitsandbytes keeps them."""
    held: dict[int, int] = {}
    for part in model.modules():
        weight, state = getattr(part, "weight", None), getattr(part, "quant_state", None)
        scales = [getattr(weight, "SCB", None), getattr(weight, "CB", None)]
        if state is not None:
            scales += [state.absmax, state.code, state.offset]
            scales += [state.state2.absmax, state.state2.code] if state.nested else []
        for one in (*part.parameters(recurse=False), *part.buffers(recurse=False), *scales):
            if one is not None:
                held[one.untyped_storage().data_ptr() or id(one)] = one.untyped_storage().nbytes()
    return sum(held.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["nf4", "nf4 twice", "nf4 half", "int8 half"])
def test_planned_weights_are_those_of_the_real_module_to_the_byte(
    folders: dict[str, Path], architecture: str, name: str
) -> None:
    planned: Any = _planned(folders[architecture], FORMATS[name])
    wanted = _bytes(ours(folders[architecture], FORMATS[name]))
    held = {id(one): one.nbytes for key, one in planned.named_parameters() if "lora_" not in key}
    assert sum((held | {id(one): one.nbytes for one in planned.buffers()}).values()) == wanted


def _damage(folder: Path, target: Path, change: Any) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def _state(weights: dict[str, torch.Tensor], **changes: Any) -> None:
    key = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    text = json.loads(bytes(weights[key].tolist())) | changes
    weights[key] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.pop(f"{LAYER}.weight.absmax"), "missing"),
        (lambda w: w.pop(f"{LAYER}.weight.quant_state.bitsandbytes__nf4"), r"missing|\[0\]"),
        (lambda w: w.update({f"{LAYER}.weight": w[f"{LAYER}.weight"][:-1].clone()}), "in the file, not"),
        (lambda w: w.update({f"{LAYER}.weight.absmax": w[f"{LAYER}.weight.absmax"].float()}), "uint8"),
        (lambda w: w.update({"model.layers.1.mlp.strange.absmax": torch.zeros(3)}), "strange"),
        (lambda w: _state(w, shape=[7, 7]), "shape"),
        (lambda w: _state(w, quant_type="fp4"), "fp4"),
        (lambda w: _state(w, dtype="load"), "type"),
        (lambda w: _state(w, nested_offset="nan"), "nested_offset"),
        (lambda w: _state(w, further=1), "damaged"),
        (
            lambda w: w.update(
                {f"{LAYER}.weight.quant_state.bitsandbytes__nf4": torch.full((90,), 91, dtype=torch.uint8)}
            ),
            "damaged",
        ),
    ],
    ids=[
        "no scales",
        "no state",
        "short",
        "other scales",
        "stray",
        "shape",
        "fp4",
        "dtype",
        "nan",
        "further",
        "brackets",
    ],
)
def test_a_damaged_quantised_checkpoint_is_refused_in_words(
    folders: dict[str, Path], tmp_path: Path, change: Any, told: str
) -> None:
    quantised.by_transformers(folders["llama"], NF4_TWICE).save_pretrained(tmp_path / "whole")
    with pytest.raises(LoadError, match=told):
        ours(_damage(tmp_path / "whole", tmp_path / "damaged", change), NF4_TWICE)


@pytest.mark.parametrize(
    ("stored", "wanted", "told"),
    [
        (NF4_TWICE, NF4, "double quantisation"),
        (NF4, INT8, 'lora.base = "nf4"'),
        (INT8, WEIGHT_FORMATS[BaseFormat.BF16], 'lora.base = "int8"'),
        (NF4, None, 'lora.base = "nf4"'),
    ],
    ids=["twice", "int8", "bf16", "trained"],
)
def test_a_checkpoint_that_is_quantised_otherwise_is_refused_in_words(
    folders: dict[str, Path], tmp_path: Path, stored: WeightFormat, wanted: WeightFormat | None, told: str
) -> None:
    quantised.by_transformers(folders["llama"], stored).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=told):
        load_frozen(ModelSettings(name=str(tmp_path)), Kind.CAUSAL_LM, wanted, device="cpu")


def test_a_base_without_a_weight_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = _damage(folders["qwen2"], tmp_path / "broken", lambda w: w.pop(f"{LAYER}.weight"))
    with pytest.raises(LoadError, match=rf"missing \({LAYER}.weight\)"):
        ours(broken, NF4)


def test_weights_of_no_linear_layer_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = tiny_lms.causal_lm(tmp_path, "mixtral")
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=r"no linear layer.*experts"):
        ours(folder, NF4)


def test_a_missing_package_or_backend_is_told_before_anything_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSettings(name=str(folders["llama"]))
    with pytest.raises(MachineError, match="cannot quantise on xpu"):
        load_frozen(source, Kind.CAUSAL_LM, NF4, device="xpu")
    monkeypatch.setattr(quantised_layers, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="bitsandbytes is not installed"):
        ours(folders["llama"], INT8)


@pytest.mark.parametrize("base", [NF4, INT8], ids=["nf4", "int8"])
def test_processes_do_not_share_a_quantised_base(base: WeightFormat) -> None:
    with pytest.raises(ConfigError, match=r"fp32, fp16 or bf16"):
        check_sharded(base)


PEAK = """
import gc, re, sys, threading, time, torch
from pathlib import Path
from dryfit.settings.choices import BaseFormat, Precision
from dryfit.settings.tables import ModelSettings
from dryfit.settings.execution import WeightFormat
from dryfit.meta.pretrained import load_frozen
from dryfit.meta.pretrained import Kind
torch.set_num_threads(1)

def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

base = WeightFormat(BaseFormat.NF4, 4, Precision.FP32, quantised=True)
load = lambda folder: load_frozen(ModelSettings(name=folder), Kind.CAUSAL_LM, base, device="cpu")
load(sys.argv[1])  # imports, and what they keep
gc.collect()
before, most, done = own_bytes(), [0], []
def watch():
    while not done:
        most[0] = max(most[0], own_bytes())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[2])
done.append(True)
thread.join()
print(most[0] - before, own_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_host_memory_holds_one_whole_matrix_beyond_the_quantised_model(tmp_path: Path) -> None:
    small = tiny_lms.causal_lm(tmp_path / "small")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_key_value_heads": 4}
    large = tiny_lms.causal_lm(tmp_path / "large", sizes=sizes)  # about 350 MB, its matrices 17 MB
    # So that malloc gives matrices of this size back at once, as it does with those above 32 MiB.
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=given_back)
    most, held = map(int, done.stdout.split())
    assert 40e6 < held < 70e6
    matrix = 4 * 1024 * 4096
    # Beside it what bitsandbytes takes while it quantises one on a CPU, more than four times as much; all have 21.
    assert most < held + 7 * matrix, (most, held)


# ---- Decoders with adapters: where weights come from, in which format, and that each adapter learns


INTEGERS = {BaseFormat.INT8: [torch.int8], BaseFormat.NF4: [torch.uint8]}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decoders")
    return {name: tiny_lms.causal_lm(root / name, name) for name in ("qwen2", "llama")}


@pytest.mark.parametrize("base", list(BaseFormat))
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_adapters_are_in_fp32_beside_a_base_of_any_format(
    decoders: dict[str, Path], architecture: str, base: BaseFormat
) -> None:
    folder = decoders[architecture]
    _, model, report = loaded(folder, LoraSettings(r=4, base=base, dropout=0.0))
    formats = {name: weight.dtype for name, weight in model.named_parameters()}
    format_ = base_format(LoraSettings(base=base), TrainSettings(precision=Precision.BF16))
    wanted = DTYPES[format_.compute]
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {formats[name] for name in learned} == {torch.float32}
    frozen = {dtype for name, dtype in formats.items() if name not in learned}
    assert frozen == {wanted, *INTEGERS.get(base, ())}
    assert learned == {name for name in formats if "lora_" in name}
    assert set(report.random) == {name for name in formats if "lora_A" in name}
    # B is zero: the model begins as its base, which is the file's.
    plain = by_transformers(folder, format_)
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, torch.ones_like(ids)), plain(input_ids=ids).logits)


def test_adapters_are_a_function_of_the_seed(decoders: dict[str, Path]) -> None:
    drawn: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        named = loaded(decoders["qwen2"], LoraSettings(), seed=seed)[1].named_parameters()
        drawn.append(torch.cat([weight.detach().flatten() for name, weight in named if "lora_A" in name]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert bool(drawn[0].any())


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("base", list(BaseFormat))
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_every_adapter_has_a_gradient_by_the_second_step(
    decoders: dict[str, Path], architecture: str, base: BaseFormat, how: str
) -> None:
    task, model, _ = loaded(decoders[architecture], LoraSettings(r=4, base=base, dropout=0.1))
    if how != "none":
        enable_checkpointing(model.base(), reentrant=how == "reentrant")
    model.train()
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-2)
    around = nullcontext if base is BaseFormat.FP32 else lambda: torch.autocast("cpu", torch.bfloat16)
    for step in (1, 2):
        optimizer.zero_grad()
        backward_batch(model, batch(), task, micro_batch=2, backward=lambda loss: loss.backward(), autocast=around)
        without = [name for name, weight in learned.items() if weight.grad is None or not weight.grad.abs().any()]
        assert without == ([name for name in learned if "lora_A" in name] if step == 1 else [])
        assert all(weight.grad.dtype == torch.float32 for weight in learned.values() if weight.grad is not None)
        optimizer.step()


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_checkpointing_changes_no_gradient(decoders: dict[str, Path], architecture: str) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for how in ("none", "reentrant", "not reentrant"):
        task, model, _ = loaded(decoders[architecture], LoraSettings(r=4, dropout=0.0, base=BaseFormat.FP32))
        if how != "none":
            enable_checkpointing(model.base(), reentrant=how == "reentrant")
        model.double().train()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=torch.Generator().manual_seed(1))
        backward_batch(model, batch(), task, micro_batch=2, backward=lambda loss: loss.backward(), autocast=nullcontext)
        found.append({n: w.grad for n, w in model.named_parameters() if w.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, found[0][name], rtol=1e-10, atol=1e-12)


def test_without_adapters_all_weights_are_trained_in_fp32(decoders: dict[str, Path]) -> None:
    _, model, report = loaded(decoders["qwen2"], LoraSettings(r=0))
    assert not report.random and model.adapted() is None
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in model.parameters())


def test_packing_is_looked_at_under_adapters_too(decoders: dict[str, Path]) -> None:
    check_packing(loaded(decoders["llama"], LoraSettings())[1])


def test_targets_that_are_not_there_are_told(decoders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="lora.targets"):
        loaded(decoders["qwen2"], LoraSettings(targets="no_such"))
