"""How long it takes to plan how a model is cut: tiny models of each architecture, and BERT-large's shape.

    python benchmarks/bench_shard_plan.py [--degree 2]

Everything is on the meta device. Said are seconds of this process's CPU and by the clock, how many parameters are cut,
the bytes of parameters a rank holds, and the bytes it sends for a token.
"""

import argparse
import sys
import time
from pathlib import Path

from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from dryfit.meta import build
from dryfit.parallel.planner import plan_shards

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "contract")]

from test_shard_architectures import ARCHITECTURES, model_of  # noqa: E402

_FP32_BYTES = 4


def bert_large() -> nn.Module:
    config = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    return build(lambda: BertForSequenceClassification(config))


def measured(name: str, module: nn.Module, degree: int) -> None:
    clock, cpu = time.perf_counter(), time.process_time()
    plan = plan_shards(module, degree)
    seconds, used = time.perf_counter() - clock, time.process_time() - cpu
    cut = sum(shard.dim is not None for shard in plan.parameters.values())
    sent = sum(one.bytes_per_token for one in plan.traffic)
    print(
        f"{name:24s} {used:7.1f} s CPU {seconds:7.1f} s   {cut:4d} of {len(plan.parameters):4d} cut   "
        f"{plan.held_bytes(_FP32_BYTES) / 2**20:8.1f} MiB held   {sent:8d} bytes a token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--degree", type=int, default=2)
    degree = parser.parse_args().degree
    for name in ARCHITECTURES:
        measured(name, model_of(name), degree)
    measured("bert-large, 24 layers", bert_large(), degree)


if __name__ == "__main__":
    main()
