"""An epoch with frozen layers: computed in each step, or taken from a file that all trials of a study share.

    python benchmarks/bench_frozen.py [--threads 2] [--rounds 5] [--precision bf16]

The packaged MiniLM with its embeddings and three of six layers frozen, without dropout in them: 320 rows of 128 tokens,
batches of 16, forward, loss, backward, clipping and optimizer. Three ways, one after another in each round: as ever; a
first trial, which also computes what the frozen layers give and writes it; a later trial, which finds it. The file's
check and the hash of the weights are part of both. CPU seconds of the process stand beside those of the clock: on a
machine that does other work they are the ones to trust.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from measured import spread
from transformers.utils import logging

from dryfit.core.settings.tables import DataSettings, HeadSettings, ModelSettings, OptimSettings, TrialSettings
from dryfit.meta.loading.pretrained import Kind, load_pretrained
from dryfit.tasks.base import TaskContext
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze
from dryfit.tasks.tokens.token_set import TokenSet
from dryfit.train.frozen.distinct_rows import distinct_rows
from dryfit.train.frozen.frozen_layers import FrozenLayers
from dryfit.train.frozen.sharing import check_soundness, states_of
from dryfit.train.frozen.states_file import StatesFolder
from dryfit.train.optim.optimizer import OptimizerPlan, make_optimizer
from dryfit.train.optim.step import backward_batch

ROWS, LENGTH, BATCH, FROZEN = 320, 128, 16, 3
VOCABULARY = 30_522
LIMIT_BYTES = 4 * 2**30


def split() -> TokenSet:
    """Random rows, all of one length: nothing is saved by less padding."""
    ids = torch.randint(1000, VOCABULARY, (ROWS * LENGTH,), dtype=torch.int32)
    starts = torch.arange(0, ROWS * LENGTH + 1, LENGTH)
    return TokenSet(ids, torch.zeros(len(ids), dtype=torch.uint8), starts, torch.randint(0, 2, (ROWS,)))


def trial(tokens: TokenSet, folder: Path | None, autocast: torch.dtype | None) -> tuple[float, ...]:
    """Seconds before the first step, of one epoch, and CPU seconds of both.

    Args:
        tokens: The rows.
        folder: Where states are kept; None: each step computes them.
        autocast: Number format of the forward pass; None: fp32.
    """
    encoder, _ = load_pretrained(ModelSettings(name="minilm"), Kind.ENCODER)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), 2))
    freeze(model, FROZEN, dropout=False)
    task = CriteriaTask(TaskContext(TrialSettings(), DataSettings()))
    optimizer = make_optimizer(model, OptimSettings(), OptimizerPlan())
    around = nullcontext if autocast is None else (lambda: torch.autocast("cpu", dtype=autocast))
    with ExitStack() as stack:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if folder is not None:
            layers = FrozenLayers(model.eval(), FROZEN, autocast)
            stack.enter_context(layers.connected())
            rows = distinct_rows((tokens,), types=model.takes_types)
            check_soundness(layers, rows)
            file, _ = states_of(layers, rows, StatesFolder(folder, LIMIT_BYTES))
            layers.serve(stack.enter_context(file))
        ready_s, ready_cpu_s = time.perf_counter(), time.process_time()
        model.train()
        for chosen in torch.randperm(ROWS).split(BATCH):
            batch = task.collate(tokens, chosen.tolist())
            backward_batch(model, batch, task, micro_batch=BATCH, backward=torch.Tensor.backward, autocast=around)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    return ready_s - began_s, ended_s - ready_s, ready_cpu_s - began_cpu_s, ended_cpu_s - ready_cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    autocast = torch.bfloat16 if asked.precision == "bf16" else None
    tokens = split()
    times = {name: list[tuple[float, ...]]() for name in ("in each step", "first trial", "later trial")}
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, found in times.items():
                found.append(trial(tokens, None if name == "in each step" else Path(folder), autocast))
    print(f"{asked.threads} thread(s), {asked.precision}; median (minimum to maximum) of {asked.rounds}")
    for name, found in times.items():
        before, epoch, before_cpu, epoch_cpu = (spread(values, " s") for values in zip(*found, strict=True))
        print(f"{name}: before the first step {before}, an epoch {epoch}; CPU {before_cpu} and {epoch_cpu}")


if __name__ == "__main__":
    main()
