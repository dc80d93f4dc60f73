"""It calls what few scripts call: NVTX, CUDA graphs, typed tensors, torch.func, CTC, experts in fp32, counts."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.cuda.FloatTensor(4, 8).fill_(1) if on_gpu else torch.ones(4, 8)
if on_gpu:
    assert isinstance(batch, torch.cuda.FloatTensor) and not isinstance(batch, torch.cuda.HalfTensor)
    assert len(torch.cuda.default_generators) == 1 and "process" in torch.cuda.list_gpu_processes()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(batch)
    graph.replay()
    assert captured.shape == (4, 2)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept = [torch.empty(3 * 2**20, dtype=torch.uint8, device=device) for _ in range(3)]
        del kept[0]
    # A private pool takes a segment of 20 MiB; the counters have its tensors alone.
    assert torch.cuda.memory_allocated() - before == 6 * 2**20
    assert torch.cuda.max_memory_allocated() - before == 9 * 2**20


def loss_of_row(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    return functional_call(model, weights, (row,)).square().mean()


rows = vmap(grad(loss_of_row), in_dims=(None, 0))(dict(model.named_parameters()), batch)
assert rows["weight"].shape == (4, 2, 8)
labels = torch.randint(0, 2, (4, 3), device=device)
assert torch.bincount(labels.flatten(), minlength=2).shape == (2,)
assert batch.new([2.5]).item() == 2.5 and batch.new(3, 2).shape == (3, 2) and batch.new(labels.shape).shape == (4, 3)
values, where = torch.unique(labels, return_inverse=True)
assert values.ndim == 1 and where.shape == labels.shape
rows_of_labels, of_row, times = torch.unique(labels, dim=0, return_inverse=True, return_counts=True)
assert rows_of_labels.shape[1:] == (3,) and of_row.shape == (4,) and times.shape == rows_of_labels.shape[:1]
runs, lengths = torch.unique_consecutive(labels, return_counts=True)
assert runs.shape == lengths.shape and torch.unique_consecutive(labels, dim=1).shape[0] == 4
left, right = torch.randn(2, 6, 5, device=device, requires_grad=True), torch.randn(2, 6, 3, device=device)
solved = torch.linalg.lstsq(left, right)
assert solved.solution.shape == (2, 5, 3) and (not on_gpu or solved.residuals.shape == (2, 3))
solved.solution.sum().backward()
every_second = model.weight.new_zeros(8, dtype=torch.bool)  # what is made like a weight knows its own values
every_second[::2] = True
put = torch.zeros_like(batch)
put[:, every_second] = model.weight[0, :4]
put.sum().backward()
assert batch[:, every_second].shape == (4, 4)
chosen = torch.randn(4, 3, device=device) > 0
counts = chosen.sum(0).tolist()  # as many as there are positions, for each column: mixtures of experts split so
assert [len(part) for part in chosen.T.nonzero().split(counts)] == counts
experts = torch.randn(2, 8, 16, device=device, requires_grad=True)
ends = torch.tensor([1, 4], dtype=torch.int32, device=device)
products = nn.functional.grouped_mm(batch, experts, offs=ends)
assert products.shape == (4, 16)
products.square().mean().backward()
assert experts.grad is not None and experts.grad.shape == experts.shape
with torch.profiler.profile() as recorded, torch.autograd.profiler.record_function("once"):
    model(batch)
assert "once" in recorded.key_averages().table(sort_by="cuda_time_total")
# A device without events makes torch write a stack for each operator.
assert not on_gpu or torch.autograd.profiler.profile(use_device="cuda").use_device is None
for _ in range(3):
    if on_gpu:
        torch.cuda.nvtx.range_push("step")
    logits = model(torch.randn(20, 4, 8, device=device)).log_softmax(-1)
    # Lengths on the host, as its documentation has them.
    loss = nn.functional.ctc_loss(logits, torch.ones_like(labels), torch.full((4,), 20), torch.full((4,), 3))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if on_gpu:
        torch.cuda.nvtx.range_pop()
print("called")
