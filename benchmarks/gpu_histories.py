"""What operators allocate on a GPU, in order: JSON lines, from the allocator's own history.

    python benchmarks/gpu_histories.py > docs/measurements/gpu-histories-h200.jsonl

Each line names an operator, its inputs, the kernel that autograd names, and the allocations (positive) and frees
(negative) in bytes of one call, after calls that made what is made once. Backward passes are lines of their own.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[str, str, Callable[[], Any]]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def history(call: Callable[[], Any]) -> tuple[list[int], Any]:
    """Allocations and frees of a call; its result is kept until they are read."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    made = call()
    torch.cuda.synchronize()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[one["action"]] * one["size"] for one in entries if one["action"] in signs], made


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def attention() -> Iterator[Case]:
    """Scaled dot product attention, in the layout that layers give it."""
    for dtype in (BF16, FP16, FP32):
        for rows, heads, kv_heads, length, width in (
            (16, 12, 12, 512, 64), (4, 14, 2, 512, 64), (2, 8, 8, 1000, 128), (2, 8, 8, 512, 256), (2, 8, 8, 512, 80),
            (8, 12, 12, 50, 32),
        ):  # fmt: skip
            q = rand(rows, length, heads, width, dtype=dtype).detach().transpose(1, 2).requires_grad_()
            k, v = (
                rand(rows, length, kv_heads, width, dtype=dtype).detach().transpose(1, 2).requires_grad_()
                for _ in range(2)
            )
            padding = torch.ones(rows, 1, length, length, dtype=torch.bool, device="cuda")
            padding[:, :, :, length // 2 :] = False
            bias = torch.zeros(rows, 1, length, length, dtype=dtype, device="cuda")
            for name, given in {
                "plain": {},
                "causal": {"is_causal": True},
                "boolean mask": {"attn_mask": padding},
                "expanded boolean mask": {"attn_mask": padding.expand(-1, heads, -1, -1)},
                "added mask": {"attn_mask": bias},
                "dropout": {"dropout_p": 0.1},
                "boolean mask, dropout": {"attn_mask": padding, "dropout_p": 0.1},
            }.items():
                shape = f"{rows}x{heads}({kv_heads})x{length}x{width} {str(dtype)[6:]}, {name}"
                more = {"enable_gqa": True} if kv_heads != heads else {}
                yield (
                    "attention",
                    shape,
                    lambda q=q, k=k, v=v, g=given, m=more: F.scaled_dot_product_attention(q, k, v, **g, **m),
                )


def convolutions() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        for into, out, size, kernel, stride, groups in (
            (3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (256, 512, 56, 1, 2, 1),
            (512, 512, 7, 3, 1, 1), (144, 144, 56, 3, 1, 144), (96, 96, 56, 7, 1, 96), (3, 768, 224, 16, 16, 1),
            (128, 128, 64, 3, 1, 1),
        ):  # fmt: skip
            for layout in (torch.contiguous_format, torch.channels_last):
                x = rand(16, into, size, size, dtype=dtype).detach().contiguous(memory_format=layout).requires_grad_()
                layer = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False)
                layer = layer.to("cuda", dtype).to(memory_format=layout)
                shape = f"16x{into}x{size} to {out}, {kernel}x{kernel}/{stride}, groups {groups}, {str(dtype)[6:]}"
                yield "convolution", f"{shape}, {str(layout)[6:]}", lambda x=x, c=layer: c(x)
    x = rand(16, 512, 4, 4, dtype=FP32)
    layer = nn.ConvTranspose2d(512, 256, 4, 2, 1).cuda()
    yield "transposed convolution", "16x512x4 to 256, 4x4/2, float32", lambda: layer(x)
    y = rand(8, 128, 1000, dtype=FP32)
    line = nn.Conv1d(128, 128, 5, padding=2).cuda()
    yield "convolution in one dimension", "8x128x1000, 5, float32", lambda: line(y)


def layers() -> Iterator[Case]:
    """Other layers, losses and functions."""
    for dtype in (BF16, FP32):
        text = str(dtype)[6:]
        x = rand(16, 512, 768, dtype=dtype)
        for name, layer in {
            "layer norm": nn.LayerNorm(768),
            "rms norm": nn.RMSNorm(768),
            "linear": nn.Linear(768, 3072),
            "dropout": nn.Dropout(0.1),
            "gelu": nn.GELU(),
            "softmax": nn.Softmax(-1),
            "cumsum": lambda given: given.cumsum(-1),
            "mean": lambda given: given.mean(1),
            "maximum": lambda given: given.amax(1),
            "norm": lambda given: given.norm(dim=-1),
            "sort": lambda given: given.sort(-1)[0],
            "top 50": lambda given: given.topk(50, dim=-1)[0],
            "index": lambda given: given[:, torch.arange(0, 512, 3, device="cuda")],
            "gather": lambda given: given.gather(1, torch.zeros(16, 5, 768, dtype=torch.long, device="cuda")),
            "masked": lambda given: given[given[..., 0] > 0],
        }.items():
            made = layer.to("cuda", dtype) if isinstance(layer, nn.Module) else layer
            yield name, f"16x512x768 {text}", lambda m=made, x=x: m(x)
        images = rand(16, 128, 56, 56, dtype=dtype)
        for name, layer in {
            "batch norm": nn.BatchNorm2d(128),
            "group norm": nn.GroupNorm(32, 128),
            "maximum pooling": nn.MaxPool2d(3, 2, 1),
            "average pooling": nn.AvgPool2d(2),
            "adaptive pooling": nn.AdaptiveAvgPool2d(1),
            "nearest": nn.Upsample(scale_factor=2),
            "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
            "unfold": nn.Unfold(3),
        }.items():
            made = layer.to("cuda", dtype)
            yield name, f"16x128x56x56 {text}", lambda m=made, x=images: m(x)
        for tokens, rows, width in ((512, 30522, 768), (8192, 30522, 768), (8192, 2, 768), (65536, 512, 100)):
            table = nn.Embedding(rows, width).to("cuda", dtype)
            ids = torch.randint(rows, (tokens,), device="cuda")
            yield "embedding", f"{tokens} of {rows}x{width} {text}", lambda t=table, i=ids: t(i)
        bag = nn.EmbeddingBag(10000, 64).to("cuda", dtype)
        bags = torch.randint(10000, (512, 50), device="cuda")
        yield "embedding bag", f"512x50 of 10000x64 {text}", lambda b=bag, i=bags: b(i)
        logits, labels = rand(4096, 32000, dtype=dtype), torch.randint(32000, (4096,), device="cuda")
        yield "cross entropy", f"4096x32000 {text}", lambda x=logits, y=labels: F.cross_entropy(x, y)
        yield (
            "smoothed cross entropy",
            f"4096x32000 {text}",
            lambda x=logits, y=labels: F.cross_entropy(x, y, label_smoothing=0.1),
        )
        for kind in ("LSTM", "GRU"):
            recurrent = getattr(nn, kind)(256, 512, num_layers=2, batch_first=True, dropout=0.1).to("cuda", dtype)
            sequence = rand(32, 100, 256, dtype=dtype)
            yield kind, f"32x100x256, 2 layers of 512, {text}", lambda r=recurrent, x=sequence: r(x)[0]
    frames = rand(200, 16, 50, dtype=FP32)
    words, lengths = torch.randint(1, 50, (16, 30), device="cuda"), torch.full((16,), 200)
    yield (
        "ctc loss",
        "200x16x50, 30 labels",
        lambda: F.ctc_loss(frames.log_softmax(-1), words, lengths, torch.full((16,), 30)),
    )


def steps() -> Iterator[Case]:
    """Steps of optimizers and clipping, over 20 matrices; no backward pass."""
    for dtype in (FP32, BF16):
        weights = [rand(1000, 1000, dtype=dtype) for _ in range(20)]
        for one in weights:
            one.grad = torch.randn_like(one)
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("AdamW", {}),
            ("AdamW", {"fused": True}),
            ("SGD", {"momentum": 0.9}),
        ]
        kinds += [("Adafactor", {}), ("RMSprop", {}), ("Adagrad", {}), ("NAdam", {}), ("RAdam", {}), ("Muon", {})]
        for name, given in kinds:
            optimizer = getattr(torch.optim, name)(weights, lr=1e-3, **given)
            yield (
                f"{name} step",
                f"20 x 1000x1000 {str(dtype)[6:]}{' fused' * bool(given.get('fused'))}",
                optimizer.step,
            )
        yield "clipping", f"20 x 1000x1000 {str(dtype)[6:]}", lambda w=weights: nn.utils.clip_grad_norm_(w, 1.0)


def main() -> None:
    """Write a line for each call and its backward pass."""

    def write(name: str, shape: str, way: str, kernel: str, found: list[int]) -> None:
        facts = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
        line = {"operator": name, "inputs": shape, "pass": way, "kernel": kernel, "bytes": found}
        print(json.dumps(line | facts))

    for part in (attention, convolutions, layers, steps):
        for name, shape, call in part():
            try:
                found, out = history(call)
                kernel = type(out.grad_fn).__name__ if isinstance(out, torch.Tensor) and out.grad_fn else ""
                write(name, shape, "forward", kernel, found)
                if kernel:
                    gradient = torch.randn_like(out)

                    def backward(out: torch.Tensor = out, gradient: torch.Tensor = gradient) -> Any:
                        return torch.autograd.grad(out, leaves(out), gradient, retain_graph=True)

                    write(name, shape, "backward", kernel, history(backward)[0])
            except RuntimeError as error:
                print(f"{name} {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.stdout.flush()
        torch.cuda.empty_cache()


def leaves(out: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a result's gradient reaches."""
    found, seen, waiting = [], set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found


if __name__ == "__main__":
    main()
