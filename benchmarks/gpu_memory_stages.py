"""The stages of gpu_memory.py; each runs in a process of its own and leaves one JSON object."""

import json
import platform
from pathlib import Path
from typing import Any

import gpu_kernels
import torch
import transformers
from gpu_memory_cases import parse
from gpu_memory_history import by_operator, read_snapshot

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import device_constants
from dryfit.plans.estimate import Device
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.plan_messages import MemoryCase, Observation
from dryfit.training.calibrate import comparison, planned
from dryfit.training.measured_step import CudaMeter, cublas_workspaces, device_spec, observe, run_case, used_before

MOST_HISTORY_BYTES = 8 * 2**20
"""Larger histories are thrown away once they are compared."""
CAP_FACTORS = {"cap-above": 1.02, "cap-below": 0.98}


def run(stage: str, line: str, out: Path, into: Path, *, dry: bool) -> None:
    """Do one stage.

    Args:
        stage: Its name.
        line: The configuration, as in gpu_memory_cases.
        out: The folder of all results.
        into: Where to leave the result.
        dry: There is no device.
    """
    torch.set_num_threads(1)
    match stage:
        case "probe":
            found = probe(out, dry=dry)
        case "kernels":
            found = {"status": "ok", "rows": gpu_kernels.rows("meta" if dry else "cuda")}
        case "plan":
            found = plan(line, out)
        case "run":
            found = observed(line, out)
        case "compare":
            found = compared(line, out)
        case _:
            found = capped(line, out, CAP_FACTORS[stage])
    into.write_text(json.dumps(found), encoding="utf-8")


def probe(out: Path, *, dry: bool) -> dict[str, Any]:
    """The device, and what a process takes of it that has multiplied, attended and normalised forward and backward."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    path = out / "device.json"
    if dry:
        return {"status": "ok", "device": json.loads(path.read_text(encoding="utf-8")), **versions}
    others = used_before(0)
    steps = context_steps()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved() - others
    spec = device_spec()
    path.write_text(spec.model_dump_json(), encoding="utf-8")
    facts = {"context_bytes": context, "context_steps": steps, "workspace_bytes": cublas_workspaces()}
    return {"status": "ok", "device": spec.model_dump(mode="json"), "used_before_bytes": others, **facts, **versions}


def context_steps() -> dict[str, int]:
    """Used outside of the allocator after each kind of kernel was first called."""

    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    torch.cuda.init()
    found = {"context": outside()}
    x = torch.randn(16, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x.transpose(-1, -2)).sum().backward()
    found["matrix product"] = outside()
    torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward()
    found["attention"] = outside()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()).cuda()
    torch.nn.functional.cross_entropy(
        model(torch.randn(64, 64, device="cuda")), torch.zeros(64).long().cuda()
    ).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    found["step"] = outside()
    return found


def plan(line: str, out: Path) -> dict[str, Any]:
    """What is planned for a configuration."""
    entry = parse(line)
    found, run = planned(entry.case, planned_on(entry.case, out))
    return {
        "status": "ok",
        "family": entry.case.family,
        "precision": entry.precision,
        "optimizer": entry.optimizer,
        "segments": entry.case.allocator.value,
        "events": len(run),
        **found.model_dump(mode="json"),
    }


def observed(line: str, out: Path) -> dict[str, Any]:
    """What a configuration takes of the device."""
    entry = parse(line)
    try:
        found = observe(entry.case, history_of(entry.case, out) if entry.keeps_history else None)
    except torch.cuda.OutOfMemoryError as error:
        return {"status": "oom", "why": str(error).splitlines()[0]}
    return {"status": "ok", "observation": found.model_dump(mode="json"), "nvml_bytes": used_before(0)}


def compared(line: str, out: Path) -> dict[str, Any]:
    """Plan and allocator's history, allocation by allocation; the history is replayed through the simulator."""
    entry = parse(line)
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ran = [one for one in map(json.loads, lines) if (one["name"], one["stage"]) == (entry.case.name, "run")][-1]
    seen = Observation.model_validate_json(json.dumps(ran["observation"]))
    found, run = planned(entry.case, planned_on(entry.case, out))
    history = history_of(entry.case, out)
    result = comparison(seen, found).model_dump(mode="json") | by_operator(run, read_snapshot(history))
    if history.stat().st_size > MOST_HISTORY_BYTES:
        history.unlink()
    return {"status": "ok", "comparison": result}


def capped(line: str, out: Path, factor: float) -> dict[str, Any]:
    """Whether a configuration gets through with a little more, or less, than the smallest cap of its plan."""
    entry = parse(line)
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    plan = [one for one in map(json.loads, lines) if (one["name"], one["stage"]) == (entry.case.name, "plan")][-1]
    allocator: Any = torch._C._accelerator_setAllocatorSettings
    allocator(f"expandable_segments:{AllocatorSettings.of(entry.case.allocator).expandable_segments}")
    cap_bytes = int(plan["min_cap_bytes"] * factor)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / device_spec().capacity_bytes))
    meter = CudaMeter()
    try:
        run_case(entry.case, "cuda", meter)
    except torch.cuda.OutOfMemoryError as error:
        return {"status": "oom", "cap_bytes": cap_bytes, "why": str(error).splitlines()[0]}
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return {"status": "survived", "cap_bytes": cap_bytes, "retries": retries}


def planned_on(case: MemoryCase, out: Path) -> Device:
    """The device with its built-in constants."""
    spec = DeviceSpec.model_validate_json((out / "device.json").read_text(encoding="utf-8"))
    return Device(
        spec, device_constants(spec, torch.__version__), AllocatorSettings.of(case.allocator), torch.__version__
    )


def history_of(case: MemoryCase, out: Path) -> Path:
    """Where the allocator's history of a configuration lies."""
    (out / "histories").mkdir(exist_ok=True)
    return out / "histories" / f"{case.name}.pickle"
