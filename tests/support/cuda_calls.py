"""Call every public function of torch.cuda and torch.accelerator on a virtual GPU, each argument by its name."""

import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.accelerator.graphs
import torch.cuda.profiler
from torch.cuda import amp

import dryfit

MODULES = (
    *(torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx),
    *(torch.cuda.profiler, amp, torch.cuda.nccl, torch.accelerator, torch.accelerator.memory),
)
CLASSES = ("Stream", "ExternalStream", "Event", "CUDAGraph", "MemPool")
LEFT_OUT = {
    "torch.cuda.check_error": "takes what the runtime returns; profiler.start and stop call it",
    "torch.cuda.nccl": "collectives over several devices of one process",
    "torch.cuda.CUDAGraph.get_graph_data": "asks the driver by a package of its own",
}


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions that a module shows, by name."""
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name, None)
        ours = str(getattr(value, "__module__", "")).startswith(("torch.cuda", "torch.accelerator", "dryfit"))
        if not name.startswith("_") and inspect.isfunction(value) and ours:
            yield f"{module.__name__}.{name}", value


def methods(name: str) -> Iterator[tuple[str, Any]]:
    """The public methods that a class of torch.cuda defines."""
    for key, value in vars(getattr(torch.cuda, name)).items():
        if not key.startswith("_") and inspect.isfunction(value):
            yield f"torch.cuda.{name}.{key}", value


def everything() -> dict[str, Any]:
    found = dict(pair for module in MODULES for pair in public(module))
    found |= {f"torch.cuda.{name}": getattr(torch.cuda, name) for name in CLASSES}
    return found | dict(pair for name in CLASSES for pair in methods(name))


def signatures() -> dict[str, str]:
    return {name: str(inspect.signature(one)) for name, one in everything().items()}


def arguments() -> dict[str, Any]:
    device = torch.device("cuda", 0)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    return {
        "device": device,
        "peer_device": 0,
        "device_index": 0,
        "stream": stream,
        "event": event,
        "end_event": event,
        "fraction": 0.5,
        "size": 1 << 20,
        "mem_ptr": torch.cuda.caching_allocator_alloc(1024),
        "seed": 3,
        "new_state": torch.cuda.get_rng_state(),
        "new_states": torch.cuda.get_rng_state_all(),
        "debug_mode": "warn",
        "data_ptr": 0,
        "stream_ptr": 0,
        "msg": "a range",
        "range_id": 0,
        "pool": torch.cuda.MemPool(),
        "handle": b"",
        "callables": torch.nn.Linear(8, 8).cuda(),
        "sample_args": (torch.ones(4, 8, device="cuda"),),
        "allocator": torch.cuda.memory._get_current_allocator(),
        "debug_path": "graph.dot",
        "fwd": len,
        "bwd": len,
    }


def selves() -> dict[str, Any]:
    event = torch.cuda.Event(enable_timing=True)
    return {
        "Stream": torch.cuda.Stream(),
        "ExternalStream": torch.cuda.ExternalStream(0),
        "Event": event,
        "CUDAGraph": torch.cuda.CUDAGraph(),
        "MemPool": torch.cuda.MemPool(),
    }


def call(name: str, one: Any) -> str:
    """Call a function with what it must have, then with all that is known by name; return what went wrong."""
    module, _, _ = name.rpartition(".")
    if name in LEFT_OUT or (module in LEFT_OUT and name != "torch.cuda.nccl.version"):
        return ""
    parameters = inspect.signature(one).parameters
    owner = selves().get(name.split(".")[2]) if name.count(".") == 3 and name.split(".")[2] in CLASSES else None
    for every in (False, True):
        given = arguments()
        positional = [] if owner is None or next(iter(parameters), "") == "cls" else [owner]
        named = {}
        for key, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in (2, 4)
            if key == "self" or not (needed or (every and key in given)):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(given[key])
            else:
                named[key] = given[key]
        try:
            made = one(*positional, **named)
            if hasattr(made, "__enter__"):
                with made:
                    pass
        except Exception as error:
            return f"{name}({', '.join(named)}): {type(error).__name__}: {error}"
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    before = signatures()
    with dryfit.virtual_gpu("h100-80"):
        after = signatures()
        now = everything()
        failed = [said for name, one in now.items() if (said := call(name, one))]
        torch.cuda.set_stream(torch.cuda.default_stream())
        held = [torch.cuda.memory_allocated()]
        address = torch.cuda.caching_allocator_alloc(1 << 20)
        held.append(torch.cuda.memory_allocated())
        torch.cuda.caching_allocator_delete(address)
        held.append(torch.cuda.memory_allocated())
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            current = [torch.cuda.current_stream() == stream]
        current += [torch.cuda.current_stream() == stream, torch.cuda.current_stream() == torch.cuda.default_stream()]
        tensor = torch.ones(2, device="cuda")
        typed = [tensor.type(), str(torch.ones(2).type(torch.cuda.HalfTensor).dtype)]
        typed.append(str(torch.ones(2).type("torch.cuda.LongTensor").device))
        torch.cuda.manual_seed(11)
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(12)
        torch.cuda.set_rng_state(state)
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()
        with torch.autograd.profiler.emit_nvtx(), torch.profiler.profile():
            (tensor + 1).sum()
        print(
            json.dumps(
                {
                    "changed": {
                        name: [before[name], after.get(name)] for name in before if after.get(name) != before[name]
                    },
                    "called": len(now) - len(LEFT_OUT),
                    "failed": failed,
                    "held": [now - held[0] for now in held],
                    "current": current,
                    "typed": typed,
                    "state": [state.numel(), torch.cuda.initial_seed()],
                    "name": torch.cuda.get_device_name(),
                }
            )
        )


if __name__ == "__main__":
    sys.exit(main())
