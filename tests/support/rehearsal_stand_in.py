"""A rehearsal's process with simple arithmetic in place of a virtual GPU: ``python -m rehearsal_stand_in REQUEST``.

The script's first argument says what it does, as ``fits 8``: a batch of 8 rows takes 8 GiB, and 2 GiB are always taken.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from dryfit.processes.process import die_with_parent
from dryfit.processes.wall import Places
from dryfit.processes.wall_keeper import end_as, run_walled
from dryfit.settings.files import write_model
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, PeakAt, StepPhase, VerdictKind
from dryfit.settings.rehearsal_messages import (
    Growth,
    LargestBatch,
    LineBytes,
    Muted,
    OutOfMemory,
    RehearsalAnswer,
    RehearsalMemory,
    RehearsalRequest,
    RunTime,
    ScriptEnd,
    SeenArguments,
    StepMemory,
    StepTime,
    StepWork,
    TimelinePoint,
    Unknown,
)

GIB = 2**30
FIXED = 2 * GIB
KNOWN = ("l40s", "h200")
"""Devices on which a step has a time."""
LINE, CODE, SOURCE = "train.py:88", "loss.backward()", "transformers/models/qwen2/modeling_qwen2.py:312"


def memory_of(activations: int, steps: int = 3) -> RehearsalMemory:
    """Memory with so many bytes of activations at the peak."""
    peak = FIXED + activations
    held = [
        LineBytes(
            line=LINE,
            code=CODE,
            source=SOURCE,
            module="model.layers.3.mlp",
            category=MemoryCategory.ACTIVATIONS,
            bytes=activations,
        ),
        LineBytes(
            line="train.py:12",
            code="model.to('cuda')",
            source="train.py:12",
            module="",
            category=MemoryCategory.WEIGHTS,
            bytes=FIXED,
        ),
    ]
    phases = [StepPhase.LOAD, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER]
    timeline = [
        TimelinePoint(
            event=10 * step + at,
            step=step,
            phase=phase,
            allocated_bytes=peak if phase is StepPhase.BACKWARD else FIXED,
            reserved_bytes=peak + GIB // 8,
            module="model.layers.3.mlp" if phase is StepPhase.BACKWARD else "",
            line=LINE,
            source=SOURCE,
        )
        for step in range(1, steps + 1)
        for at, phase in enumerate(phases)
    ]
    return RehearsalMemory(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak + GIB // 8,
        min_cap_bytes=peak + GIB // 8,
        overhead_bytes=GIB // 2,
        margin_bytes=GIB // 4,
        required_bytes=peak + GIB // 8 + GIB // 2 + GIB // 4,
        fragmented_bytes=GIB // 8,
        by_category={MemoryCategory.WEIGHTS: FIXED, MemoryCategory.ACTIVATIONS: activations},
        by_phase={StepPhase.FORWARD: FIXED, StepPhase.BACKWARD: peak},
        peak_at=PeakAt(phase=StepPhase.BACKWARD, module="model.layers.3.mlp", op="aten.mm.default"),
        peak_line=LINE,
        peak_code=CODE,
        peak_source=SOURCE,
        by_line=tuple(held),
        by_module={"model.layers.3.mlp": activations, "": FIXED},
        steps=tuple(StepMemory(number=n, peak_bytes=peak, end_bytes=FIXED) for n in range(1, steps + 1)),
        timeline=tuple(timeline),
    )


def answer_of(
    activations: int, device: DeviceSpec, *, seen: SeenArguments | None = None, ranks: int = 1
) -> RehearsalAnswer:
    """A whole answer, everything in it set."""
    memory = memory_of(activations)
    short = max(0, memory.required_bytes - device.capacity_bytes)
    error = OutOfMemory(
        message="CUDA out of memory. Tried to allocate 20.00 MiB.",
        requested_bytes=20 * 2**20,
        line=LINE,
        code=CODE,
        source=SOURCE,
        phase=StepPhase.BACKWARD,
        step=1,
        caught=False,
    )
    growth = Growth(bytes_per_step=GIB, line="train.py:91", code="losses.append(loss)", source="train.py:91")
    return RehearsalAnswer(
        verdict=VerdictKind.REFUSED if short else VerdictKind.FITS,
        end=ScriptEnd.OUT_OF_MEMORY if short else ScriptEnd.STOPPED,
        device=device,
        ranks=ranks,
        memory=memory.model_copy(update={"growth": growth}),
        shortfall_bytes=short,
        out_of_memory=(error,) if short else (),
        work=StepWork(
            flops_per_step=1_500_000_000_000,
            bytes_per_step=40 * 10**9,
            least_step_s=0.0412,
            rates="165 TFLOP/s in bfloat16, 1008 GB/s: NVIDIA's data sheet",
            step_time=step_time() if device.name in KNOWN else None,
        ),
        run=RunTime(steps=None, source="", epoch_steps=600, batch_share=0.5, batches_per_s=42.0, workers=2),
        sent={"all_reduce": GIB} if ranks > 1 else None,
        worst_batch=LargestBatch(shapes={"input_ids": (4, 512)}, seen=2000, of=12_000, fed_first=True),
        muted=(Muted(what="checkpoint", where="out/checkpoint-3", bytes=GIB), Muted(what="wandb run", where="me/mine")),
        unknown=(Unknown(what="flash_attn has no stand-in", line="train.py:40", code="flash_attn_func(q, k, v)"),),
        notes=("torch.compile was run eagerly: an upper bound",),
        training_arguments=seen,
        torch="2.13.0",
        rehearsal_s=12.5,
        host_peak_bytes=GIB // 2,
    )


def step_time() -> StepTime:
    """Half a second, of which the optimizer takes a fifth."""
    return StepTime(
        estimate_s=0.5,
        low_s=0.4,
        high_s=0.6,
        level="measured",
        busy_share=1.0,
        launch_bound_high_s=None,
        by_kind={"matmul": 0.8, "optimizer": 0.2},
        basis="somebody",
        not_counted=("data loading",),
        optimizer_s=0.1,
    )


def seen_arguments(values: dict[str, str | int | float | bool | None], *, parsed: bool = True) -> SeenArguments:
    """Arguments as transformers 5.23 names them."""
    return SeenArguments(values=values, checkpointing="activation_checkpointing", from_command_line=parsed)


def rehearsed(request: RehearsalRequest, batch: int) -> RehearsalAnswer:
    """What is said of a batch, with the ladder's changes."""
    values = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
        "bf16": False,
        "optim": "adamw_torch_fused",
    } | request.overrides
    rows = values["per_device_train_batch_size"]
    assert isinstance(rows, int)
    activations = rows * GIB // (4 if values["activation_checkpointing"] else 1)
    return answer_of(activations, request.device, seen=seen_arguments(values), ranks=request.ranks)


def main() -> None:
    """Do what the script's arguments ask for, behind the request's wall."""
    request = RehearsalRequest.model_validate_json(Path(sys.argv[1]).read_text())
    assert request.parent_pid is not None
    die_with_parent(request.parent_pid)
    places = Places(Path(request.scratch_dir))
    with places.made():
        status = run_walled(places, lambda wall: act(request, places.enter(wall)), (), request.wall)
        answer = places.own / "answer.json"
        if answer.exists():
            Path(request.answer_file).write_bytes(answer.read_bytes())
    end_as(status)


def act(request: RehearsalRequest, own: Path) -> NoReturn:
    """Do what the script's arguments ask for."""
    file, (asked, *rest) = own / "answer.json", request.arguments
    print("environment", os.environ["CUDA_VISIBLE_DEVICES"] == "", os.environ.get("ACCELERATE_MIXED_PRECISION"))
    print("on stderr", os.environ.get("HF_TOKEN"), own.is_dir(), repr(sys.stdin.read()), file=sys.stderr)
    match asked:
        case "fits":
            others = [rehearsed(request.model_copy(update={"device": one}), int(rest[0])) for one in request.others]
            write_model(file, rehearsed(request, int(rest[0])).model_copy(update={"others": tuple(others)}))
        case "failed":
            failed = {"end": ScriptEnd.FAILED, "memory": None, "traceback": "Traceback ...\nKeyError: 'here'\n"}
            answer = rehearsed(request, 1).model_copy(update={**failed, "reasons": ("KeyError: 'here'",)})
            write_model(file, answer)
        case "garbage":
            file.write_text('{"verdict": 7}')
        case "abort":
            print("terminate called without an active exception", file=sys.stderr, flush=True)
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "hang":  # with programs of its own, in its session and in others
            for session in (False, True):
                subprocess.Popen(["sleep", rest[0]], start_new_session=session)
            subprocess.Popen(["sh", "-c", f"setsid sleep {rest[0]} & exit"]).wait()
            print("ready", flush=True)
            time.sleep(600)
        case "leave":  # a worker of its own keeps the output open
            subprocess.Popen(["sleep", rest[0]], start_new_session=True)
            write_model(file, rehearsed(request, 1))
        case _:
            raise AssertionError(asked)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
