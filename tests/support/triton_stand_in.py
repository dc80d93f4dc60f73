"""Launch kernels on a virtual GPU and print what came of it as JSON: Triton's where it is installed, else its stand-in.

``import triton`` is guarded by nothing here, so the stand-in is there.
"""

import json
from typing import Any

import dryfit

with dryfit.virtual_gpu("1GiB@8.9") as gpu:
    import torch
    import triton
    import triton.language as tl
    from torch.library import triton_op, wrap_triton
    from triton.language.extra import libdevice

    @triton.jit
    def helper(x):
        return tl.dot(x, x)

    @triton.jit
    def fused(x, y, n, BLOCK: tl.constexpr = 8):
        tl.store(y, libdevice.tanh(tl.load(x)))

    @triton.jit
    def multiplies(x, y, n):
        tl.store(y, helper(tl.load(x)))

    tried: list[str] = []

    def hook(given: dict[str, Any]) -> None:
        tried.append(f"{given['BLOCK']} warps {given.get('num_warps')}")

    @triton.autotune(
        [triton.Config({"BLOCK": 128}, num_warps=2, pre_hook=hook), triton.Config({"BLOCK": 256}, num_warps=8)],
        key=["n"],
        reset_to_zero=["y"],
        restore_value=["x"],
    )
    @triton.heuristics({"n": lambda given: given["x"].numel()})
    @triton.jit
    def tuned(x, y, n, BLOCK: tl.constexpr):
        tl.store(y, tl.load(x))

    def refused(call: Any) -> str:
        try:
            call()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    facts: dict[str, Any] = {"assumed": gpu.assumed}
    source, out = torch.arange(4, device="cuda"), torch.zeros(4, device="cuda", dtype=torch.int64)
    facts["known"] = [source.tolist(), (out + 1).tolist()]
    before = torch.cuda.memory_allocated()
    grids: list[Any] = []
    fused[(1,)](source, out, 4)
    fused[lambda given: grids.append([given["n"], given["BLOCK"]]) or (triton.cdiv(4, given["BLOCK"]),)](source, out, 4)
    facts["grids"], facts["taken"] = grids, torch.cuda.memory_allocated() - before
    facts["after"] = (out + 1).tolist()
    facts["untimed before"] = gpu.multiplies_unseen

    torch.cuda.reset_peak_memory_stats()
    numbers, sums = torch.ones(2**20, device="cuda"), torch.ones(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        tuned[(1,)](numbers, sums)
    facts["tried"] = sorted(set(tried))
    facts["best"] = tuned.best_config.kwargs
    facts["tuning"] = torch.cuda.max_memory_allocated() - before
    facts["kept by tuning"] = torch.cuda.memory_allocated() - before

    host = torch.zeros(4)
    facts["host"] = refused(lambda: fused[(1,)](host, out, 4))
    fused[(1,)](torch.zeros(4, pin_memory=True), out, 4)
    facts["lacks"] = refused(lambda: fused[(1,)](source))
    target = triton.runtime.driver.active.get_current_target()
    facts["target"] = [target.backend, target.arch, target.warp_size]
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    facts["properties"] = [properties["multiprocessor_count"], properties["max_shared_mem"]]
    facts["benchmark"] = triton.testing.do_bench(lambda: fused[(1,)](source, out, 4))
    facts["registers"] = fused.warmup(source, out, 4, grid=(1,)).n_regs
    facts["powers"] = [triton.next_power_of_2(n) for n in (1, 5, 8)]

    @triton_op("dryfit_test::scaled", mutates_args={})
    def scaled(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        scratch = torch.empty(2**20, device=x.device)
        wrap_triton(fused)[(1,)](x, made, scratch.numel())
        return made

    scaled.register_autograd(lambda _, gradient: scaled(gradient))

    @torch.library.custom_op("dryfit_test::without_fake", mutates_args=())
    def without_fake(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        fused[(1,)](x, made, x.numel())
        return made

    leaf = torch.ones(2**18, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    product = scaled(leaf)
    facts["operator"] = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    product.sum().backward()
    facts["gradient"] = list(leaf.grad.shape)
    facts["operator without fake"] = list(without_fake(leaf.detach()).shape)
    multiplies[(1,)](source, out, 4)
    facts["untimed"] = gpu.multiplies_unseen
    facts["notes"] = gpu.notes
print(json.dumps(facts))
