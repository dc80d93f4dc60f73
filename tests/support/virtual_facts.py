"""Facts about a virtual GPU, found in a fresh process and printed as JSON: ``python virtual_facts.py``."""

import copy
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import dryfit


def saved(without_values: dict[str, Any], brought: Any, real: dict[str, Any]) -> list[Any]:
    """Return what is left of a file that was there, and what two others hold, by torch and by safetensors."""
    import safetensors.torch
    import torch

    left: list[Any] = []
    with TemporaryDirectory() as folder:
        for save, load in [(torch.save, torch.load), (safetensors.torch.save_file, safetensors.torch.load_file)]:
            there, new = Path(folder, f"{len(left)}-there"), Path(folder, f"{len(left)}-new")
            there.write_text("of an earlier training")
            for lost in (without_values, {"host": brought}):
                try:
                    save(lost, there)
                except dryfit.DryfitError as error:
                    left.append([error.code, there.read_text()])
            for _ in range(2):  # its own file may be written again
                save(without_values, new)
            for replaces in [os.replace, os.rename, shutil.copy, shutil.move]:
                try:
                    replaces(new, there)
                except dryfit.DryfitError as error:
                    left.append([error.code, there.read_text()])
            os.replace(shutil.copy(new, f"{new}.tmp"), new)
            read = load(new)
            left.append({name: list(one.shape) for name, one in read.items()} == shapes(without_values))
            save(real, there)  # what has values is none of our business
            left.append(load(there)["host"].tolist())
    return left


def shapes(tensors: dict[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of tensors by their names."""
    return {name: list(one.shape) for name, one in tensors.items()}


def main() -> None:
    """Print what a few lines of ordinary code see on a virtual GPU of 1 GiB."""
    with dryfit.virtual_gpu("1GiB") as gpu:
        import torch
        from torch import nn

        from dryfit.gpu.functions import VirtualFunctions

        facts: dict[str, Any] = {}
        facts["available"] = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name()]
        facts["total"] = torch.cuda.get_device_properties(0).total_memory

        # An optimizer that is made before the model moves goes on with the same parameters.
        model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
        model.append(nn.Linear(512, 512))
        model[3].weight = model[3].weight
        optimizer = torch.optim.AdamW(model.parameters())
        before = list(model.parameters())
        model.to("cuda")
        facts["same_objects"] = all(one is two for one, two in zip(before, model.parameters(), strict=True))
        facts["moved"] = [str(one.device) for one in model.parameters()]
        facts["weights"] = torch.cuda.memory_allocated()
        for _ in range(2):
            loss = model(torch.randn(8, 512).cuda()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        facts["with_state"] = torch.cuda.memory_allocated()

        # Values that are known stay known; others are read as ones and zeros.
        sizes = torch.tensor([3, 1, 2], device="cuda")
        facts["known"] = [sizes.tolist(), (sizes * 2 + 1).cpu().tolist(), sizes.max().item(), bool((sizes > 0).all())]
        written, drawn = sizes.clone(), sizes.clone()
        written[0] = 7
        drawn.data[1:] = torch.rand(2, device="cuda").long()
        facts["written"] = [written.cpu().tolist(), drawn.cpu().tolist()]
        facts["unknown"] = (
            model(torch.zeros(2, 512, device="cuda")).detach().cpu().numpy().tolist() == [[0.0] * 512] * 2
        )
        facts["chosen"] = torch.arange(6, device="cuda")[torch.tensor([True, False] * 3, device="cuda")].tolist()
        mask = torch.ones(2, 5, dtype=torch.long)
        mask[1, 3:] = 0
        facts["mask"] = [bool(mask.cuda().all()), int(mask.cuda().sum())]

        # A loop over elements does not go the long way of torch's fakes.
        labels = torch.tensor([3, 1, 2] * 20, device="cuda")
        asked: list[Any] = []
        mode = type(labels.fake_mode)
        dispatch, mode.dispatch = mode.dispatch, lambda *given: asked.append(given[1]) or dispatch(*given)
        for at, label in enumerate(labels):
            labels[at] = label.item() + torch.tensor([4])[0].item()
            labels[at : at + 1][0] = torch.tensor(label.item() + 1)
        mode.dispatch = dispatch
        facts["elements"] = [labels.tolist() == [8, 6, 7] * 20, len(asked)]

        # Errors are torch's.
        kept = torch.cuda.memory_allocated()
        facts["errors"] = []
        for attempt in (
            lambda: torch.empty(2**31, dtype=torch.uint8, device="cuda"),
            lambda: torch.empty(1, device="cuda:1"),
            lambda: model(torch.zeros(2, 512)),
            lambda: torch.zeros(2, device="cuda").numpy(),
        ):
            try:
                attempt()
            except Exception as error:
                facts["errors"].append([type(error).__name__, str(error)])
        facts["after_error"] = torch.cuda.memory_allocated() == kept

        # A backward pass ends where there is no room, in Python's functions and in torch's own.
        class TakesTooMuch(torch.autograd.Function):
            """A function whose gradient needs, three times, more than there is."""

            @staticmethod
            def forward(ctx, given):
                return given * 1

            @staticmethod
            def backward(ctx, gradient):
                for _ in range(3):
                    torch.empty(2**31, dtype=torch.uint8, device="cuda")
                return gradient

        given = torch.zeros(8, device="cuda", requires_grad=True)
        table = torch.empty(70, 2**20, device="cuda", requires_grad=True)
        before = len(gpu.out_of_memory)
        facts["within_backward"] = []
        for loss in (TakesTooMuch.apply(given).sum(), torch.nn.functional.embedding(sizes, table).sum()):
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                facts["within_backward"].append(len(gpu.out_of_memory) - before)
        given = table = loss = None
        facts["after_backward"] = torch.cuda.memory_allocated() == kept

        # Peaks are reset, caches emptied, copies take their own memory.
        torch.cuda.reset_peak_memory_stats()
        block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        view = block[: 2**20]
        facts["block"] = [torch.cuda.max_memory_allocated() - kept, torch.cuda.memory_allocated() - kept]
        del block
        facts["view_keeps"] = torch.cuda.memory_allocated() - kept
        del view
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        facts["emptied"] = reserved - torch.cuda.memory_reserved() >= 64 * 2**20
        twin = copy.deepcopy(model)
        facts["twin"] = torch.cuda.memory_allocated() - kept
        facts["twin_device"] = str(next(twin.parameters()).device)
        facts["half"] = [str(one.dtype) for one in twin.half().parameters()]
        facts["host"] = str(next(twin.cpu().parameters()).device)
        facts["freed"] = torch.cuda.memory_allocated() - kept
        facts["free"] = list(torch.cuda.mem_get_info())

        # Without gradients an operator takes the same memory, whichever of torch's two ways says so.
        facts["without_gradients"] = []
        for mode in (torch.no_grad, torch.inference_mode):
            queries = torch.randn(2, 4, 64, 32, device="cuda")
            before_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with mode():
                scores = model(torch.ones(8, 512).to("cuda"))
                torch.nn.functional.cross_entropy(scores, torch.arange(8).to("cuda")).item()
                torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
                counts = torch.tensor([3, 4]).cuda()
                read = [counts.sum().item(), int(counts[0]), 1 if counts[:1] else 0, 1 if counts.max() == 4 else 0]
            read.append(1 if counts[:1] else 0)  # of a tensor from there, too
            facts["without_gradients"].append([torch.cuda.max_memory_allocated() - before_bytes, read])
            del scores, counts, queries

        # Memory of the host is pinned as with a device; pinned blocks are powers of two, and are kept when free.
        held = gpu.dispatch.host
        batch = torch.arange(5)
        facts["pinned"] = [batch.is_pinned(), batch.pin_memory().is_pinned(), batch.pin_memory().cuda().tolist()]
        try:
            torch.zeros(2, device="cuda").pin_memory()
        except RuntimeError as error:
            facts["pinned"].append("only dense CPU tensors can be pinned" in str(error))
        made = torch.tensor([1.0, 2.0], pin_memory=True, requires_grad=True)
        facts["pinned"].append([made.is_pinned(), made.is_leaf, made.requires_grad, made.tolist()])
        before_bytes = held.held_bytes
        states = torch.empty(3 * 2**20, pin_memory=True)
        facts["host_bytes"] = [held.held_bytes - before_bytes, states[7:].is_pinned()]
        del states
        torch.zeros(4 * 2**20, pin_memory=True)
        facts["host_bytes"].append(held.held_bytes - before_bytes)
        weight = nn.Parameter(torch.empty(2**20))
        weight.note = "of a library"
        weight.grad = torch.zeros_like(weight)
        facts["host_bytes"].append(held.pageable_bytes)
        facts["copied"] = [hasattr(copy.deepcopy(weight), "note"), copy.deepcopy(weight).grad is None]
        del weight
        facts["host_bytes"].append(facts["host_bytes"].pop() - held.pageable_bytes)

        # Whether many numbers hold an infinity is known; a function that is compiled and not called says nothing.
        many = torch.randn(2**21, device="cuda")
        facts["finite"] = [
            bool(torch.isinf(many).any()),
            bool((torch.isnan(many) | torch.isinf(many)).any()),
            bool(torch.isfinite(many).all()),
            bool(many.norm() < 0),
            bool(many.isnan().logical_or(many.isinf()).float().max()),
            bool(many[:5000].isinf().float().max()),
        ]
        mask = torch.isinf(many)
        mask.copy_(many > 0)
        facts["finite"].append(bool(mask.any()))
        del many, mask

        @torch.compile
        def unused(given):
            return given + 1

        facts["compiled"] = [gpu.is_compiled, unused(2), gpu.is_compiled]

        # Lists as indices, and fakes in lists.
        table = torch.arange(12, device="cuda").view(3, 4)
        facts["indexed"] = [table[[0, 2], 1].tolist(), table[:, [1, 3]].sum().item(), table[[]].numel()]
        table[[True, False, True], [[0], [1]]] = -1
        facts["indexed"].append(table.tolist())
        facts["listed"] = torch.tensor([sizes.max(), [2, 7][sizes[1]]], device="cuda").tolist()
        # Our own mode sees the functions that a pass calls, and none of those by which fakes are made.
        weight = torch.randn(4, 4, device="cuda", requires_grad=True)
        loss = torch.tanh(weight @ weight).sum()
        with patch.object(VirtualFunctions, "__torch_function__", autospec=True) as called:
            called.side_effect = lambda mode, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
            loss.backward()
        facts["seen"] = sorted({getattr(call.args[1], "__self__", call.args[1]).__name__ for call in called.mock_calls})
        # What looks for values that it cannot take finds none.
        window = torch.hann_window(64, device="cuda")
        there = torch.stft(torch.randn(2, 400, device="cuda"), 64, return_complex=True, window=window)
        facts["back"] = list(torch.istft(there, 64, window=window).shape)
        one = torch.randn(4, device="cuda")
        facts["close"] = [torch.allclose(one, one), nn.functional.gaussian_nll_loss(one, one, one).dim()]
        facts["real"] = torch.arange(4).mul(2).tolist()
        brought = torch.randn(2**19, device="cuda").cpu()
        facts["files"] = saved(model.state_dict(), brought, {"host": torch.arange(4)})
    facts["out_of_memory"] = [one.model_dump(mode="json") for one in gpu.out_of_memory]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
