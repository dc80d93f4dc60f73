"""A step of a model sharded over two processes: by dryfit and by transformers' native tensor parallelism, side by side.

    python benchmarks/bench_tensor_parallel.py [--ranks 2] [--rounds 15]

Both run in the same processes with gloo, one thread each, and take turns, so that whatever else the machine does meets
both. A step is forward, loss and backward in fp32; the model is a Llama with random weights, saved to a folder that
both load from. One process that runs the whole model is there for comparison. Sums that a step sends are counted too.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from dryfit.meta import build
from dryfit.meta.checkpoint_files import open_checkpoint
from dryfit.meta.filling import fill
from dryfit.meta.matching import LoadOptions
from dryfit.parallel.apply import connect, mark_sharded, slices_on_rank
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.planner import plan_shards
from dryfit.settings.sharding import ShardPlan

CASES = (
    # name, layers, width, rows, tokens
    ("four layers of 256", 4, 256, 4, 64),
    ("four layers of 512", 4, 512, 4, 128),
)
VOCABULARY = 4096
STYLES = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "replicate",
}
"""dryfit's plan of these models in transformers' words; whoever changes a case looks whether it still is."""


def config_of(layers: int, width: int) -> LlamaConfig:
    """A Llama's config, with a quarter of the heads for keys and values."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 128,
        intermediate_size=3 * width,
        use_cache=False,
    )


def made_by_us(folder: Path, plan: ShardPlan, ranks: ProcessRanks) -> Any:
    """A rank's module, loaded by slices."""
    config = LlamaConfig.from_pretrained(folder)
    module = build(lambda: AutoModelForCausalLM.from_config(config))
    options = LoadOptions(torch.device("cpu"), parts=slices_on_rank(module, plan, ranks.rank))
    fill(module, open_checkpoint(folder), options)
    mark_sharded(module, ranks.rank, plan.degree)
    return connect(module, plan, ranks)


def made_by_transformers(folder: Path, ranks: ProcessRanks) -> Any:
    """The same by transformers, from the same plan in its words."""
    config = DistributedConfig(tp_size=ranks.degree, tp_plan=STYLES)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


def step(module: Any, batch: dict[str, torch.Tensor]) -> float:
    """A step's loss."""
    loss = module(**batch).loss
    loss.backward()
    for parameter in module.parameters():
        parameter.grad = None
    return float(loss.detach())


def timed(run: Callable[[], object]) -> float:
    """Milliseconds, from when all ranks are there."""
    dist.barrier()
    began_s = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began_s)


def measure(rank: int, ranks: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What one rank measures."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    group = ProcessRanks()
    found: dict[str, Any] = {}
    for name, _, _, rows, tokens in CASES:
        where = folder / name
        plan = ShardPlan.model_validate_json((where / "plan.json").read_text())
        torch.manual_seed(1)
        ids = torch.randint(0, VOCABULARY, (rows, tokens))
        batch = {"input_ids": ids, "labels": ids}
        modules = {
            "dryfit": made_by_us(where, plan, group).train(),
            "transformers": made_by_transformers(where, group).train(),
            "whole": AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).train(),
        }
        losses = {who: step(module, batch) for who, module in modules.items()}
        times: dict[str, list[float]] = {who: [] for who in modules}
        for _ in range(rounds):
            for who, module in modules.items():
                times[who].append(timed(partial(step, module, batch)))
        found[name] = {"losses": losses, "times_ms": times}
    dist.barrier()
    dist.destroy_process_group()
    return found


def prepare(folder: Path, ranks: int) -> None:
    """Models and plans, for all ranks."""
    for name, layers, width, _, _ in CASES:
        (folder / name).mkdir()
        torch.manual_seed(0)
        config = config_of(layers, width)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        plan = plan_shards(build(lambda config=config: AutoModelForCausalLM.from_config(config)), ranks)
        (folder / name / "plan.json").write_text(plan.model_dump_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, args.ranks)
        children = []
        for rank in range(args.ranks):
            child = os.fork()
            if not child:
                found = measure(rank, args.ranks, args.rounds, folder)
                (folder / f"{rank}.json").write_text(json.dumps(found))
                os._exit(0)
            children.append(child)
        if max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
            sys.exit("a rank failed")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(args.ranks)]
    print(f"{args.ranks} processes with gloo, one thread each, fp32; ms a step, median (fastest), slowest rank")
    for name, _, _, rows, tokens in CASES:
        ranks = [one[name]["times_ms"] for one in found]
        times = {who: [max(of) for of in zip(*(one[who] for one in ranks), strict=True)] for who in ranks[0]}
        text = ", ".join(f"{who} {statistics.median(ms):.1f} ({min(ms):.1f})" for who, ms in times.items())
        pairs = [ours / theirs for ours, theirs in zip(times["dryfit"], times["transformers"], strict=True)]
        print(f"{name}, {rows} x {tokens}: {text}; ours to theirs {statistics.median(pairs):.2f}")
        print(f"  losses {found[0][name]['losses']}")


if __name__ == "__main__":
    main()
