"""How long operators take on a GPU, as CSV: what a model of step time must reproduce.

    python benchmarks/gpu_rates.py > docs/measurements/gpu-rates-h200.csv

Each row is the median of repeated calls between device events, on inputs drawn anew, with more data than the cache
holds where memory traffic is what is measured. ``work`` is floating-point operations of products, attention and
convolutions, and bytes read and written of everything else. Rows of kind ``host`` are the host's time for one launch.
"""

import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

Row = tuple[str, str, str, float, float]
SAMPLES, LEAST_S = 9, 0.01


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call on the device."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    repeats = max(1, min(200, int(LEAST_S / max(1e-6, time.perf_counter() - began_s))))
    found = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(found)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def products() -> Iterator[Row]:
    """Matrix products: bf16, TF32 and fp32, square, tall, thin, batched."""
    shapes = [(1, n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384)]
    shapes += [(1, 4096, 896, 4864), (1, 4096, 4864, 896), (1, 4096, 151936, 896), (1, 8192, 50304, 768)]
    shapes += [(1, 8192, 2304, 768), (1, 2048, 11008, 4096), (1, 2048, 4096, 11008), (1, 64, 4096, 4096)]
    shapes += [
        (1, 1000, 1000, 1000),
        (1, 16, 8192, 8192),
        (96, 1024, 1024, 64),
        (96, 1024, 64, 1024),
        (8, 512, 512, 512),
    ]
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for batch, m, n, k in shapes:
            if name == "fp32" and batch * m * n * k > 2**37:
                continue
            a, b = randn(batch, m, k, dtype=dtype), randn(batch, k, n, dtype=dtype)
            yield (
                "product",
                f"{batch}x{m}x{n}x{k}",
                name,
                2.0 * batch * m * n * k,
                timed(lambda a=a, b=b: torch.bmm(a, b)),
            )
    torch.backends.cuda.matmul.allow_tf32 = False


def attention() -> Iterator[Row]:
    """Fused attention, forward and backward."""
    for (rows, heads, length, width), causal in itertools.product(
        ((8, 12, 1024, 64), (4, 16, 2048, 64), (1, 32, 4096, 128), (32, 12, 256, 64), (64, 12, 128, 64)), (False, True)
    ):
        q, k, v = (randn(rows, heads, length, width, grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        gradient = torch.randn_like(out)
        name, work = (
            f"{rows}x{heads}x{length}x{width}{' causal' if causal else ''}",
            4.0 * rows * heads * length**2 * width,
        )
        with torch.no_grad():
            seconds = timed(lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c))
        yield "attention forward", name, "bf16", work, seconds
        back = lambda o=out, g=gradient, i=(q, k, v): torch.autograd.grad(o, i, g, retain_graph=True)  # noqa: E731
        yield "attention backward", name, "bf16", 2.5 * work, timed(back)


def convolutions() -> Iterator[Row]:
    """Convolutions of ResNet-50 and a U-Net, forward and backward."""
    for into, out, size, kernel, groups in (
        (64, 64, 56, 3, 1), (256, 64, 56, 1, 1), (128, 128, 28, 3, 1), (256, 256, 14, 3, 1), (512, 512, 7, 3, 1),
        (3, 64, 224, 7, 1), (256, 256, 64, 3, 1), (144, 144, 56, 3, 144),
    ):  # fmt: skip
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "tf32")):
            for layout in (torch.contiguous_format, torch.channels_last):
                x = (
                    randn(32, into, size, size, dtype=dtype, grad=True)
                    .to(memory_format=layout)
                    .detach()
                    .requires_grad_()
                )
                weight = randn(out, into // groups, kernel, kernel, dtype=dtype, grad=True)
                work = 2.0 * 32 * out * size**2 * (into // groups) * kernel**2
                shape = f"32x{into}x{size} to {out}, {kernel}x{kernel}, groups {groups}, {str(layout)[6:]}"
                run = lambda x=x, w=weight, k=kernel, g=groups: F.conv2d(x, w, padding=k // 2, groups=g)  # noqa: E731
                with torch.no_grad():
                    yield "convolution forward", shape, name, work, timed(run)
                made = run()
                gradient = torch.randn_like(made)
                back = lambda o=made, g=gradient, i=(x, weight): torch.autograd.grad(o, i, g, retain_graph=True)  # noqa: E731
                yield "convolution backward", shape, name, 2 * work, timed(back)


def memory() -> Iterator[Row]:
    """Operators that move bytes."""
    for count in (2**16, 2**20, 2**24, 2**28):
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            x, y = randn(count, dtype=dtype), randn(count, dtype=dtype)
            size = x.element_size()
            for kind, work, call in (
                ("add", 3 * size, lambda x=x, y=y: x + y),
                ("gelu", 2 * size, lambda x=x: F.gelu(x)),
                ("copy", 2 * size, lambda x=x: x.clone()),
                (
                    "cast",
                    size + (6 - size),
                    lambda x=x: x.to(torch.float32 if x.dtype is torch.bfloat16 else torch.bfloat16),
                ),
                ("sum", size, lambda x=x: x.sum()),
                ("fill", size, lambda x=x: torch.zeros_like(x)),
                ("dropout", 2 * size + 1, lambda x=x: torch.native_dropout(x, 0.1, True)),
            ):
                yield kind, str(count), name, float(work * count), timed(call)
            rows = x.view(-1, 1024)
            yield "softmax", f"{count // 1024}x1024", name, 2.0 * size * count, timed(lambda r=rows: r.softmax(-1))
            yield (
                "layer norm",
                f"{count // 1024}x1024",
                name,
                2.0 * size * count,
                timed(lambda r=rows: F.layer_norm(r, (1024,))),
            )
            turned = rows.t()
            yield (
                "transpose copy",
                f"{count // 1024}x1024",
                name,
                2.0 * size * count,
                timed(lambda t=turned: t.contiguous()),
            )
    logits, labels = randn(8192, 50304, dtype=torch.float32, grad=True), torch.randint(50304, (8192,), device="cuda")
    yield "log softmax", "8192x50304", "fp32", 8.0 * logits.numel(), timed(lambda: logits.detach().log_softmax(-1))
    loss = F.cross_entropy(logits, labels)
    back = lambda: torch.autograd.grad(loss, logits, retain_graph=True)  # noqa: E731
    yield "cross entropy backward", "8192x50304", "fp32", 12.0 * logits.numel(), timed(back)
    table, ids = randn(50304, 768, dtype=torch.float32, grad=True), torch.randint(50304, (8, 1024), device="cuda")
    found = F.embedding(ids, table)
    yield "embedding", "8192 of 50304x768", "fp32", 8.0 * found.numel(), timed(lambda: F.embedding(ids, table.detach()))
    gradient = torch.randn_like(found)
    back = lambda: torch.autograd.grad(found, table, gradient, retain_graph=True)  # noqa: E731
    yield "embedding backward", "8192 of 50304x768", "fp32", 4.0 * (found.numel() * 2 + table.numel()), timed(back)


def optimizers() -> Iterator[Row]:
    """A step of AdamW and SGD over 148 tensors, 100 million weights in all."""
    for name, kinds, numbers in (
        ("AdamW", {"fused": True}, 7),
        ("AdamW", {"foreach": True}, 7),
        ("SGD", {"foreach": True}, 3),
    ):
        weights = [randn(820, 824, dtype=torch.float32, grad=True) for _ in range(148)]
        for one in weights:
            one.grad = torch.randn_like(one)
        optimizer = getattr(torch.optim, name)(weights, lr=1e-3, **kinds)
        work = 4.0 * numbers * sum(one.numel() for one in weights)
        yield "optimizer", f"{name} {next(iter(kinds))}", "fp32", work, timed(optimizer.step)
    norm = lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)  # noqa: E731
    yield "optimizer", "clip_grad_norm_", "fp32", 12.0 * sum(one.numel() for one in weights), timed(norm)


def copies() -> Iterator[Row]:
    """Copies between host and device."""
    for size in (2**12, 2**20, 2**28):
        for name, host in (
            ("pageable", torch.zeros(size, dtype=torch.uint8)),
            ("pinned", torch.zeros(size, dtype=torch.uint8).pin_memory()),
        ):
            yield (
                f"to device, {name}",
                str(size),
                "bytes",
                float(size),
                timed(lambda h=host: h.to("cuda", non_blocking=True)),
            )
        there = torch.zeros(size, dtype=torch.uint8, device="cuda")
        yield "to host", str(size), "bytes", float(size), timed(lambda t=there: t.cpu())


def host() -> Iterator[Row]:
    """The host's time for a launch, by kind: of many tiny operators, without waiting for the device."""

    def per_call(call: Callable[[], Any], count: int = 2000) -> float:
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        found = []
        for _ in range(5):
            began_s = time.perf_counter()
            for _ in range(count):
                call()
            found.append((time.perf_counter() - began_s) / count)
            torch.cuda.synchronize()
        return statistics.median(found)

    x, w = randn(8, 64, dtype=torch.float32, grad=True), randn(64, 64, dtype=torch.float32, grad=True)
    layer = torch.nn.Linear(64, 64, device="cuda")
    plain = x.detach()
    for name, call in (
        ("add without gradient", lambda: plain + plain),
        ("add with gradient", lambda: x + x),
        ("linear module", lambda: layer(x)),
        ("product", lambda: x @ w),
        ("view", lambda: plain.view(64, 8)),
        ("layer norm", lambda: F.layer_norm(x, (64,))),
        ("fill", lambda: torch.zeros(8, 64, device="cuda")),
        ("item", plain[0, 0].item),
    ):
        yield "host", name, "fp32", 1.0, per_call(call)
    deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device="cuda") for _ in range(100)])

    def backward() -> None:
        deep(x).sum().backward()

    def forward() -> None:
        deep(x)

    both, one = per_call(backward, 20), per_call(forward, 20)
    yield "host", "forward of 100 linear layers, each", "fp32", 1.0, one / 100
    yield "host", "backward of 100 linear layers, each", "fp32", 1.0, (both - one) / 100


def main() -> None:
    """Write the rows as they come."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    device, version = torch.cuda.get_device_name(0), torch.__version__
    writer.writerow(("kind", "shape", "type", "work", "seconds", "device", "torch"))
    for part in (products, attention, convolutions, memory, optimizers, copies, host):
        for kind, shape, name, work, seconds in part():
            writer.writerow((kind, shape, name, f"{work:.0f}", f"{seconds:.4g}", device, version))
        sys.stdout.flush()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
