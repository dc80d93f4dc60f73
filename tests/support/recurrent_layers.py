"""The recurrent layers of ``benchmarks/gpu_histories.py`` on a virtual H200: what is kept, and both passes' peaks."""

import json

import dryfit


def main() -> None:
    with dryfit.virtual_gpu("h200"):
        import torch
        from torch import nn

        facts = {}
        for kind in (nn.LSTM, nn.GRU):
            for dtype in (torch.bfloat16, torch.float32):
                layer = kind(256, 512, num_layers=2, batch_first=True, dropout=0.1).to("cuda", dtype)
                given = torch.randn(32, 100, 256, device="cuda", dtype=dtype, requires_grad=True)
                layer(given)  # what is made once: states of dropout
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = layer(given)[0]
                kept = torch.cuda.memory_allocated() - before
                peak = torch.cuda.max_memory_allocated() - before
                gradient = torch.ones_like(out)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out.backward(gradient)
                facts[f"{kind.__name__} {dtype}"] = [kept, peak, torch.cuda.max_memory_allocated() - before]
                del out, gradient, layer, given
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
