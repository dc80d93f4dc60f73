"""Private operators of torch: those of ``torch.ops.aten`` whose names begin with an underscore.

They are no Python names: they stand in torch's table of operators (``aten/src/ATen/native/native_functions.yaml``),
and a trace of any model holds them, whether dryfit names them or not. Its modules therefore write them where they are
used, like all other operators. This table says which may be written, and the arguments that each is given or read by.
"""

from typing import Any, Final

import torch

from dryfit.gpu.private_apis.torch_modes import schema_of
from dryfit.settings.private_names import PrivateNames

_FUSED_RMS_NORM: Final[Any] = getattr(torch.ops.aten, "_fused_rms_norm", None)
_HAS_FUSED_RMS_NORM: Final = (
    _FUSED_RMS_NORM is not None and schema_of(_FUSED_RMS_NORM.default).arguments[1].name == "normalized_shape"
)
ARGUMENTS: Final = {
    # seeing where code asks for a value
    "_local_scalar_dense": "self",
    # knowing what calls cuBLAS
    "_addmm_activation": "self mat1 mat2",
    # tracing attention with the kernel that a device would take, and counting what kernels take inside; until: torch
    # chooses the kernel of a device that is absent
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
    # attention of packages whose kernel torch has too
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale"
    ),
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k",
    "_efficient_attention_forward": (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type"
        " compute_log_sumexp"
    ),
    # products of 8-bit numbers, as torch's own code of ``out_dtype`` makes them
    "_int_mm": "self mat2",
    # counting what a kernel takes inside of its operator
    "_softmax": "self dim half_to_float",
    "_softmax_backward_data": "grad_output output dim input_dtype",
    "_fft_c2c": "self dim normalization forward",
    "_fft_c2r": "self dim normalization last_dim_size",
    "_fft_r2c": "self dim normalization onesided",
    # running recurrent layers as cuDNN does; until: torch chooses the kernel of a device that is absent
    "_cudnn_rnn": (
        "input weight weight_stride0 weight_buf hx cx mode hidden_size proj_size num_layers batch_first dropout train"
        " bidirectional batch_sizes dropout_state"
    ),
    "_cudnn_rnn_backward": (
        "input weight weight_stride0 weight_buf hx cx output grad_output grad_hy grad_cy mode hidden_size proj_size"
        " num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve output_mask"
    ),
    # knowing them in a trace of a model's forward
    "_to_copy": "self",
    "_unsafe_view": "self size",
    "_assert_async": "self",
    "_assert_tensor_metadata": "a",
    # knowing that fp16's loss scale stays
    "_amp_update_scale_": "self growth_tracker found_inf",
    # packing sequences of known lengths
    "_pack_padded_sequence": "input lengths batch_first",
    # answering it where no value is known
    "_unique2": "self sorted return_inverse return_counts",
    # products of experts that torch's fake refuses
    "_grouped_mm": "self mat2 offs bias out_dtype",
    # answering operators of which torch has no fake
    "_fused_sgd_": "self grads momentum_buffer_list",
    "_ctc_loss": "log_probs targets input_lengths target_lengths",
    "_ctc_loss_backward": "grad log_probs",
    # having it in one piece, as a device has it; torch 2.8 has another one of this name, which CUDA has not
    **({"_fused_rms_norm": "input normalized_shape weight eps"} if _HAS_FUSED_RMS_NORM else {}),
}
"""The first arguments of each operator, in order: dryfit gives and reads them by their places.

Where no other condition stands, a row goes when torch's own code no longer calls its operator.
"""

NAMES: Final = tuple(f"torch.ops.aten.{name}.default" for name in ARGUMENTS)


def _misbehaves() -> str:
    for name, wanted in ARGUMENTS.items():
        operator: Any = getattr(torch.ops.aten, name).default
        first = [argument.name for argument in schema_of(operator).arguments][: len(wanted.split())]
        if first != wanted.split():
            return f"the operator aten::{name} takes ({', '.join(first)}), not ({', '.join(wanted.split())})"
    return ""


OPERATORS: Final = PrivateNames("torch", NAMES, _misbehaves)
