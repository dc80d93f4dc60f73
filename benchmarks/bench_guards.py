"""What the host-side guards cost: each batch's check beside the training step it is part of, in one run.

    python benchmarks/bench_guards.py

A step is what a trial does with a batch on the CPU (forward, loss, backward, clipping, optimizer), on one thread. The
checks and the steps alternate, so that whatever else the machine does meets both. Random weights: no value is learned.
"""

import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging

from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.settings.tables import DataSettings, HeadSettings, OptimSettings, TrialSettings
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from dryfit.tasks.tokens import TokenSet
from dryfit.training.optimizer import OptimizerPlan, make_optimizer
from dryfit.training.step import backward_batch

VOCABULARY = 30_522
SPLIT_ROWS = 20_000
CASES = (
    # name, layers, width, rows, tokens, repeats
    ("two layers of 128", 2, 128, 8, 32, 60),
    ("six layers of 384 (MiniLM)", 6, 384, 8, 64, 25),
    ("six layers of 384 (MiniLM)", 6, 384, 32, 128, 7),
)


def encoder(layers: int, width: int, folder: Path) -> EncoderWithHead:
    """A random encoder with a head for two classes."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )
    BertModel(config).save_pretrained(folder)
    loaded, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    return EncoderWithHead(loaded, HeadSpec(HeadSettings(), 2))


def split_of(rows: int, length: int) -> TokenSet:
    """Random rows, all of one length."""
    ids = torch.randint(0, VOCABULARY, (rows * length,), dtype=torch.int32)
    starts = torch.arange(0, rows * length + 1, length)
    return TokenSet(ids, torch.zeros(rows * length, dtype=torch.uint8), starts, torch.randint(0, 2, (rows,)))


def measure(layers: int, width: int, rows: int, length: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a step without its checks, and of the checks of its batch."""
    with tempfile.TemporaryDirectory() as folder:
        model = encoder(layers, width, Path(folder)).train()
    task = CriteriaTask(TaskContext(TrialSettings(), DataSettings()))
    optimizer = make_optimizer(model, OptimSettings(), OptimizerPlan())
    tokens = split_of(4 * rows, length)
    guard = BatchGuard("train", tokens, model_bounds(model))
    steps_s: list[float] = []
    checks_s: list[float] = []
    chosen = list(range(rows))
    for _ in range(repeats):
        batch = task.collate(tokens, chosen)
        began_s = time.perf_counter()
        guard.check_batch(batch, lambda: chosen)
        guard.check_outputs(torch.empty(rows, 2), rows, lambda: chosen)
        checked_s = time.perf_counter()
        backward_batch(model, batch, task, micro_batch=rows, backward=torch.Tensor.backward, autocast=nullcontext)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        steps_s.append(time.perf_counter() - checked_s)
        checks_s.append(checked_s - began_s)
    return statistics.median(steps_s), statistics.median(checks_s)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    for name, layers, width, rows, length, repeats in CASES:
        step_s, check_s = measure(layers, width, rows, length, repeats)
        print(
            f"{name}, {rows} rows of {length}: step {1e3 * step_s:.1f} ms, its checks {1e6 * check_s:.0f} us"
            f" = {100 * check_s / step_s:.3f} % (medians of {repeats})"
        )
    tokens = split_of(SPLIT_ROWS, 256)
    with tempfile.TemporaryDirectory() as folder:
        bounds = model_bounds(encoder(2, 128, Path(folder)))
    times_s: list[float] = []
    for _ in range(5):
        began_s = time.perf_counter()
        check_tokens("train", tokens, bounds)
        times_s.append(time.perf_counter() - began_s)
    print(f"a whole split, once: {SPLIT_ROWS} rows of 256 in {1e3 * statistics.median(times_s):.1f} ms (median of 5)")


if __name__ == "__main__":
    main()
