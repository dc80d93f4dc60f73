"""Work left out because an equal piece ran before: generated tokens, micro-batches of a Trainer, steps of LBFGS."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import LBFGS

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.loaders import Stock
from dryfit.gpu.private_apis.torch_virtual import limit_line_search
from dryfit.gpu.private_apis.transformers_steps import SAMPLING, arguments_after, has_own_arguments, replace_sampling
from dryfit.gpu.work import WorkCounter
from dryfit.settings.errors import LibraryError
from dryfit.settings.private_names import require

# Leave out tokens in the middle of a long sequence that transformers generates.
#
# Each token takes what the one before it took, and a cache that is one token longer. So the first and the last ones
# are generated, and between them only the allocations are made: a cache that grows leaves blocks behind that no later
# one fits into. Where a cache that slides stops growing, some tokens are generated again.


Until = Callable[[int, torch.Tensor], Any]

_IN_A_ROW = 4
"""Tokens that are generated before some are left out, beside the one that fills the cache: the last two are alike."""
_AT_END = 2
"""Tokens that are generated after those that are left out."""
_ARGUMENTS = frozenset({"attention_mask", "decoder_attention_mask", "position_ids"})
"""With other tensors, of images for example, a sequence cannot be continued as it was begun."""
_KEPT_OF_TOKENS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class _TokenEnd(NamedTuple):
    """The number of allocations and frees, and the work, at the end of a token."""

    event: int
    work: Counter[Any]


class LeftOutTokens:
    """Knows how many tokens were left out.

    Args:
        work: Counts what is left out too, as much as those on both sides of it.
        stock: Says what is allocated on the device, and allocates what tokens that are left out would.
    """

    def __init__(self, work: WorkCounter, stock: Callable[[], Stock] = Stock) -> None:
        self.left_out = 0
        self.hindrance = ""
        """Why every token is generated; empty: nothing hinders."""
        self._work = work
        self._stock = stock
        self._ends: list[_TokenEnd] = []
        """Of the tokens that were generated in a row."""
        self._uncounted: tuple[int, Counter[Any]] | None = None
        """Tokens that were just left out, and what the one before them cost."""

    def install(self) -> None:
        """Change transformers' generation for good."""
        when_imported("transformers.generation.utils", self._change)

    def _tell_when_used(self, mixin: Any, hindrance: str) -> None:
        """Tell what hinders a script that generates: most of those that import transformers do not."""
        original = mixin.generate

        @wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            self.hindrance = hindrance
            return original(*args, **kwargs)

        mixin.generate = generate

    def _change(self, module: Any) -> None:
        try:
            require("rehearsing generate", SAMPLING)
        except LibraryError as error:
            self._tell_when_used(module.GenerationMixin, error.found)
            return
        mixin = module.GenerationMixin

        def token_ends() -> None:
            self._ends.append(_TokenEnd(self._stock().event, self._work.so_far()))

        class MarkingLength(module.MaxLengthCriteria):
            """The longest length, which is asked for after each token."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                """Note the end of a token."""
                token_ends()
                return super().__call__(*args, **kwargs)

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
                def until(length: int, ids: torch.Tensor) -> Any:
                    others = [one for one in stopping_criteria if not isinstance(one, module.MaxLengthCriteria)]
                    criteria = module.StoppingCriteriaList([*others, MarkingLength(length)])
                    new = ids.shape[1] - input_ids.shape[1]
                    config, given = generation_config, arguments
                    if new:
                        given = arguments_after(model, config, arguments, ids.shape[1], new)
                    return original(model, ids, logits_processor, criteria, config, **given)

                end = stopping_criteria.max_length
                layers = _layers_of(arguments)
                can = _can_continue(model, mixin, generation_config, arguments)
                if can and end is not None and layers is not None and not _ends_by_own_rule(stopping_criteria):
                    return self._both_ends(input_ids, end, layers, until)
                return original(model, input_ids, logits_processor, stopping_criteria, generation_config, **arguments)

            return sample

        replace_sampling(mixin, wrap)

    def _both_ends(self, prompt_ids: torch.Tensor, end: int, layers: list[Any], until: Until) -> Any:
        """Return what is said of a sequence of which both ends were generated: its ids, or an output with them.

        Args:
            prompt_ids: ``(batch, tokens)``.
            end: Length of the whole sequence.
            layers: Of its cache, filled as the first tokens are generated; empty: it is read whole for each token.
            until: Continues a sequence up to a length, and returns the same.
        """
        ids = prompt_ids
        for stop in (*_ends_of_growth(layers, prompt_ids.shape[1], end), end):
            if stop - ids.shape[1] > 1 + _IN_A_ROW + _AT_END:
                wanted = ids.shape[1] + 1 + _IN_A_ROW
                done = self._counted(until, wanted, _ids_of(self._counted(until, ids.shape[1] + 1, ids)))
                ids = _ids_of(done)
                if ids.shape[1] < wanted:  # it has ended by itself
                    return done
                left_out = stop - _AT_END - ids.shape[1]
                self._lengthen(layers, left_out)
                ids = torch.cat([ids, ids[:, -1:].expand(-1, left_out)], dim=1)
            elif stop < end:
                done = self._counted(until, stop, ids)
                ids = _ids_of(done)
                if ids.shape[1] < stop:
                    return done
            done = None
        return self._counted(until, end, ids)

    def _lengthen(self, layers: list[Any], tokens: int) -> None:
        """Let a cache be so many tokens longer, and the device allocate what they would."""
        before, last = self._ends[-2:]
        if layers:
            self._stock().repeat_growing([end.event for end in self._ends[-3:]], tokens)
        for layer in layers:
            _lengthen(layer, tokens)
        self.left_out += tokens
        self._uncounted = (tokens, last.work - before.work)

    def _counted(self, until: Until, length: int, ids: torch.Tensor) -> Any:
        """Generate up to a length, and count the work of the tokens that were left out just before.

        What a token costs grows evenly: those left out cost as much as the mean of one on either side.
        """
        before, self._ends = self._work.so_far(), []
        longer = until(length, ids)
        if self._uncounted is not None:
            tokens, cost = self._uncounted
            both = cost + (self._ends[0].work - before)
            self._work.add(Counter({one: round(times * tokens / 2) for one, times in both.items()}))
            self._uncounted = None
        return longer


def _ids_of(generated: Any) -> torch.Tensor:
    return generated if isinstance(generated, torch.Tensor) else generated.sequences


def _layers_of(arguments: dict[str, Any]) -> list[Any] | None:
    """Return the layers of an empty cache that grow with the sequence; None where one grows in a way of its own."""
    cache = arguments.get("past_key_values")
    if cache is None:
        return None if arguments.get("use_cache") else []
    name, grows = type(cache).__name__, {"DynamicLayer", "DynamicSlidingWindowLayer"}
    own = cache.self_attention_cache if name == "EncoderDecoderCache" else cache
    if type(own).__name__ != "DynamicCache" or {type(layer).__name__ for layer in own.layers} - grows:
        return None
    return None if own.get_seq_length() else own.layers


def _can_continue(model: Any, mixin: Any, config: Any, arguments: dict[str, Any]) -> bool:
    """Whether a sequence that was begun can be continued, and nothing is kept of its tokens but ids and the cache."""
    tensors = {name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return (
        tensors <= _ARGUMENTS
        and not (config.return_dict_in_generate and any(getattr(config, name) for name in _KEPT_OF_TOKENS))
        and arguments.get("streamer") is None
        and not has_own_arguments(model, mixin)
    )


def _ends_of_growth(layers: list[Any], begin: int, end: int) -> list[int]:
    """Return the lengths between two at which layers that keep the last tokens alone stop growing."""
    windows = {layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")}
    return sorted(length for length in windows if begin < length < end)


def _ends_by_own_rule(criteria: Any) -> bool:
    """Whether a rule of the script may end a sequence, which has to be asked after each token."""
    return any(type(one).__module__.partition(".")[0] not in ("transformers", "dryfit") for one in criteria)


def _lengthen(layer: Any, tokens: int) -> None:
    """Let the cache of a layer have so many tokens more, as if each had been appended."""
    length = layer.keys.shape[-2] + tokens
    if hasattr(layer, "sliding_window"):
        layer.cumulative_length += tokens
        length = min(length, layer.sliding_window - 1)
    for name in ("keys", "values"):
        cached = getattr(layer, name)
        setattr(layer, name, cached.new_empty((*cached.shape[:-2], length, cached.shape[-1])))


# Leave out micro-batches of transformers' Trainer that take what one before them took.
#
# A step over 16 micro-batches adds to the same gradients 16 times. The first one makes them, a later one finds them
# made: after both, only a micro-batch with more rows or longer ones can take more. So that there is none, the second
# one is the largest that the trainer has met, where the largest batch is what is asked for.


Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class _Step:
    """Micro-batches of one optimizer step that ran after its first.

    Attributes:
        number: Steps before it.
        rows: Rows of a micro-batch, which change where a trainer looks for a number that fits.
        begun: Whether its first one ran.
        ran: Shapes of each, and what it cost.
    """

    number: int
    rows: int | None
    begun: bool = False
    ran: list[tuple[Shapes, Counter[Any]]] = field(default_factory=list[tuple[Shapes, Counter[Any]]])


class RepeatedMicroBatches:
    """Knows which micro-batches ran in the current step of each trainer.

    Args:
        work: Counts what is left out too, as much as the one that it repeats.
        largest: Whether the second of a step is the largest that was met.
    """

    def __init__(self, work: WorkCounter | None = None, *, largest: bool = False) -> None:
        self.left_out = 0
        """How many were not run."""
        self._work = work or WorkCounter()
        self._steps: WeakKeyDictionary[Any, _Step] = WeakKeyDictionary()
        self._wants_largest = largest
        self._largest: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def install(self) -> None:
        """Change transformers' Trainer for good; a subclass that replaces ``training_step`` wholly runs everything."""
        when_imported("transformers.trainer", self._change)

    def _change(self, module: Any) -> None:
        original = module.Trainer.training_step

        @wraps(original)
        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            step, state = self._steps.get(trainer), trainer.state
            if step is None or step.rows != state.train_batch_size:  # it begins anew, after an error too
                self._largest.pop(trainer, None)
            if step is None or (step.number, step.rows) != (state.global_step, state.train_batch_size):
                step = self._steps[trainer] = _Step(state.global_step, state.train_batch_size)
            shapes = _batch_shapes(inputs)
            cost = _cost_of_repeated(step, shapes)
            if cost is not None and trainer.args.world_size == 1:  # of several ranks the last one sends gradients
                self.left_out += 1
                self._work.add(cost)
                return torch.zeros((), device=trainer.args.device)
            if self._wants_largest and shapes:
                largest = self._largest_of(trainer, inputs, shapes)
                if step.begun and not step.ran:
                    inputs, shapes = largest, _batch_shapes(largest)
            before = self._work.so_far()
            del self._steps[trainer]  # put back where there is no error
            loss = original(trainer, model, inputs, *args, **kwargs)
            if step.begun and shapes:
                step.ran.append((shapes, self._work.so_far() - before))
            step.begun = True
            self._steps[trainer] = step
            return loss

        module.Trainer.training_step = training_step

    def _largest_of(self, trainer: Any, inputs: Any, shapes: Shapes) -> Any:
        """Return the largest batch that a trainer has met, of those that have the same entries."""
        largest = self._largest.get(trainer)
        known = _batch_shapes(largest)
        if known.keys() != shapes.keys() or _elements(shapes) > _elements(known):
            self._largest[trainer] = largest = inputs
        return largest


def _batch_shapes(inputs: Any) -> Shapes:
    """Return the shapes of a batch's tensors; none of what is no mapping: nobody knows what is made of it."""
    if not isinstance(inputs, Mapping):
        return {}
    return {str(name): tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def _cost_of_repeated(step: _Step, shapes: Shapes) -> Counter[Any] | None:
    """Return the cost of a micro-batch that ran and was at least as large; None where none was."""
    for ran, cost in step.ran:
        if ran.keys() == shapes.keys() and all(_within(shapes[name], ran[name]) for name in ran):
            return cost
    return None


def _elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def _within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) == len(large) and all(one <= other for one, other in zip(small, large, strict=True))


# Let the history of LBFGS be full after its first step, as after many: it keeps two vectors of all weights for each
# of its last iterations, 100 of them by default, and a rehearsal makes a few.
#
# How often its line search evaluates the model depends on values. It brackets the step and narrows it once: more
# evaluations take no more memory, and would use up those that a step may make before its history grows.


_MOST_SEARCHED = 2


class FullHistory:
    """Fills the history of every LBFGS.

    Attributes:
        longest: Entries of the longest history that was filled; 0: none was.
    """

    longest = 0

    def install(self) -> None:
        """Change ``torch.optim.LBFGS`` for good."""
        lbfgs: Any = LBFGS
        original = lbfgs.step

        @wraps(original)
        def step(optimizer: Any, closure: Any) -> Any:
            loss = original(optimizer, closure)
            self._fill(optimizer)
            return loss

        lbfgs.step = step
        limit_line_search(_MOST_SEARCHED)

    def _fill(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        state, entries = optimizer.state[group["params"][0]], group["history_size"]
        direction = state.get("d")
        if direction is None or not direction.is_cuda or len(state["old_dirs"]) >= entries:
            return
        shapes = {"old_dirs": direction.shape, "old_stps": direction.shape, "ro": ()}
        for name, shape in shapes.items():
            state[name] += [direction.new_empty(shape) for _ in range(entries - len(state[name]))]
        self.longest = max(self.longest, entries)
