"""A graph network on a sparse adjacency, sparse weights, and an embedding with sparse gradients."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
NODES, EDGES, WIDTH = 2048, 16384, 64


def held() -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def grown(before: int, size: int) -> None:
    """Assert that as many bytes are held besides, in blocks of 512."""
    assert device == "cpu" or held() - before == size, (held() - before, size)


places = torch.arange(EDGES, device=device) * 37 % (NODES * NODES)
indices = torch.stack([places // NODES, places % NODES])
values = torch.ones(EDGES, device=device)
before = held()
raw = torch.sparse_coo_tensor(indices, values, (NODES, NODES))
grown(before, 0)  # it has the same memory
adjacency = raw.coalesce()
grown(before, EDGES * (2 * 8 + 4))
assert adjacency.is_coalesced() and adjacency._nnz() == EDGES
on_host = torch.sparse_coo_tensor(indices.cpu(), values.cpu(), (NODES, NODES)).coalesce()
before = held()
moved = on_host.to(device)
grown(before, EDGES * (2 * 8 + 4) if device == "cuda" else 0)
assert torch.sparse.sum(adjacency, 1).to_dense().shape == (NODES,)
assert (adjacency * 2 + moved).coalesce().t().shape == (NODES, NODES)

users = nn.Embedding(NODES, WIDTH, sparse=True, device=device)
words = nn.EmbeddingBag(100, WIDTH, sparse=True, mode="sum", device=device)
layer = nn.Linear(WIDTH, WIDTH, device=device)
weights = nn.Parameter(torch.rand(WIDTH, device=device))
diagonal = torch.arange(WIDTH, device=device).expand(2, WIDTH)
optimizers = (
    torch.optim.SparseAdam([*users.parameters(), *words.parameters()]),
    torch.optim.AdamW([*layer.parameters(), weights]),
)
for _ in range(4):
    rotation = torch.sparse_coo_tensor(diagonal, weights, (WIDTH, WIDTH)).coalesce()
    nodes = users(torch.randint(0, NODES, (NODES,), device=device))
    nodes = nodes + words(torch.randint(0, 100, (NODES, 5), device=device))
    nodes = torch.sparse.mm(rotation, layer(nodes).t()).t()
    for _ in range(2):
        before = held()
        nodes = torch.sparse.mm(adjacency, nodes)
    loss = nodes.square().mean() + rotation.to_dense().diagonal().sum()
    loss.backward()
    assert users.weight.grad is not None and users.weight.grad.is_sparse
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
state = optimizers[0].state[users.weight]
assert state["exp_avg"].shape == users.weight.shape
print("trained")
