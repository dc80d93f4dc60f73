"""Leave out tokens in the middle of a long sequence that transformers generates.

Each token takes what the one before it took, and a cache that is one token longer. So the first and the last ones are
generated, and between them the cache becomes longer at once.
"""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from dryfit.core.private_names import require
from dryfit.meta.private_apis.transformers_steps import SAMPLING, arguments_after, has_own_arguments, replace_sampling
from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.work import WorkCounter

Until = Callable[[int, torch.Tensor], torch.Tensor]

_AT_ONCE = 8
"""Tokens that are generated in a row: twice as many at the beginning, and so many at the end."""
_ARGUMENTS = frozenset({"attention_mask", "past_key_values", "position_ids", "use_cache"})
"""With other tensors, of images for example, a sequence cannot be continued as it was begun."""


class LeftOutTokens:
    """Knows how many tokens were left out.

    Args:
        work: Counts what is left out too, as much as those on both sides of it.
    """

    def __init__(self, work: WorkCounter) -> None:
        self.left_out = 0
        self._work = work

    def install(self) -> None:
        """Change transformers' generation for good."""
        when_imported("transformers.generation.utils", self._change)

    def _change(self, module: Any) -> None:
        require("rehearsing generate", SAMPLING)
        mixin = module.GenerationMixin

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def sample(
                model: Any,
                input_ids: torch.Tensor,
                logits_processor: Any,
                stopping_criteria: Any,
                generation_config: Any,
                **arguments: Any,
            ) -> Any:
                def until(length: int, ids: torch.Tensor) -> torch.Tensor:
                    others = [one for one in stopping_criteria if not isinstance(one, module.MaxLengthCriteria)]
                    criteria = module.StoppingCriteriaList([*others, module.MaxLengthCriteria(length)])
                    new = ids.shape[1] - input_ids.shape[1]
                    given = arguments_after(model, arguments, new) if new else arguments
                    return original(model, ids, logits_processor, criteria, generation_config, **given)

                end = stopping_criteria.max_length
                if end is not None and _can_continue(model, mixin, generation_config, arguments):
                    return self._both_ends(input_ids, end, arguments["past_key_values"], until)
                return original(model, input_ids, logits_processor, stopping_criteria, generation_config, **arguments)

            return sample

        replace_sampling(mixin, wrap)

    def _both_ends(self, prompt_ids: torch.Tensor, end: int, cache: Any, until: Until) -> torch.Tensor:
        """Return the ids of a sequence of which both ends were generated.

        Args:
            prompt_ids: ``(batch, tokens)``.
            end: Length of the whole sequence.
            cache: Its keys and values, still empty.
            until: Continues a sequence up to a length.
        """
        prompt = prompt_ids.shape[1]
        left_out = end - prompt - 3 * _AT_ONCE
        if left_out <= 0:
            return until(end, prompt_ids)
        begun, first = until(prompt + _AT_ONCE, prompt_ids), Counter[Any]()
        if begun.shape[1] == prompt + _AT_ONCE:
            first, begun = self._counted(until, prompt + 2 * _AT_ONCE, begun)
        if begun.shape[1] < prompt + 2 * _AT_ONCE:  # it has ended by itself
            return begun
        for layer in cache.layers:
            _lengthen(layer, left_out)
        longer = torch.cat([begun, begun[:, -1:].expand(-1, left_out)], dim=1)
        last, done = self._counted(until, end, longer)
        # What a token costs grows evenly: those left out cost as much as the mean of as many on either side.
        mean = {cost: round(times * left_out / (2 * _AT_ONCE)) for cost, times in (first + last).items()}
        self._work.add(Counter(mean))
        self.left_out += left_out
        return done

    def _counted(self, until: Until, length: int, ids: torch.Tensor) -> tuple[Counter[Any], torch.Tensor]:
        before = self._work.so_far()
        longer = until(length, ids)
        return self._work.so_far() - before, longer


def _can_continue(model: Any, mixin: Any, config: Any, arguments: dict[str, Any]) -> bool:
    """Whether a sequence that was begun can be continued, and nothing is kept of its tokens but their ids."""
    cache = arguments.get("past_key_values")
    tensors = {name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return (
        type(cache).__name__ == "DynamicCache"
        and cache is not None
        and {type(layer).__name__ for layer in cache.layers} <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
        and not cache.get_seq_length()
        and not config.return_dict_in_generate
        and not model.config.is_encoder_decoder
        and tensors <= _ARGUMENTS
        and arguments.get("streamer") is None
        and not has_own_arguments(model, mixin)
    )


def _lengthen(layer: Any, tokens: int) -> None:
    """Let the cache of a layer have so many tokens more, as if each had been appended."""
    length = layer.keys.shape[-2] + tokens
    if hasattr(layer, "sliding_window"):
        layer.cumulative_length += tokens
        length = min(length, layer.sliding_window - 1)
    for name in ("keys", "values"):
        cached = getattr(layer, name)
        setattr(layer, name, cached.new_empty((*cached.shape[:-2], length, cached.shape[-1])))
