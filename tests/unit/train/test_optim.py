import copy
import io
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny
from dryfit.gpu.kernels import route_attention
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import HeadSettings, OptimSettings, SchedSettings
from dryfit.tasks.base import TaskModel
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze
from dryfit.training.optimizer import (
    IMPLEMENTATIONS,
    ModelledOptimizer,
    OptimizerPlan,
    adamw8bit_state,
    cannot_offload,
    check_optimizer,
    make_optimizer,
    make_schedule,
    paged_adamw,
    paged_state,
    parameter_groups,
)
from parts import need_package


@pytest.fixture
def model(tmp_path: Path) -> EncoderWithHead:
    encoder, _ = load_pretrained(FolderSource(str(tiny.model(tmp_path / "model"))), Kind.ENCODER)
    return EncoderWithHead(encoder, HeadSpec(HeadSettings(layers=1), num_outputs=2))


def by_name(model: EncoderWithHead, optim: OptimSettings) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, optim)
        for parameter in group["params"]
    }


def test_every_trainable_parameter_is_in_one_group(model: EncoderWithHead) -> None:
    freeze(model, 1)
    groups = parameter_groups(model, OptimSettings(layer_decay=0.5))
    found = [parameter for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {parameter for parameter in model.parameters() if parameter.requires_grad}


def test_norms_and_biases_do_not_decay(model: EncoderWithHead) -> None:
    for name, (_, decay) in by_name(model, OptimSettings(weight_decay=0.3)).items():
        free = name.endswith("bias") or "LayerNorm" in name
        assert decay == (0.0 if free else 0.3), name


def test_learning_rates_fall_from_the_head_down(model: EncoderWithHead) -> None:
    found = by_name(model, OptimSettings(lr=1.0, layer_decay=0.5, head_lr_factor=3.0))
    want = {
        "head.": 3.0,
        "encoder.encoder.layer.1.": 0.5,
        "encoder.encoder.layer.0.": 0.25,
        "encoder.embeddings.": 0.125,
    }
    for prefix, rate in want.items():
        rates = {lr for name, (lr, _) in found.items() if name.startswith(prefix)}
        assert rates == {rate}, prefix


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.8535534, 0.5, 0.1464466]),
        ("cosine_restarts", [0.0, 0.5, 1.0, 0.5, 1.0, 0.5]),
        ("polynomial", [0.0, 0.5, 1.0, 0.75**3, 0.5**3, 0.25**3]),
        ("one_cycle", [0.04, 1.0, 0.853554, 0.500002, 0.14645, 4e-6]),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "radam", "nadam", "adafactor", "lion"])
def test_schedules(model: EncoderWithHead, optimizer: str, name: str, rates: list[float]) -> None:
    """Groups keep their shares of the rate: those of layer decay, and the head's."""
    optim = OptimSettings(name=optimizer, lr=1.0, layer_decay=0.5, head_lr_factor=3.0)
    groups = make_optimizer(model, optim)
    before = [{key: value for key, value in group.items() if key != "params"} for group in groups.param_groups]
    ratios = [group["lr"] for group in groups.param_groups]
    assert len(set(ratios)) == 4
    schedule = make_schedule(groups, SchedSettings(name=name, warmup_ratio=1 / 3, power=3.0), 6)
    for rate in rates:
        assert schedule.get_last_lr() == pytest.approx([rate * ratio for ratio in ratios], rel=1e-5, abs=1e-9)
        groups.step()
        schedule.step()
    for group, was in zip(groups.param_groups, before, strict=True):  # one-cycle leaves the momentum alone
        assert {key: group[key] for key in was if key != "lr"} == {key: was[key] for key in was if key != "lr"}


ALL = ["adamw", "sgd", "adafactor", "lion", "radam", "nadam"]
CASES = [(name, impl) for name in ALL for impl in (OptimizerImpl.AUTO, *IMPLEMENTATIONS[name])]


def fill_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.mark.parametrize(("name", "impl"), CASES)
def test_one_step_of_each_optimizer_moves_the_weights(model: EncoderWithHead, name: str, impl: OptimizerImpl) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fill_gradients(model, 0)
    make_optimizer(model, OptimSettings(name=name, lr=1e-3), OptimizerPlan(impl)).step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(before[key], value)]
    assert len(moved) == sum(1 for _ in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "radam", "nadam"])
def test_implementations_agree_up_to_rounding(model: EncoderWithHead, name: str) -> None:
    optim = OptimSettings(name=name, lr=1e-2, beta1=0.8, beta2=0.95, weight_decay=0.1, head_lr_factor=2.0)
    found = []
    for impl in IMPLEMENTATIONS[name]:
        copied = copy.deepcopy(model).double()
        optimizer = make_optimizer(copied, optim, OptimizerPlan(impl))
        for seed in range(8):  # RAdam trusts its second moment from the sixth step on
            fill_gradients(copied, seed)
            optimizer.step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in copied.parameters()]))
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 1e-14


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("before", IMPLEMENTATIONS["adamw"])
@pytest.mark.parametrize("after", IMPLEMENTATIONS["adamw"])
def test_a_saved_state_goes_on_in_the_way_of_whoever_loads_it(
    model: EncoderWithHead, name: str, before: OptimizerImpl, after: OptimizerImpl
) -> None:
    optim = OptimSettings(name=name, lr=1e-2, weight_decay=0.1, head_lr_factor=2.0)
    ended = []
    for second in (before, after):
        copied = copy.deepcopy(model).double()
        optimizer = make_optimizer(copied, optim, OptimizerPlan(before))
        for seed in range(6):
            if seed == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make_optimizer(copied, optim, OptimizerPlan(second))
                optimizer.load_state_dict(saved)
                ways = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
                assert set(ways) == {(second is OptimizerImpl.FUSED, second is OptimizerImpl.FOREACH)}
            fill_gradients(copied, seed)
            torch.nn.utils.clip_grad_norm_(copied.parameters(), 0.5)
            optimizer.step()
        ended.append(torch.cat([parameter.detach().flatten() for parameter in copied.parameters()]))
    assert float((ended[1] - ended[0]).norm() / ended[0].norm()) < 1e-14


@pytest.mark.parametrize("impl", IMPLEMENTATIONS["adamw"])
def test_a_loss_scaler_leaves_out_the_same_step_with_each_implementation(impl: OptimizerImpl) -> None:
    """With a fused optimizer the scaler hands its scale and what it found to the kernel, and asks nothing."""
    model, whole = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    whole.load_state_dict(model.state_dict())
    optim = OptimSettings(name="adamw", lr=1e-2, weight_decay=0.1)
    pairs = (model, impl), (whole, OptimizerImpl.PLAIN)
    optimizer, plain = (make_optimizer(one, optim, OptimizerPlan(how)) for one, how in pairs)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, broken in enumerate((False, True, False)):
        for one in (model, whole):
            fill_gradients(one, step)
        for parameter in model.parameters():
            parameter.grad *= scaler.scale(torch.tensor(1.0))
        if broken:
            model.bias.grad[0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if not broken:
            plain.step()
    assert scaler.get_scale() == 32.0
    assert torch.allclose(model.weight, whole.weight, rtol=1e-6, atol=0)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_lion_is_its_papers() -> None:
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2, with decoupled weight decay."""
    model = torch.nn.Linear(3, 2).double()
    lr, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.3
    want = model.weight.detach().clone()
    optim = OptimSettings(name="lion", lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay)
    optimizer = make_optimizer(model, optim)
    momentum = torch.zeros_like(want)
    for seed in range(4):
        fill_gradients(model, seed)
        gradient = model.weight.grad.clone()
        update = (beta1 * momentum + (1 - beta1) * gradient).sign()
        momentum = beta2 * momentum + (1 - beta2) * gradient
        want -= lr * (update + decay * want)
        optimizer.step()
    assert torch.allclose(model.weight, want, rtol=1e-13, atol=0)


@pytest.mark.parametrize("modelled", [False, True])
def test_a_rehearsed_radam_divides_by_its_second_moment_from_the_second_step_on(modelled: bool) -> None:
    """As the real one does from the sixth on, whatever ``beta2``: that takes most memory."""
    model = torch.nn.Linear(3, 2, bias=False)
    plan = OptimizerPlan(OptimizerImpl.PLAIN, modelled=modelled)
    optimizer = make_optimizer(model, OptimSettings(name="radam", beta2=0.1), plan)
    with torch.profiler.profile() as seen:
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    assert ("aten::sqrt" in {event.key for event in seen.key_averages()}) is modelled


@pytest.mark.parametrize("impl", IMPLEMENTATIONS["radam"])
@pytest.mark.parametrize("name", ["radam", "nadam"])
def test_weight_decay_is_decoupled(name: str, impl: OptimizerImpl) -> None:
    """As AdamW's: a step without gradients shrinks a weight by lr times the decay, whatever the moments are."""
    model = torch.nn.Linear(3, 2, bias=False).double()
    before = model.weight.detach().clone()
    optim = OptimSettings(name=name, lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(model, optim, OptimizerPlan(impl))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.allclose(model.weight, before * (1 - 0.1 * 0.5), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("name", "impl", "allowed"),
    [
        ("lion", "fused", '"auto" or "foreach" or "plain"'),
        ("radam", "fused", '"auto" or "foreach" or "plain"'),
        ("nadam", "fused", '"auto" or "foreach" or "plain"'),
        ("adafactor", "fused", '"auto" or "plain"'),
        ("adafactor", "foreach", '"auto" or "plain"'),
        ("adamw8bit", "plain", '"auto" or "fused"'),
    ],
)
def test_an_implementation_that_is_not_there_is_refused(
    model: EncoderWithHead, name: str, impl: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no such implementation") as caught:
        make_optimizer(model, OptimSettings(name=name), OptimizerPlan(OptimizerImpl(impl)))
    assert caught.value.allowed == allowed


@pytest.mark.parametrize("impl", list(OptimizerImpl))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_pretended_tensors_get_the_same_choice(name: str, device: str, impl: OptimizerImpl) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.nn.Parameter(torch.empty(4, 4, device=device))
    model = torch.nn.Module()
    model.weight = weight
    group = make_optimizer(model, OptimSettings(name=name), OptimizerPlan(impl)).param_groups[0]
    assert group["fused"] is (impl in (OptimizerImpl.AUTO, OptimizerImpl.FUSED))
    assert group["foreach"] is (impl is OptimizerImpl.FOREACH)


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("lion", "pytorch_optimizer", "lion"), ("adamw8bit", "bitsandbytes", "8bit")]
)
def test_a_library_that_is_not_there_is_named(
    model: EncoderWithHead, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MachineError, match=f"{module} is not installed") as caught:
        make_optimizer(model, OptimSettings(name=name))
    assert f"dryfit[{extra}]" in caught.value.hint


def test_where_the_state_cannot_lie_on_the_host(model: EncoderWithHead) -> None:
    assert cannot_offload(OptimSettings(), DeviceKind.CUDA) is None
    assert "already" in (cannot_offload(OptimSettings(), DeviceKind.CPU) or "")
    assert "8 bits" in (cannot_offload(OptimSettings(name="adamw8bit"), DeviceKind.CUDA) or "")
    with pytest.raises(ConfigError, match="it lies in host memory already"):
        make_optimizer(model, OptimSettings(), OptimizerPlan(offload=True))


def test_the_head_alone_has_its_factor() -> None:
    """All that is not pretrained is the head, whatever it is called."""

    class Two(TaskModel):
        encoder_paths = ("inner.model",)

    model = Two()
    model.inner = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 2), "spans": torch.nn.Linear(2, 2)})
    model.scale = torch.nn.Parameter(torch.ones(()))
    found = by_name(model, OptimSettings(lr=1.0, head_lr_factor=5.0))
    assert {name: lr for name, (lr, _) in found.items()} == {
        "inner.model.weight": 1.0,
        "inner.model.bias": 1.0,
        "inner.spans.weight": 5.0,
        "inner.spans.bias": 5.0,
        "scale": 5.0,
    }


# ---- Stand-ins hold the bytes that the real optimizers hold


def held(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[torch.dtype, int]]]:
    """Type and elements of each parameter's state, maps left out."""
    return {
        str(tuple(parameter.shape)): sorted(
            (
                (value.dtype, value.numel())
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and not name.startswith("qmap")
            ),
            key=str,
        )
        for parameter, state in optimizer.state.items()
    }


def model_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(70, 64), nn.Linear(64, 64), nn.Linear(64, 63), nn.Linear(63, 66))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_eight_bit_state_by_hand() -> None:
    big, small = nn.Parameter(torch.zeros(4097)), nn.Parameter(torch.zeros(4095))
    assert {name: (value.dtype, value.numel()) for name, value in adamw8bit_state(big).items()} == {
        "state1": (torch.uint8, 4097),
        "state2": (torch.uint8, 4097),
        "absmax1": (torch.float32, 17),
        "absmax2": (torch.float32, 17),
    }
    assert {(value.dtype, value.numel()) for value in adamw8bit_state(small).values()} == {(torch.float32, 4095)}


@pytest.mark.filterwarnings("ignore")  # its import warns of what it does itself
def test_eight_bit_state_is_the_librarys() -> None:
    need_package("bitsandbytes")
    found = []
    for modelled in (False, True):
        model = model_with_gradients()
        before = model[1].weight.detach().clone()
        optimizer = make_optimizer(model, OptimSettings(name="adamw8bit"), OptimizerPlan(modelled=modelled))
        optimizer.step()
        found.append(held(optimizer))
        assert torch.equal(before, model[1].weight) is modelled
    assert found[0] == found[1]


@pytest.mark.parametrize(("bits", "bytes_"), [(32, 4), (8, 1)])
def test_paged_state_of_large_tensors_is_on_the_host(bits: int, bytes_: int) -> None:
    with FakeTensorMode():
        large, small = (nn.Parameter(torch.empty(size, device="cuda")) for size in (100_000, 99_999))
        for parameter, device in ((large, "cpu"), (small, "cuda")):
            state = paged_state(parameter, bits=bits)
            for name in ("state1", "state2"):
                assert (state[name].device.type, state[name].nbytes) == (device, bytes_ * parameter.numel())
            scales = {name: one for name, one in state.items() if name.startswith("absmax")}
            assert len(scales) == (2 if bits == 8 else 0)
            assert {one.device.type for one in scales.values()} <= {"cuda"}


@pytest.mark.filterwarnings("ignore")  # its import warns of what it does itself, and it pages nothing on a CPU
@pytest.mark.parametrize("bits", [32, 8])
def test_paged_state_is_the_librarys_and_is_paged_again_after_a_resumption(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_package("bitsandbytes")
    cls = paged_adamw(bits)
    # As of a machine with CUDA, but for where the memory is.
    paged: list[tuple[int, torch.dtype]] = []

    def buffer(self: object, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        paged.append((parameter.numel(), dtype))
        return torch.zeros_like(parameter, dtype=dtype)

    monkeypatch.setattr(cls, "get_state_buffer", buffer)

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
        for seed in range(steps):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    model = model_with_gradients()
    optimizer = cls(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 2)
    modelled = ModelledOptimizer([{"params": list(model.parameters()), "lr": 1.0}], partial(paged_state, bits=bits))
    modelled.step()
    assert held(optimizer) == held(modelled)
    again = model_with_gradients()
    again.load_state_dict(model.state_dict())
    resumed = cls(again.parameters(), lr=1e-2)
    written = io.BytesIO()
    torch.save(optimizer.state_dict(), written)
    written.seek(0)
    paged.clear()
    resumed.load_state_dict(torch.load(written, weights_only=True))
    sizes = sorted(2 * [one.numel() for one in again.parameters()])
    assert sorted(size for size, _ in paged) == sizes
    assert torch.equal(stepped(again, resumed, 3), stepped(model, optimizer, 3))


def test_a_paged_optimizer_needs_cuda() -> None:
    for name in ("paged_adamw", "paged_adamw8bit"):
        with pytest.raises(ConfigError, match="memory that CUDA moves"):
            check_optimizer(OptimSettings(name=name), OptimizerPlan(), DeviceKind.CPU)
        check_optimizer(OptimSettings(name=name), OptimizerPlan(), DeviceKind.CUDA)
        assert "by itself" in (cannot_offload(OptimSettings(name=name), DeviceKind.CUDA) or "")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_holds_what_torchs_does(momentum: float) -> None:
    found = []
    for modelled in (False, True):
        model = model_with_gradients()
        plan = OptimizerPlan(OptimizerImpl.FUSED, modelled=modelled)
        optimizer = make_optimizer(model, OptimSettings(name="sgd", beta1=momentum), plan)
        optimizer.step()
        found.append({key: values for key, values in held(optimizer).items() if values})
    assert found[0] == found[1]
    assert bool(found[0]) is (momentum > 0)


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        (name, impl)
        for name, has in IMPLEMENTATIONS.items()
        if not name.startswith("paged")  # they need CUDA
        for impl in (OptimizerImpl.AUTO, *has)
    ],
)
def test_every_optimizer_steps_without_data(name: str, impl: OptimizerImpl) -> None:
    with route_attention("cpu", (8, 0)), FakeTensorMode():
        model = nn.Linear(80, 80)
        optimizer = make_optimizer(model, OptimSettings(name=name), OptimizerPlan(impl, modelled=True))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    assert optimizer.state


def test_parameters_without_gradient_get_no_state() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = ModelledOptimizer([{"params": [parameter], "lr": 1.0}], adamw8bit_state)
    optimizer.step()
    assert not optimizer.state
