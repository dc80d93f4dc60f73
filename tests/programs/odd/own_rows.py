"""It calls an operator without a kernel and an extension that is not there, for which rows may be given."""

import importlib.util

import torch

if __name__ == "__main__":
    import dryfit_test_extension

    torch.library.define("dryfit_test_rows::scale", "(Tensor x, float factor) -> Tensor")
    weight = torch.nn.Parameter(torch.ones(2**20, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        scaled = torch.ops.dryfit_test_rows.scale(weight.detach(), 2.0)
        shifted = dryfit_test_extension.shift(scaled)
        (weight * shifted).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("flash_attn is there:", importlib.util.find_spec("flash_attn") is not None)
