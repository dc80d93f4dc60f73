"""What each rule claims, against the operator itself: shard what goes in, and the slices of what comes out come out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dryfit.parallel.capture import capture
from dryfit.parallel.graph import LeafRole, Ref
from dryfit.parallel.regions import GraphAxes, find_axes

RANKS = 2


class Operator(nn.Module):
    """A function of parameters, which can be sharded."""

    def __init__(self, function, shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.given = nn.ParameterList(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        self.function = function

    def forward(self, ids: Tensor):
        return self.function(ids, *self.given)


def heads(ids, x):
    return x.view(x.shape[0], x.shape[1], -1, 7).transpose(1, 2).reshape(-1, x.shape[1], 7)


def rotated(ids, x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1) + x


def shared_heads(ids, q, k):
    k = k[:, :, None].expand(-1, -1, 3, -1, -1).reshape(k.shape[0], -1, *k.shape[2:])
    return q @ k.transpose(-1, -2)


# A function, the shapes of what it is given, and how many axes of theirs can be sharded.
CASES = {
    "linear": (lambda ids, x, w: F.linear(x, w), [(3, 4, 6), (8, 6)], 4),
    "bias": (lambda ids, x, w, b: F.linear(x, w, b)[..., None].relu(), [(3, 6), (8, 6), (8,)], 3),
    "addmm": (lambda ids, b, x, w: torch.addmm(b, x, w).relu(), [(8,), (4, 6), (6, 8)], 3),
    "matmul": (lambda ids, x, y: x @ y, [(2, 3, 4, 6), (2, 1, 6, 8)], 5),
    "bmm": (lambda ids, x, y: torch.bmm(x, y), [(2, 4, 6), (2, 6, 8)], 4),
    "broadcast": (lambda ids, x, y: (x + y) * x.sigmoid(), [(2, 4, 6), (4, 1)], 3),
    "heads": (heads, [(2, 5, 28)], 4),
    "rotated": (rotated, [(2, 4, 8)], 3),
    "shared heads": (shared_heads, [(2, 6, 4, 8), (2, 2, 5, 8)], 6),
    "chunk": (lambda ids, x: torch.mul(*x.chunk(2, -1)), [(4, 12)], 2),
    "unbind": (lambda ids, x: torch.mul(*x.unbind(1)), [(4, 2, 6)], 2),
    "permute": (lambda ids, x: x.permute(2, 0, 1).squeeze(1), [(1, 4, 6)], 2),
    "repeat": (lambda ids, x: x.repeat(3, 1), [(4, 6)], 2),
    "repeat_interleave": (lambda ids, x: x.repeat_interleave(3, 0), [(4, 6)], 2),
    "stack": (lambda ids, x, y: torch.stack((x, y), 1), [(4, 6), (4, 6)], 2),
    "unequal cat": (lambda ids, x, y: torch.cat((x, y), 1), [(4, 2), (4, 6)], 1),
    "pad": (lambda ids, x: F.pad(x, (1, 1)), [(4, 6)], 1),
    "select": (lambda ids, x: x[:, 0], [(4, 2)], 1),
    "uneven slice": (lambda ids, x: x[:, 1:3], [(4, 6)], 1),
    "softmax": (lambda ids, x: x.softmax(-1), [(4, 6)], 1),
    "layer_norm": (lambda ids, x, w, b: F.layer_norm(x, (6,), w, b), [(4, 6), (6,), (6,)], 1),
    "rms_norm": (lambda ids, x, w: F.rms_norm(x, (6,), w), [(4, 6), (6,)], 1),
    "sum": (lambda ids, x: x.sum((0, 2), keepdim=True), [(4, 2, 6)], 3),
    "mean": (lambda ids, x: x.mean(-1), [(4, 6)], 1),
    "amax": (lambda ids, x: x.amax(0), [(4, 6)], 1),
    "max": (lambda ids, x: x.max(0).values, [(4, 6)], 1),
    "topk": (lambda ids, x: x.topk(2, -1).values, [(4, 6)], 1),
    "gather": (lambda ids, x: x.gather(1, torch.zeros(x.shape[0], 2, dtype=torch.long, device=x.device)), [(4, 6)], 1),
    "index": (lambda ids, x: x[:, ids[0]], [(4, 12, 6)], 2),
    "index apart": (lambda ids, x: x[ids[0], :, ids[0]], [(12, 4, 12)], 1),
    "index_select": (lambda ids, x: x.index_select(1, ids[0]), [(4, 12)], 1),
    "embedding": (lambda ids, x: F.embedding(ids, x), [(12, 6)], 1),
    "cumsum": (lambda ids, x: x.cumsum(0), [(4, 6)], 0),
    "where": (lambda ids, x, y: torch.where(x > 0, x, y), [(4, 6), (6,)], 2),
    "attention": (lambda ids, q, k, v: F.scaled_dot_product_attention(q, k, v), [(2, 4, 3, 8)] * 3, 4),
    "grouped attention": (
        lambda ids, q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 8, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)],
        5,
    ),
    "cross_entropy": (lambda ids, x: F.cross_entropy(x, ids[0]), [(7, 12)], 0),
    "unknown": (lambda ids, x: torch.linalg.svdvals(x), [(4, 6)], 0),
}


def solved_of(name: str) -> tuple[Operator, GraphAxes]:
    function, shapes, _ = CASES[name]
    module = Operator(function, shapes)
    return module, find_axes(
        capture(module, lambda rows, length: {"ids": torch.zeros(rows, length, dtype=torch.long, device="meta")})
    )


def rank_slice(tensor: Tensor, traced: GraphAxes, ref: Ref, axis: int, rank: int) -> Tensor:
    for at in traced.places(ref, axis):
        outer, inner = traced.axes.layout(traced.dims[ref][at], axis)
        size = traced.axes.size(axis)
        index = torch.arange(tensor.shape[at]).view(outer, size, inner).chunk(RANKS, 1)[rank]
        tensor = tensor.index_select(at, index.reshape(-1))
    return tensor


QUICK = ("linear", "heads", "shared heads", "rotated", "grouped attention")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_rule_says_what_its_operator_does(name):
    module, traced = solved_of(name)
    ids = torch.randint(0, 12, (3, 7), generator=torch.Generator().manual_seed(1))
    given = {Ref(f"given.{at}"): tensor.detach() for at, tensor in enumerate(module.given)}
    whole = module.function(ids, *given.values())
    out = traced.graph.outputs[0]
    summed = {axis for met in traced.sums.values() for one in met for axis in traced.axes.axes_of(one.dim)}
    free = {
        axis
        for ref in given
        for dim in traced.axes_of(ref)
        for axis in dim
        if {reason.obstacle for reason in traced.axes.reasons(axis)} <= {"output"}
    }
    tables = name == "embedding"  # its rows are sharded by a module that masks ids: proved with the whole model
    free -= summed if tables else set()
    assert len(free) == CASES[name][2]
    for axis in free:
        if traced.axes.size(axis) % RANKS:
            continue
        parts = [
            module.function(ids, *(rank_slice(tensor, traced, ref, axis, rank) for ref, tensor in given.items()))
            for rank in range(RANKS)
        ]
        if axis in summed:
            shares = name in ("bias", "addmm")  # the bias is in each share, and something follows that is no sum
            assert shares or torch.allclose(sum(parts), whole, rtol=0, atol=1e-12)
        else:
            for rank, part in enumerate(parts):
                assert torch.allclose(part, rank_slice(whole, traced, out, axis, rank), rtol=0, atol=1e-12)


def test_what_holds_an_axis_is_named_with_its_place():
    _, traced = solved_of("unknown")
    assert all(leaf.role is not LeafRole.BUFFER for leaf in traced.graph.parameters())
    axis = traced.axes_of(Ref("given.0"))[0][0]
    assert "linalg_svdvals in the model itself has no rule here" in traced.axes.reasons(axis)[0].text
