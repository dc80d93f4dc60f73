"""Text that a model generates on a virtual GPU: ``python generating.py JSON``; prints JSON.

Keys of the argument: ``architecture``; ``tokens``, how many are new; ``leave_out``, whether some of them are;
``padded``, whether a row is; ``rows`` of the prompt; ``generate``, more arguments of that method;
``stops_after``, where the script ends it.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any

import dryfit

SMALL = {"vocab_size": 2000, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
LAYERS = {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
OF_ITS_OWN = {
    "qwen2": {},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 512},
    "t5": {"d_model": 128, "num_heads": 4, "num_layers": 2, "d_ff": 256, "decoder_start_token_id": 0},
}


def main(asked: dict[str, Any]) -> None:
    """Generate, and print shape, tokens, memory and work."""
    with dryfit.virtual_gpu("rtx4090") as gpu:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, StoppingCriteriaList

        from dryfit.gpu.left_out import LeftOutTokens
        from dryfit.gpu.session import stock_of
        from dryfit.gpu.values import value_of
        from dryfit.gpu.work import WorkCounter

        work = WorkCounter()
        tokens = LeftOutTokens(work, lambda: stock_of(gpu.allocations))
        gpu.dispatch.listeners.append(work.note)
        if asked["leave_out"]:
            tokens.install()
        name = asked["architecture"]
        config = AutoConfig.for_model(name, **{**SMALL, **LAYERS, **OF_ITS_OWN[name]})
        model = (
            (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config).cuda()
        )
        ids = torch.randint(5, 100, (asked.get("rows", 4), 12)).cuda()
        mask = torch.ones_like(ids)
        if asked.get("padded"):
            mask[0, :5] = 0
        options = dict(asked.get("generate", {}))
        mode = torch.inference_mode() if options.pop("inference", False) else nullcontext()
        if most := asked.get("stops_after"):
            options["stopping_criteria"] = StoppingCriteriaList(
                [lambda ids, _: torch.full((len(ids),), ids.shape[1] >= 12 + most, device="cuda")]
            )
        with mode:
            made = model.generate(ids, attention_mask=mask, max_new_tokens=asked["tokens"], **options)
        work.step_ends()
        cache = getattr(made, "past_key_values", None)
        made = getattr(made, "sequences", made)
        value, done = value_of(made), work.work(gpu.spec)
        told = {
            "shape": list(made.shape),
            "tokens": None if value is None else sorted(set(value[:, -asked["tokens"] :].flatten().tolist())),
            "left_out": tokens.left_out,
            "cached": cache and cache.get_seq_length(),
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "flops": done.flops_per_step,
            "bytes": done.bytes_per_step,
            "notes": gpu.notes,
            "unknown": [one.what for one in gpu.unknown.values()],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
