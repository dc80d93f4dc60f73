"""Kernels that code chooses itself on a virtual GPU, as JSON: ``python kernel_paths.py optimizers|attention|host``."""

import json
import sys
from typing import Any

import dryfit


def operators(gpu: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each operator from now on."""
    seen: list[tuple[str, Any]] = []
    gpu.dispatch.listeners.append(lambda func, args, kwargs, out: seen.append((func.name(), args)))
    return seen


def optimizers(gpu: Any) -> dict[str, Any]:
    """Whether a step of each optimizer, with its default settings, runs kernels for lists of tensors."""
    import torch
    from torch import nn
    from torch.optim import swa_utils

    seen, facts = operators(gpu), {}

    def has_lists() -> bool:
        return any("_foreach_" in name for name, _ in seen)

    without = (torch.optim.Optimizer, torch.optim.SparseAdam)  # the second takes sparse gradients alone
    classes = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    for kind in classes:
        if not issubclass(kind, torch.optim.Optimizer) or kind in without:
            continue
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)]).cuda()
        optimizer = kind(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        seen.clear()
        optimizer.step(*([lambda: torch.ones((), device="cuda")] if kind is torch.optim.LBFGS else []))
        facts[kind.__name__] = has_lists()
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn())
    averaged.update_parameters(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for name, act in {
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "average": lambda: averaged.update_parameters(model),
    }.items():
        seen.clear()
        act()
        facts[name] = has_lists()
    return facts


def attention(gpu: Any) -> dict[str, Any]:
    """Whether a causal model's attention in fp32 has a mask or is causal by itself, for several kinds of batches."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, intermediate_size=64, **sizes)).cuda()
    ids = torch.randint(100, (2, 12)).cuda()
    padded = torch.ones(2, 12, dtype=torch.long)
    padded[1, 8:] = 0
    packed = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1).cuda()
    seen, facts = operators(gpu), {}
    for name, given in {
        "alone": {},
        "ones": {"attention_mask": torch.ones_like(padded).cuda()},
        "padded": {"attention_mask": padded.cuda()},
        "packed": {"position_ids": packed},
        "unknown": {"attention_mask": torch.rand(2, 12, device="cuda").round().long()},
    }.items():
        seen.clear()
        model(input_ids=ids, use_cache=False, **given)
        calls = [args for kernel, args in seen if kernel == "aten::_scaled_dot_product_efficient_attention"]
        facts[name] = [{"mask": args[3] is not None, "causal": args[6] if len(args) > 6 else False} for args in calls]
    return facts


def host(gpu: Any) -> dict[str, Any]:
    """What the device holds after layers ran on the host, whose weights have no values either."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 16))
    out = model(torch.rand(64, 3, 32, 32)).square().sum()
    out.backward()
    return {"device": out.device.type, "most": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    with dryfit.virtual_gpu("1GiB") as virtual:
        print(json.dumps({"optimizers": optimizers, "attention": attention, "host": host}[sys.argv[1]](virtual)))
