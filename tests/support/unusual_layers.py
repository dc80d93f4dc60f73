"""Layers that few models have, on a virtual GPU: facts, found in a fresh process and printed as JSON."""

import json
from typing import Any

import dryfit


def main() -> None:
    """Print what such layers take and where they are."""
    with dryfit.virtual_gpu("4GiB") as gpu:
        import torch
        from torch import nn

        facts: dict[str, Any] = {}

        def trained(model: nn.Module, given: Any) -> list[Any]:
            """Places of parameters and gradients, and the shape of the output, after a step."""
            out = model(given)
            out = out[0] if isinstance(out, tuple) else out
            torch.optim.SGD(model.parameters()).zero_grad()
            (out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out).sum().backward()
            tensors = [(one, one.grad) for one in model.parameters()]
            return [sorted({str(one.device) for pair in tensors for one in pair if one is not None})]

        rows, length, width, hidden = 4, 10, 32, 64
        for kind in (nn.GRU, nn.LSTM, nn.RNN):
            layer = kind(width, hidden, num_layers=2, batch_first=True, bidirectional=True).cuda()
            given = torch.randn(rows, length, width, device="cuda")
            facts[kind.__name__] = [*trained(layer, given), list(layer(given)[0].shape)]
            sizes = torch.tensor([10, 7, 7, 2])
            packed, _ = layer(nn.utils.rnn.pack_padded_sequence(given, sizes, batch_first=True))
            again, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
            facts[kind.__name__] += [list(packed.data.shape), list(again.shape), lengths.tolist()]
        layer = nn.GRU(width, hidden, batch_first=True).cuda()
        torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")  # the workspace of products comes first
        before = torch.cuda.memory_allocated()
        with torch.backends.cudnn.flags(enabled=False):
            states = layer(given)
        facts["cells"] = torch.cuda.memory_allocated() - before
        del states

        lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3)).cuda().half()
        first = list(lazy.parameters())
        facts["lazy"] = trained(lazy, torch.randn(2, 3, 8, 8, device="cuda", dtype=torch.float16))
        facts["lazy shapes"] = [list(one.shape) for one in first]
        facts["lazy types"] = sorted({f"{one.dtype} {type(one).__name__}" for one in lazy.state_dict().values()})
        facts["same objects"] = all(one is two for one, two in zip(first, lazy.parameters(), strict=True))
        facts["on the device"] = trained(nn.LazyLinear(3, device="cuda"), torch.randn(2, 5, device="cuda"))

        for name in ("matrix_exp", "cayley", "householder"):
            turned = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16).cuda(), orthogonal_map=name)
            facts[name] = trained(turned, torch.randn(2, 16, device="cuda"))
        torch.geqrf(torch.randn(16, 16, device="cuda"))

        real = torch.randn(8, 8, requires_grad=True)
        same = real
        real.name_of_mine = "kept"  # pyright: ignore[reportAttributeAccessIssue]
        real.data = torch.zeros(8, 8, device="cuda")
        (same * 2).sum().backward()
        facts["set"] = [str(same.device), str(real.grad.device), same.is_leaf, getattr(same, "name_of_mine", "")]

        class Coded(nn.Parameter):
            """As bitsandbytes before 0.50 has one: of its own attributes alone."""

            def __new__(cls, data: torch.Tensor, requires_grad: bool = False, codes: str = "") -> Any:
                self: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
                self.codes = codes
                return self

        coded = Coded(torch.ones(4, device="cuda"), codes="nf4")
        again = Coded(coded.to("cuda"), **vars(coded))
        facts["coded"] = [
            type(again).__name__,
            isinstance(again, Coded),
            getattr(again, "codes", ""),
            str(again.device),
        ]
    facts["unknown"] = [one.what for one in gpu.unknown.values()]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
