"""Rehearsals of training scripts held against the same scripts run on a GPU.

    python benchmarks/gpu_scripts.py predict --device h200 --out predictions.jsonl   # needs no GPU
    python benchmarks/gpu_scripts.py measure --out measured.jsonl                    # on the GPU
    python benchmarks/gpu_scripts.py compare predictions.jsonl measured.jsonl

Commit the predictions before the measurements are made. Scripts run unmodified, on weights and rows that they draw
themselves. Measured are the allocator's peaks over the whole run, what the process takes besides (NVML), and the median
time between optimizer steps from the fourth on, with a wait for the device after each step. Both commands go on where
they stopped. With --jobs several scripts prepare side by side, and one at a time uses the GPU; --together lets all use
it at once, which spoils times and not the peaks of the allocator.
"""

import argparse
import fcntl
import fnmatch
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240
LOCK = Path(tempfile.gettempdir()) / "dryfit-gpu-scripts.lock"
MIB = 2**20

QWEN = "--architecture qwen2 --width 896 --layers 24 --heads 14 --kv_heads 2 --intermediate 4864 --vocabulary 151936"
LLAMA = "--architecture llama --width 2048 --layers 16 --heads 32 --kv_heads 8 --intermediate 8192 --vocabulary 128256"
GPT, VISION, MIXED = (f"benchmarks/gpu_programs/{name}.py" for name in ("gpt", "vision", "mixed"))
OPTIMIZERS = "benchmarks/gpu_programs/optimizers.py"
TRAINER, SFT, GLUE, DPO, GRPO, PEFT, ACCELERATE, LIGHTNING, VIT, PLAIN = (
    f"tests/programs/{name}.py"
    for name in (
        "causal_lm_trainer",
        "sft_lora",
        "glue_trainer",
        "dpo_lora",
        "grpo",
        "peft_alone",
        "accelerate_loop",
        "lightning_module",
        "timm_vit",
        "plain_loop",
    )
)
SCRIPTS = {
    "gpt bf16": f"{GPT}",
    "gpt fp32": f"{GPT} --precision fp32 --batch 4",
    "gpt fp16 scaler": f"{GPT} --precision fp16",
    "gpt fused": f"{GPT} --fused",
    "gpt checkpointing": f"{GPT} --checkpointing --batch 16",
    "gpt dropout accumulation": f"{GPT} --dropout 0.1 --accumulation 3",
    "gpt manual attention": f"{GPT} --manual-attention --dropout 0.1 --batch 4",
    "gpt 355M length 2048": f"{GPT} --width 1024 --layers 24 --heads 16 --length 2048 --batch 4",
    "gpt short rows": f"{GPT} --length 64 --batch 4",
    "gpt compiled": f"{GPT} --compile",
    "trainer qwen 0.5b bf16": f"{TRAINER} {QWEN} --length 1024 --batch 4 --rows 64 --no-checkpointing --output_dir out",
    "trainer qwen 0.5b checkpointing": f"{TRAINER} {QWEN} --length 1024 --batch 8 --rows 128 --output_dir out",
    "trainer qwen 0.5b reentrant": f"{TRAINER} {QWEN} --length 1024 --batch 8 --rows 128 --reentrant --output_dir out",
    "trainer qwen 0.5b fp32": f"{TRAINER} {QWEN} --length 512 --batch 2 --rows 32 --precision fp32 --no-checkpointing "
    "--output_dir out",
    "trainer qwen 0.5b fp16": f"{TRAINER} {QWEN} --length 512 --batch 4 --rows 64 --precision fp16 --output_dir out",
    "trainer llama 1b pure bf16": f"{TRAINER} {LLAMA} --length 1024 --batch 4 --rows 64 --precision pure_bf16 "
    "--output_dir out",
    "trainer llama 1b adafactor": f"{TRAINER} {LLAMA} --length 512 --batch 2 --rows 32 --optim adafactor "
    "--output_dir out",
    "trainer llama 1b adamw 8bit": f"{TRAINER} {LLAMA} --length 512 --batch 2 --rows 32 --optim adamw_bnb_8bit "
    "--output_dir out",
    "trainer qwen 0.5b sgd": f"{TRAINER} {QWEN} --length 512 --batch 4 --rows 64 --optim sgd --output_dir out",
    "sft lora qwen 0.5b": f"{SFT} --size 0.5b --length 512 --batch 8 --rows 96 --rank 16 --output_dir out",
    "sft lora qwen 0.5b kept": f"{SFT} --size 0.5b --length 512 --batch 4 --rows 48 --rank 16 --no-checkpointing "
    "--output_dir out",
    "sft lora qwen 7b": f"{SFT} --size 7b --length 1024 --batch 2 --rows 24 --rank 128 --output_dir out",
    "glue fp32 evaluation": f"{GLUE} --width 768 --layers 12 --vocabulary 30522 --length 128 --batch 32 --rows 512 "
    "--output_dir out",
    "glue bf16 checkpointing": f"{GLUE} --width 768 --layers 12 --vocabulary 30522 --length 256 --batch 32 --rows 512 "
    "--precision bf16 --checkpointing --optim adamw_torch --output_dir out",
    "dpo lora": f"{DPO} --width 1024 --layers 12 --vocabulary 32000 --length 512 --batch 8 --rows 96 --output_dir out",
    "grpo": f"{GRPO} --width 512 --layers 8 --vocabulary 32000 --batch 8 --tokens 64 --output_dir out",
    "peft alone": f"{PEFT} --width 1024 --layers 12 --vocabulary 32000 --length 512 --batch 8 --steps 10 "
    "--output_dir out",
    "accelerate bf16": f"{ACCELERATE} --width 1024 --layers 12 --vocabulary 32000 --length 512 --batch 16 --rows 256 "
    "--precision bf16",
    "accelerate fp16": f"{ACCELERATE} --width 1024 --layers 12 --vocabulary 32000 --length 512 --batch 16 --rows 256 "
    "--precision fp16",
    "lightning": f"{LIGHTNING} --width 1024 --layers 8 --batch 32 --length 256 --rows 512 --output_dir out",
    "timm vit averaged": f"{VIT} --model vit_base_patch16_224 --image 224 --batch 64 --rows 768",
    "plain loop": PLAIN,
    "resnet50 bf16": f"{VISION}",
    "resnet50 bf16 channels last": f"{VISION} --channels-last --batch 128",
    "resnet50 fp32": f"{VISION} --precision fp32 --batch 32",
    "resnet50 tf32 benchmark": f"{VISION} --precision fp32 --tf32 --benchmark --batch 32",
    "efficientnet b0 fp16": f"{VISION} --model efficientnet_b0 --precision fp16",
    "convnext tiny bf16": f"{VISION} --model convnext_tiny",
    "mobilenet v3 fp32": f"{VISION} --model mobilenetv3_large_100 --precision fp32",
    "vit small tf32": f"{VISION} --model vit_small_patch16_224 --precision fp32 --tf32",
    "swin tiny bf16": f"{VISION} --model swin_tiny_patch4_window7_224",
    "lstm fp32": f"{MIXED} --kind lstm",
    "gru bf16": f"{MIXED} --kind gru --bf16",
    "unet fp32": f"{MIXED} --kind unet --batch 16",
    "unet bf16": f"{MIXED} --kind unet --bf16",
    "experts bf16": f"{MIXED} --kind experts --bf16",
    "gan": f"{MIXED} --kind gan",
    "seq2seq fp32": f"{MIXED} --kind seq2seq",
    "embedding bags": f"{MIXED} --kind bags",
    **{
        f"optimizer {name}": f"{OPTIMIZERS} --optimizer {name}"
        for name in (
            *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam"),
            *("RAdam", "RMSprop", "Rprop", "SGD"),
        )
    },
    "optimizer AdamW bf16 clipping": f"{OPTIMIZERS} --bf16 --clip",
    "optimizer AdamW averaged": f"{OPTIMIZERS} --average",
}
"""Scripts and their arguments."""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of JSON by name; the last line of a name counts, torn lines do not."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[one["name"]] = one
    return found


def each(options: argparse.Namespace, run: Callable[[str, list[str]], dict[str, Any]]) -> None:
    """Run each script that the file of results lacks, and add its line."""
    known, lock, ends_s = read(options.out), threading.Lock(), time.monotonic() + options.minutes * 60

    def one(name: str) -> None:
        if name in known or not fnmatch.fnmatch(name, options.only) or time.monotonic() > ends_s:
            return
        began_s = time.monotonic()
        found = {"name": name, **run(name, SCRIPTS[name].split()), "wall_s": round(time.monotonic() - began_s, 1)}
        with lock, options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name:<34} {found['status']:<8} {found['wall_s']:>6.1f} s  {found.get('why', '')}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, SCRIPTS))


def started(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new folder."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **quiet, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


def predicted(device: str) -> Callable[[str, list[str]], dict[str, Any]]:
    """Rehearse a script."""

    def run(_name: str, words: list[str]) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "dryfit.documents.command_line",
            "rehearse",
            "--json",
            "--quiet",
            "--device",
            device,
        ]
        try:
            done = started([*command, str(ROOT / words[0]), *words[1:]], CUDA_VISIBLE_DEVICES="")
        except subprocess.TimeoutExpired:
            return {"status": "timeout"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {"status": "failed", "why": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        answer = json.loads(lines[-1])
        keys = (
            *("verdict", "end", "reasons", "peak_allocated_bytes", "peak_reserved_bytes", "overhead_bytes"),
            *("required_bytes", "peak_at", "peak_source", "least_step_s", "step_time", "flops_per_step"),
            *("unknown", "notes"),
            *("by_phase", "traceback"),
        )
        kept = {key: answer.get(key) for key in keys}
        status = "ok" if answer["peak_allocated_bytes"] and answer["verdict"] != "unknown" else "unknown"
        return {"status": status, "device": device, **kept, "why": "" if status == "ok" else str(answer["reasons"])}

    return run


def measured(together: bool) -> Callable[[str, list[str]], dict[str, Any]]:
    """Run a script on the GPU, alone there or with others."""
    return lambda _name, words: _measured(["inside-together" if together else "inside"], words)


def _measured(how: list[str], words: list[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *how, file.name, str(ROOT / words[0]), *words[1:]]
        try:
            done = started(command)
        except subprocess.TimeoutExpired:
            return {"status": "timeout"}
        text = Path(file.name).read_text(encoding="utf-8")
    if done.returncode or not text:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"status": "failed", "why": last, "stderr": done.stderr[-4000:]}
    return {"status": "ok", **json.loads(text)}


def inside(result: Path, script: str, words: list[str], *, together: bool) -> None:
    """Run a script in this process, once no other one uses the GPU or with others there, and write what it took."""
    import pynvml
    import torch
    import transformers  # imports may run side by side
    from torch.optim.optimizer import register_optimizer_step_post_hook

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    lock = LOCK.open("w")
    if not together:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process has ended
        time.sleep(1.0)  # the device is still taking the context of the one before apart
    before = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    ended_s: list[float] = []

    def step_ended(*_: object) -> None:
        torch.cuda.synchronize()
        ended_s.append(time.perf_counter())

    register_optimizer_step_post_hook(step_ended)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    began_s = time.perf_counter()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    torch.cuda.synchronize()
    steps_s = [later - earlier for earlier, later in itertools.pairwise(ended_s)][3:]
    reserved = torch.cuda.memory_reserved()
    found = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "together": together,
        "outside_bytes": None if together else int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - before - reserved,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "steps": len(ended_s),
        "step_s": statistics.median(steps_s) if steps_s and not together else None,
        "script_s": time.perf_counter() - began_s,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result.write_text(json.dumps(found), encoding="utf-8")


def compare(predictions: Path, measurements: Path) -> str:
    """The table, in Markdown, with the errors' medians."""
    told, seen = read(predictions), read(measurements)
    heads = ("script", "allocated MiB", "rehearsed", "error", "reserved MiB", "rehearsed", "error", "outside", "step")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    lacking = []
    for name in SCRIPTS:
        one, real = told.get(name, {"status": "not rehearsed"}), seen.get(name, {"status": "not run"})
        if one["status"] != "ok" or real["status"] != "ok":
            whys = (f"{one['status']} {one.get('why', '')}".strip(), f"{real['status']} {real.get('why', '')}".strip())
            lacking.append(f"- {name}: rehearsed: {whys[0]}; run: {whys[1]}")
            continue
        cells = [name]
        for kind in ("allocated", "reserved"):
            key = f"peak_{kind}_bytes"
            error = one[key] / real[key] - 1
            errors[kind].append(abs(error))
            cells += [f"{real[key] / MIB:.1f}", f"{one[key] / MIB:.1f}", f"{error:+.2%}"]
        outside = real["outside_bytes"]
        cells.append("-" if outside is None else f"{outside / MIB:.0f} ({one['overhead_bytes'] / MIB:.0f})")
        least = one["least_step_s"]
        step = "-" if real["step_s"] is None else f"{real['step_s'] * 1e3:.1f} ms"
        cells.append(step + (f" (least {least * 1e3:.1f})" if least else ""))
        lines.append(f"| {' | '.join(cells)} |")
    for kind, found in errors.items():
        if found:
            ranked = sorted(found)
            last = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
            lines.append(
                f"\n{kind}: {len(found)} scripts, error median {statistics.median(found):.2%}, p95 {last:.2%}, "
                f"most {ranked[-1]:.2%}; within 1 %: {sum(one <= 0.01 for one in found)}"
            )
    return "\n".join([*lines, "", *lacking]) + "\n"


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] in (["inside"], ["inside-together"]):
        inside(Path(sys.argv[2]), sys.argv[3], sys.argv[4:], together=sys.argv[1].endswith("together"))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("predict", "measure"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="file of the results")
        command.add_argument("--only", default="*", help="names to run, as in a shell")
        command.add_argument("--jobs", type=int, default=1, help="scripts side by side")
        command.add_argument("--minutes", type=float, default=1e6, help="start nothing new after so long")
    commands.choices["measure"].add_argument("--together", action="store_true", help="share the GPU: memory alone")
    commands.choices["predict"].add_argument("--device", required=True, help="as dryfit names it")
    command = commands.add_parser("compare")
    command.add_argument("predictions", type=Path)
    command.add_argument("measurements", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        print(compare(options.predictions, options.measurements))
    else:
        each(options, predicted(options.device) if options.command == "predict" else measured(options.together))


if __name__ == "__main__":
    main()
