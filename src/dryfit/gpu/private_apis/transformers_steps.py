"""Private steps of transformers: of ``from_pretrained``, of choosing attention, of ``generate``'s loop."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # keeping tables that a constructor computed, where it calls from_pretrained, which would replace them;
    # until: from_pretrained leaves alone what is not on meta
    "transformers.PreTrainedModel._move_missing_keys_from_meta_to_device",
    # a model whose weights are not read needs no files of weights; until: from_pretrained takes a source of
    # weights other than files
    "transformers.modeling_utils._get_resolved_checkpoint_files",
    "transformers.modeling_utils._get_dtype",
    # telling that a model does not fit, where a part of it would be left in host memory; until: from_pretrained
    # says where it will put a model
    "transformers.modeling_utils._get_device_map",
    # filling a model by its own rules (types, devices, quantisation) with tensors that have no values; until:
    # from_pretrained takes a source of weights other than files
    "transformers.PreTrainedModel._load_pretrained_model",
    # rehearsing flash attention, whose package a machine without a GPU has not; until: a public hook says which
    # kernel serves an implementation of attention
    "transformers.PreTrainedModel._check_and_adjust_attn_implementation",
    # knowing models that refuse flash attention; until: models say by a public name which implementations of
    # attention they have
    "transformers.PreTrainedModel._supports_flash_attn",
    # leaving out tokens in the middle of a long generated sequence; until: generate can be continued from its
    # cache with all of its arguments
    "transformers.GenerationMixin._sample",
    "transformers.GenerationMixin._prefill",
    "transformers.GenerationMixin._update_model_kwargs_for_generation",
)

FORGETS: Final = "_move_missing_keys_from_meta_to_device"
"""The function of ``from_pretrained`` that replaces all that is not in its file, tables included, by empty memory."""
_MODULE: Final = "transformers.modeling_utils"
_GENERATION_MODULE: Final = "transformers.generation.utils"
_INITIALISED: Final = "_is_hf_initialized"
_Function = Callable[..., Any]


def is_loaded() -> bool:
    """Whether ``from_pretrained`` can be called: importing it for the test alone would take seconds."""
    return _MODULE in sys.modules


def initialise_again(tensor: torch.Tensor) -> None:
    """Let transformers give a tensor of a loaded model the value that the model's initialiser computes."""
    vars(tensor).pop(_INITIALISED, None)


def knows_load_config(models: Any) -> bool:
    """Whether the steps of ``from_pretrained`` take one object of what was asked for, as since transformers 5.

    Args:
        models: The module ``transformers.modeling_utils``.
    """
    return hasattr(models, "LoadStateDictConfig")


def has_steps(models: Any) -> bool:
    """Whether ``from_pretrained`` and the choice of attention have the steps that are replaced, as since 4.56.

    Args:
        models: The module ``transformers.modeling_utils``.
    """
    model = models.PreTrainedModel
    of_model = ("_load_pretrained_model", "_check_and_adjust_attn_implementation")
    of_module = ("_get_resolved_checkpoint_files", "_get_dtype", "_get_device_map")
    return all(hasattr(model, name) for name in of_model) and all(hasattr(models, name) for name in of_module)


def replace_steps(models: Any, wrap: Callable[[str, _Function], _Function]) -> None:
    """Replace the steps of ``from_pretrained``.

    Args:
        models: The module ``transformers.modeling_utils``.
        wrap: Given ``files``, ``dtype``, ``placement`` or ``load`` and the step's function, returns another one.
    """
    models._get_resolved_checkpoint_files = wrap("files", models._get_resolved_checkpoint_files)
    models._get_dtype = wrap("dtype", models._get_dtype)
    models._get_device_map = wrap("placement", models._get_device_map)
    step = models.PreTrainedModel._load_pretrained_model
    models.PreTrainedModel._load_pretrained_model = staticmethod(wrap("load", step))


def replace_sampling(mixin: Any, wrap: Callable[[_Function], _Function]) -> None:
    """Replace the loop that greedy decoding and sampling share.

    Args:
        mixin: The class ``transformers.GenerationMixin``.
        wrap: Given the loop, returns another one.
    """
    mixin._sample = wrap(mixin._sample)


def has_own_arguments(model: Any, mixin: Any) -> bool:
    """Whether a model keeps arguments from one token to the next in a way of its own."""
    return type(model)._update_model_kwargs_for_generation is not mixin._update_model_kwargs_for_generation


def arguments_after(model: Any, config: Any, arguments: dict[str, Any], length: int, tokens: int) -> dict[str, Any]:
    """Return what the loop is given to continue a sequence of this length, of which so many tokens were generated.

    Args:
        config: The ``GenerationConfig``, which is told the length, in the place of a mask that hides nothing.
    """
    config._mask_length = length
    return model._update_model_kwargs_for_generation(
        {}, dict(arguments), is_encoder_decoder=model.config.is_encoder_decoder, num_new_tokens=tokens
    )


def finds_flash_attention_late() -> bool:
    """Whether transformers looks for the packages of flash attention when a model asks for them, and may look again."""
    flash: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not hasattr(flash, "lazy_import_flash_attention"):
        return False
    look_for_packages_again()
    return True


def look_for_packages_again() -> None:
    """Let transformers forget which packages it has found or missed."""
    tools: Any = importlib.import_module("transformers.utils.import_utils")
    for look in list(vars(tools).values()):
        if callable(clear := getattr(look, "cache_clear", None)):
            clear()


def let_flash_attention(models: Any, name: str, attend: Callable[..., Any], on_ask: Callable[[str], bool]) -> None:
    """Let models that know flash attention have it by one name, whatever is installed.

    Args:
        models: The module ``transformers.modeling_utils``.
        name: That they get, whichever of its names they ask for.
        attend: What attends under that name.
        on_ask: Called with the name that was asked for; whether its package is there now.
    """
    if not has_steps(models):
        return
    check = models.PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(check)
    def check_or_stand_in(model: Any, asked: str | None, *args: Any, **kwargs: Any) -> str:
        wanted = str(asked).removeprefix("paged|")
        is_flash = wanted.startswith("flash_attention") or "flash-attn" in wanted
        if not is_flash or not model._supports_flash_attn:
            return check(model, asked, *args, **kwargs)
        if on_ask(wanted):
            return check(model, asked, *args, **kwargs)
        models.ALL_ATTENTION_FUNCTIONS.register(name, attend)
        return name

    models.PreTrainedModel._check_and_adjust_attn_implementation = check_or_stand_in


def _misbehaves() -> str:
    models: Any = sys.modules[_MODULE]
    forgets = inspect.unwrap(getattr(models.PreTrainedModel, FORGETS))
    if "empty_like" not in forgets.__code__.co_names:
        return f"transformers.PreTrainedModel.{FORGETS} no longer replaces what it takes for missing by empty_like"
    return ""


LOADING: Final = PrivateNames("transformers", NAMES[:1], _misbehaves)
"""For when :func:`is_loaded`."""


def _steps_misbehave() -> str:
    models: Any = sys.modules[_MODULE]
    loads = ("load_config",) if knows_load_config(models) else ("device_map", "key_mapping")
    for function, wanted in (
        (models._get_dtype, ("dtype", "config", "state_dict")),
        (models._get_device_map, ("model", "device_map", "max_memory", "hf_quantizer")),
        (models.PreTrainedModel._load_pretrained_model, ("model", "state_dict", *loads)),
    ):
        missing = [name for name in wanted if name not in inspect.signature(function).parameters]
        if missing:
            return f"{function.__qualname__} takes no {missing[0]}"
    return ""


PRETRAINED: Final = PrivateNames("transformers", NAMES[1:-3], _steps_misbehave)
"""For when ``transformers.modeling_utils`` is imported."""


def _generation_misbehaves() -> str:
    mixin: Any = sys.modules[_GENERATION_MODULE].GenerationMixin
    for function, wanted in (
        (inspect.unwrap(mixin._sample), ("input_ids", "logits_processor", "stopping_criteria", "generation_config")),
        (mixin._update_model_kwargs_for_generation, ("outputs", "model_kwargs", "num_new_tokens")),
    ):
        missing = [name for name in wanted if name not in inspect.signature(function).parameters]
        if missing:
            return f"{function.__qualname__} takes no {missing[0]}"
    if "_mask_length" not in mixin._prefill.__code__.co_consts:
        return f"{mixin._prefill.__qualname__} does not ask the config for the length of a mask"
    return ""


SAMPLING: Final = PrivateNames("transformers", NAMES[-3:], _generation_misbehaves)
"""For when ``transformers.generation.utils`` is imported."""
