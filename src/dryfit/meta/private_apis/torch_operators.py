"""Private operators of torch: those of ``torch.ops.aten`` whose names begin with an underscore.

They are no Python names: they stand in torch's table of operators (``aten/src/ATen/native/native_functions.yaml``),
and a trace of any model holds them, whether dryfit names them or not. Its modules therefore write them where they are
used, like all other operators. This table says which may be written, and the arguments that each is given or read by.
"""

from typing import Any, Final

import torch

from dryfit.core.private_names import PrivateName, PrivateNames
from dryfit.meta.private_apis.torch_modes import schema_of

_ATTENTION: Final = "tracing attention with the kernel that a device would take"
_SCRATCH: Final = "counting what a kernel takes inside of its operator"
_TRACED: Final = "knowing it in a trace of a model's forward"
_NO_FAKE: Final = "answering an operator of which torch has no fake"
_IN_TRACES: Final = "torch's own code no longer calls it"
_BY_CHOICE: Final = "torch chooses the kernel of a device that is absent"

ARGUMENTS: Final = {
    "_local_scalar_dense": "self",
    "_addmm_activation": "self mat1 mat2",
    "_scaled_dot_product_attention_math": "query key value attn_mask dropout_p is_causal dropout_mask scale enable_gqa",
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    ),
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp",
    "_scaled_dot_product_efficient_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
    ),
    "_scaled_dot_product_efficient_attention_backward": "grad_out_ query key value attn_bias out logsumexp",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp",
    "_softmax_backward_data": "grad_output output dim input_dtype",
    "_to_copy": "self",
    "_unsafe_view": "self size",
    "_assert_async": "self",
    "_assert_tensor_metadata": "a",
    "_amp_update_scale_": "self growth_tracker found_inf",
    "_pack_padded_sequence": "input lengths batch_first",
    "_unique2": "self sorted return_inverse return_counts",
    "_grouped_mm": "self mat2 offs bias out_dtype",
    "_ctc_loss": "log_probs targets input_lengths target_lengths",
    "_ctc_loss_backward": "grad log_probs",
}
"""The first arguments of each operator, in order: dryfit gives and reads them by their places."""

NAMES: Final = (
    PrivateName("torch.ops.aten._local_scalar_dense.default", "seeing where code asks for a value", _IN_TRACES),
    PrivateName("torch.ops.aten._addmm_activation.default", "knowing what calls cuBLAS", _IN_TRACES),
    PrivateName("torch.ops.aten._scaled_dot_product_attention_math.default", _ATTENTION, _BY_CHOICE),
    PrivateName("torch.ops.aten._scaled_dot_product_cudnn_attention.default", _ATTENTION, _BY_CHOICE),
    PrivateName("torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default", _SCRATCH, _IN_TRACES),
    PrivateName("torch.ops.aten._scaled_dot_product_efficient_attention.default", _ATTENTION, _BY_CHOICE),
    PrivateName("torch.ops.aten._scaled_dot_product_efficient_attention_backward.default", _SCRATCH, _IN_TRACES),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention.default", _ATTENTION, _BY_CHOICE),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_backward.default", _SCRATCH, _IN_TRACES),
    PrivateName("torch.ops.aten._softmax_backward_data.default", _SCRATCH, _IN_TRACES),
    PrivateName("torch.ops.aten._to_copy.default", _TRACED, _IN_TRACES),
    PrivateName("torch.ops.aten._unsafe_view.default", _TRACED, _IN_TRACES),
    PrivateName("torch.ops.aten._assert_async.default", _TRACED, _IN_TRACES),
    PrivateName("torch.ops.aten._assert_tensor_metadata.default", _TRACED, _IN_TRACES),
    PrivateName("torch.ops.aten._amp_update_scale_.default", "knowing that fp16's loss scale stays", _IN_TRACES),
    PrivateName("torch.ops.aten._pack_padded_sequence.default", "packing sequences of known lengths", _IN_TRACES),
    PrivateName("torch.ops.aten._unique2.default", "answering it where no value is known", _IN_TRACES),
    PrivateName("torch.ops.aten._grouped_mm.default", "products of experts that torch's fake refuses", _IN_TRACES),
    PrivateName("torch.ops.aten._ctc_loss.default", _NO_FAKE, _IN_TRACES),
    PrivateName("torch.ops.aten._ctc_loss_backward.default", _NO_FAKE, _IN_TRACES),
)


def _misbehaves() -> str:
    for name, wanted in ARGUMENTS.items():
        operator: Any = getattr(torch.ops.aten, name).default
        first = [argument.name for argument in schema_of(operator).arguments][: len(wanted.split())]
        if first != wanted.split():
            return f"the operator aten::{name} takes ({', '.join(first)}), not ({', '.join(wanted.split())})"
    return ""


OPERATORS: Final = PrivateNames("torch", NAMES, _misbehaves)
