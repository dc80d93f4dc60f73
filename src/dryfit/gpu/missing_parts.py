"""Parts of a machine that are not there: packages, managed memory, fused flex attention."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from dryfit.gpu.import_hooks import rebind, when_imported
from dryfit.gpu.presence import Presence
from dryfit.gpu.private_apis.torch_virtual import stand_in
from dryfit.gpu.private_apis.transformers_steps import (
    finds_flash_attention_late,
    let_flash_attention,
    look_for_packages_again,
)
from dryfit.gpu.stand_ins import provided

# Packages that need a GPU to be built or used: what stands in for one, and what is said where one is missing.
#
# A model of transformers that asks for flash attention by name gets the package's stand-in, with transformers' own
# code around it; versions that look for the package while they are imported get torch's own flash kernel, which keeps
# the same tensors, and rows are not unpadded.


_NAME = "flash_attention_2"
_NOTE = "{} is rehearsed with the flash kernel of torch's scaled_dot_product_attention, without unpadding"
_PACKAGES = {_NAME: "flash_attn", "flash_attention_3": "flash_attn_interface"}
_SERVES = {
    "liger_kernel": "pip install --no-deps liger-kernel; of triton there is a stand-in",
    "bitsandbytes": "pip install --no-deps bitsandbytes",
    "deepspeed": "pip install --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo",
    "mpi4py": "a launcher before the script, deepspeed or torchrun: without one DeepSpeed asks MPI for its ranks",
}
"""By package, how it comes without a GPU."""


def install_missing_parts(presence: Presence, note: Callable[[str], None]) -> None:
    """Let models of transformers ask for flash attention by name, and give TRL the kernels that it has for a GPU.

    Args:
        presence: Gives them the package.
        note: Called with a remark where one gets torch's kernel instead.
    """

    def on_ask(name: str) -> bool:
        package = _PACKAGES.get(name)
        if package is not None and finds_flash_attention_late():
            presence.give(package, f'attn_implementation="{name}"')
            return True
        note(_NOTE.format(name))
        return False

    def on_trl(module: Any) -> None:
        """TRL computes log-probabilities without logits by Triton; without Triton its own code keeps many copies."""
        if find_spec(f"{module.__name__}.kernels") is not None and presence.give("triton", "TRL's kernels on a GPU"):
            look_for_packages_again()

    when_imported("transformers.modeling_utils", lambda module: let_flash_attention(module, _NAME, _by_torch, on_ask))
    when_imported("trl", on_trl)


def lack(error: ImportError) -> str:
    """Return what is said of a script that ended because it could not import something: of what failed first."""
    while isinstance(cause := error.__cause__ or error.__context__, ImportError):
        error = cause
    text = f"this machine lacks what the script imports: {str(error).strip().partition(chr(10))[0]}"
    if names := provided(error.name or ""):
        return f"{text}; the stand-in for it has {names}: a row of your own adds more (dryfit.register)"
    package = (error.name or "").partition(".")[0]
    if not package.isidentifier():  # a library says in words what it lacks
        package = next((one for one in _SERVES if one in text.lower()), "")
    return f"{text}; what serves: {_SERVES[package]}" if package in _SERVES else text


def _by_torch(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend as the flash kernel does, which sees no mask but a causal one, and needs no copies of grouped heads."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=kwargs.get("dropout", 0.0) or 0.0,
        is_causal=bool(is_causal) and query.shape[2] > 1,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


# bitsandbytes' native library, and memory that CUDA moves between host and device as it is needed: state of its paged
# optimizers.
#
# The allocator is CUDA's own (``cudaMallocManaged``), not torch's, and the driver takes it back from the device where
# that is full: it counts as host memory.


_MANAGED = "paged optimizer state counts as host memory: CUDA takes it back from the device where that is full"


def install_managed_memory(empty: Callable[[Any, torch.dtype], torch.Tensor], note: Callable[[str], None]) -> None:
    """Let bitsandbytes page tensors that have no memory, and call its kernels.

    Args:
        empty: Makes a tensor of the host without values, from shape and type.
        note: Called with a remark where a tensor is paged.
    """

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        note(_MANAGED)
        made: Any = empty(shape, dtype)
        made.is_paged, made.page_deviceid = True, getattr(device, "index", None) or 0
        return made

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        pass

    def change(module: Any) -> None:
        module.get_paged, module.prefetch_tensor, module.fill = get_paged, nothing, nothing
        module.lib = NativeLibrary(module.lib)

    when_imported("bitsandbytes.functional", change)


class NativeLibrary:
    """bitsandbytes' library as a device would have it, for code that calls its kernels by pointers (Unsloth).

    The caller has allocated what a kernel writes to, so a call does nothing. Functions for the CPU are the library's.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        """Return a function of the library."""
        return getattr(self._own, name) if "cpu" in name else _NativeFunction()


class _NativeFunction:
    """A function of a native library, as ``ctypes`` has it."""

    restype: Any = None
    argtypes: Any = None

    def __call__(self, *_args: Any) -> None:
        """Do nothing."""


# Flex attention on a virtual GPU: the memory of its fused kernel, whatever its scores and masks are.


_FLEX = "flex_attention: counted as its compiled kernel takes it; its arithmetic is not counted"


class _Attention(torch.autograd.Function):
    """Keeps what the kernel keeps: queries, keys and values, the output, and a sum in fp32 of each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:  # pyright: ignore
        """Allocate the output and the sums."""
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Allocate the products of outputs and their gradients, summed by row, and the gradients."""
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def install_flex_attention(note: Callable[[str], None]) -> None:
    """Take the place of ``torch.nn.attention.flex_attention`` on the device.

    Args:
        note: Called with a remark where it is used.
    """

    def replace(module: Any) -> None:
        replaced = module.flex_attention

        def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not query.is_cuda:
                return replaced(query, key, value, *args, **kwargs)
            note(_FLEX)
            given = (query, key, value)
            if torch.is_autocast_enabled("cuda"):
                given = tuple(one.to(torch.get_autocast_dtype("cuda")) for one in given)
            out, sums = _Attention.apply(*given)  # pyright: ignore[reportGeneralTypeIssues]
            if kwargs.get("return_aux") is not None:
                return out, module.AuxOutput(lse=sums, max_scores=None)
            return (out, sums) if kwargs.get("return_lse") else out

        rebind(replaced, stand_in(attention, replaced))

    when_imported("torch.nn.attention.flex_attention", replace)
