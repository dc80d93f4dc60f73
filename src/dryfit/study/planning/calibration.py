"""Calibration: runs some small models of realistic width on the device, then compares them with their plans."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dryfit.core.errors import ChildError
from dryfit.core.jobs.calibration import MemoryCase
from dryfit.core.jobs.memory import ExecutionChoice
from dryfit.core.jobs.plan import CalibrateRequest, CalibrateResult
from dryfit.core.settings.choices import BaseFormat, Precision
from dryfit.core.settings.execution import Allocator, OptimizerImpl, PlanSubject
from dryfit.core.settings.tables import LoraSettings, TrialSettings
from dryfit.core.settings.task_facts import BUILT_IN
from dryfit.study.loop.child_jobs import run_alone

_ROWS: Final = 16
_LENGTH: Final = 256
_MODELS: Final[dict[str, dict[str, Any]]] = {
    # BERT-base and Qwen2.5-0.5B with few layers: kernels and workspaces depend on widths, not on depth.
    "encoder": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "decoder": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def measure_and_compare(
    visible_device: str, keep_in: Path, on_note: Callable[[str], None], *, quick: bool = False
) -> CalibrateResult:
    """Run every case on a device, compare with their plans, keep the constants.

    Args:
        visible_device: Value of CUDA_VISIBLE_DEVICES.
        keep_in: Folder of the calibration file, beside that of the traces.
        on_note: Called with a line on what is being done.
        quick: Three cases only.

    Raises:
        MachineError: There is no such device.
        ChildError: No case could be run.
    """
    with tempfile.TemporaryDirectory(prefix="dryfit-") as name:
        exchange = Path(name) / "exchange"
        exchange.mkdir()
        measured, failed = 0, None
        for case in calibration_cases(Path(name), quick=quick):
            on_note(f"measuring {case.name}")
            body = CalibrateRequest(case=case, folder=str(exchange), visible_device=visible_device)
            try:
                run_alone(f"measuring {case.name}", body)
                measured += 1
            except ChildError as error:
                # A case that the device is too small for does not spoil the others.
                on_note(str(error))
                failed = error
        if not measured and failed is not None:
            raise failed
        on_note(f"planning the same {measured} cases without the device")
        body = CalibrateRequest(case=None, folder=str(exchange), calibration_dir=str(keep_in))
        return run_alone("comparing plans with measurements", body)


def calibration_cases(folder: Path, *, quick: bool = False) -> tuple[MemoryCase, ...]:
    """Return the cases to measure; configs of the models are written into ``folder``."""
    for name, config in _MODELS.items():
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder, decoder = folder / "encoder", folder / "decoder"
    first = (
        _case("encoder-bf16-fused", encoder, Precision.BF16),
        _case("encoder-fp32-checkpointed", encoder, Precision.FP32, checkpointing=True),
        _case("decoder-lora-bf16", decoder, Precision.BF16, lora=True),
    )
    if quick:
        return first
    return (
        *first,
        _case("encoder-fp32-foreach", encoder, Precision.FP32, impl=OptimizerImpl.FOREACH),
        _case("encoder-bf16-checkpointed", encoder, Precision.BF16, checkpointing=True, impl=OptimizerImpl.FOREACH),
        _case("encoder-bf16-native", encoder, Precision.BF16, allocator=Allocator.NATIVE),
        _case("decoder-lora-bf16-checkpointed", decoder, Precision.BF16, lora=True, checkpointing=True),
        _case("decoder-bf16-foreach", decoder, Precision.BF16, impl=OptimizerImpl.FOREACH),
    )


def _case(
    name: str,
    model: Path,
    precision: Precision,
    *,
    lora: bool = False,
    checkpointing: bool = False,
    impl: OptimizerImpl = OptimizerImpl.FUSED,
    allocator: Allocator = Allocator.EXPANDABLE,
) -> MemoryCase:
    tables = {
        "model": {"name": str(model)},
        "train": {"batch_size": _ROWS, "max_length": _LENGTH, "precision": precision},
    }
    decoder = model.name == "decoder"
    subject = PlanSubject(
        task=next(task for task, facts in BUILT_IN.items() if facts.decoder is decoder),
        settings=TrialSettings.model_validate_json(json.dumps(tables)),
        lora=LoraSettings(base=BaseFormat(precision)) if lora else None,
    )
    choice = ExecutionChoice(micro_batch=_ROWS, accumulation=1, checkpointing=checkpointing, optimizer_impl=impl)
    family = "decoder LoRA" if lora else model.name
    return MemoryCase(name=name, family=family, subject=subject, execution=choice, allocator=allocator)
