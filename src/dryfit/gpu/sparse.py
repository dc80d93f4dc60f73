"""Sparse tensors in coordinate format (COO): what operators on them allocate on a CUDA device.

A sparse tensor has two dense ones, its indices (int64, sparse dimensions x elements) and its values. Each body below
makes the tensors that torch's CUDA kernel makes, scratch memory too, with torch itself, so that the recorder counts
them. How many elements are distinct only values tell: each is taken to be, which is the most that there can be.

Sources: aten/src/ATen/native/sparse/SparseTensor.cpp, cuda/SparseCUDATensor.cpp, cuda/SparseCUDATensorMath.cu and
SparseBinaryOpIntersectionCommon.h, torch 2.11 to 2.13. What cuSPARSE asks for besides is not known; a product of one
sparse matrix takes nothing or little.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_aten = torch.ops.aten


def body_of(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return what runs in the place of an operator that has a sparse tensor; None: torch's own fake does.

    Raises:
        LookupError: Neither does.
    """
    name = func.name()
    if any(isinstance(one, torch.Tensor) and one.layout not in (torch.strided, torch.sparse_coo) for one in args):
        raise LookupError(name)
    if name in _VIEWS or not any(map(is_sparse, args)):
        return None
    if name in _BODIES and _takes(name, args):
        return _BODIES[name]
    if name in _BY_VALUES and is_sparse(args[0]) and not any(map(is_sparse, args[1:])):
        return lambda first, *more, **kwargs: _with_values(first, func(_values(first), *more, **kwargs))
    raise LookupError(name)


def multiplies(func: Any) -> bool:
    """Whether an operator multiplies matrices, in a time that depends on where the elements of a sparse one are."""
    return func.name() in _PRODUCTS


def _takes(name: str, args: Any) -> bool:
    """Whether a body knows its operator with these tensors: the size of a result may be that of values alone."""
    sparse = [is_sparse(one) for one in args]
    if name in _PRODUCTS and sum(sparse) > 1:
        return False
    return not (name in _INTO_DENSE and sparse[0])


def maker_of(func: Any) -> Callable[..., Any] | None:
    """Return what runs in the place of an operator that makes a sparse tensor of dense ones; None: nobody knows."""
    return _MAKERS.get(func.name())


def is_made_of_parts(func: Any) -> bool:
    """Whether an operator makes a sparse tensor of indices and values, or an empty one: no values decide its size."""
    return func.name().startswith(("aten::_sparse_coo_tensor", "aten::sparse_coo_tensor"))


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor in coordinate format."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _indices(sparse: torch.Tensor) -> torch.Tensor:
    return _aten._indices.default(sparse)


def _values(sparse: torch.Tensor) -> torch.Tensor:
    return _aten._values.default(sparse)


def _elements(sparse: torch.Tensor) -> int:
    return _values(sparse).shape[0]


def _made(
    like: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a sparse tensor of these elements, of another one's shape where none is given."""
    size = list(like.shape if shape is None else shape)
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=is_coalesced, check_invariants=False)


def _with_values(sparse: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with the same indices."""
    return _made(sparse, _indices(sparse), values, is_coalesced=sparse.is_coalesced())


def _scratch(elements: int, like: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device=like.device)


def _coalesced(sparse: torch.Tensor) -> torch.Tensor:
    """``coalesce_sparse_cuda``: flat indices and their order are sorted, values of the same place are added."""
    if sparse.is_coalesced():
        return sparse
    values, elements = _values(sparse), _elements(sparse)
    flat = [_scratch(elements, values) for _ in range(3)]  # flat indices, their order, where each distinct one begins
    sorting = _scratch(2 * elements, values)  # thrust sorts keys and values into buffers
    del sorting
    summed = torch.empty_like(values)
    indices = torch.empty_like(_indices(sparse))
    del flat
    return _made(sparse, indices, summed, is_coalesced=True)


def _product(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """``s_addmm_out_sparse_dense_cuda``: rows are compressed, and indices made int32 for cuSPARSE."""
    elements = _elements(sparse)
    rows = [_scratch(elements, dense, torch.int32), _scratch(sparse.shape[0] + 1, dense, torch.int32)]
    columns = _scratch(elements, dense, torch.int32)
    out = torch.empty(sparse.shape[0], dense.shape[1], dtype=dense.dtype, device=dense.device)
    del rows, columns
    return out


def _mm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if is_sparse(first):
        return _product(_coalesced(first), second)
    return _product(_coalesced(second.t()), first.t()).t()


def _addmm(_added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, **_: Any) -> torch.Tensor:
    return _mm(first, second)


def _dense(sparse: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    made = torch.zeros(sparse.shape, dtype=dtype or sparse.dtype, device=sparse.device)
    return _added_(made, sparse)


def _added_(dense: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """``add_out_dense_sparse_cuda``: flat indices, and values times alpha where elements have dimensions."""
    flat, values = _scratch(_elements(other), dense), _values(other)
    if other.dense_dim() or not other.is_coalesced():
        scaled = torch.empty_like(values)
        del scaled
    del flat
    return dense


def _added(first: torch.Tensor, second: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    if is_sparse(first) and is_sparse(second):  # both one after the other, until they are coalesced
        indices = torch.cat([_indices(first), _indices(second)], 1)
        values = torch.cat([_values(first), _values(second)])
        return _made(first, indices, values, is_coalesced=False)
    dense, sparse = (second, first) if is_sparse(first) else (first, second)
    return _added_(dense.clone(), sparse, alpha=alpha)


def _masked(values: torch.Tensor, mask: torch.Tensor, accumulate_matches: bool = False) -> torch.Tensor:
    """``sparse_mask``: of each element of the mask its value, with the mask's own indices."""
    del accumulate_matches
    taken = torch.empty(_values(mask).shape, dtype=values.dtype, device=values.device)
    if not is_sparse(values):
        flat = _scratch(_elements(mask), taken)
        del flat
    return _made(mask, _indices(mask), taken, is_coalesced=mask.is_coalesced())


def _copied(sparse: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    of_indices = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
    kwargs.pop("layout", None)
    indices = _aten._to_copy.default(_indices(sparse), **of_indices)
    values = _aten._to_copy.default(_values(sparse), **kwargs)
    return _made(sparse, indices, values, is_coalesced=sparse.is_coalesced())


def _cloned(sparse: torch.Tensor, **_: Any) -> torch.Tensor:
    return _made(sparse, _indices(sparse).clone(), _values(sparse).clone(), is_coalesced=sparse.is_coalesced())


def _transposed(sparse: torch.Tensor, first: int = 0, second: int = 1) -> torch.Tensor:
    """``transpose``: a copy of the indices, with two rows changed."""
    shape = list(sparse.shape)
    shape[first], shape[second] = shape[second], shape[first]
    indices = torch.empty_like(_indices(sparse))
    return _made(sparse, indices, _values(sparse), is_coalesced=False, shape=shape)


def _summed(sparse: torch.Tensor, *_: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _values(sparse).sum(dtype=dtype)


def _summed_over(sparse: torch.Tensor, dim: Sequence[int], **_: Any) -> torch.Tensor:
    """``_sparse_sum``: over dimensions of the values they are added, over others those of the indices are left out."""
    gone = {one % sparse.dim() for one in dim}
    kept = [one for one in range(sparse.sparse_dim()) if one not in gone]
    inner = [one - sparse.sparse_dim() + 1 for one in gone if one >= sparse.sparse_dim()]
    values = _values(sparse).sum(inner) if inner else _values(sparse)
    if not kept:
        return values.sum(0)
    indices = _indices(sparse)[:1].repeat(len(kept), 1)
    shape = [size for one, size in enumerate(sparse.shape) if one not in gone]
    kept_values = values if inner else values.clone()
    return _made(sparse, indices, kept_values, is_coalesced=False, shape=shape)


def _bag_gradient(
    gradient: torch.Tensor, ids: torch.Tensor, _offsets: Any, bag_of: torch.Tensor, *rest: Any, **_: Any
) -> torch.Tensor:
    """``_embedding_bag_sparse_backward``: of each id the gradient of its bag."""
    rows = rest[2]
    bags = bag_of if bag_of.numel() else _scratch(ids.numel(), gradient)
    values = gradient.index_select(0, bags)
    shape = (rows, gradient.shape[1])
    return _made(gradient, ids.view(1, -1), values, is_coalesced=False, shape=shape)


_MAKERS: Final[dict[str, Callable[..., Any]]] = {"aten::_embedding_bag_backward": _bag_gradient}
_BODIES: Final[dict[str, Callable[..., Any]]] = {
    "aten::_coalesce": _coalesced,
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::_sparse_addmm": _addmm,
    "aten::_to_dense": _dense,
    "aten::add.Tensor": _added,
    "aten::add_.Tensor": _added_,
    "aten::sparse_mask": _masked,
    "aten::_sparse_mask_projection": _masked,
    "aten::_to_copy": _copied,
    "aten::clone": _cloned,
    "aten::t": _transposed,
    "aten::sum": _summed,
    "aten::_sparse_sum": _summed,
    "aten::_sparse_sum.dim": _summed_over,
    "aten::transpose.int": _transposed,
}
_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::_sparse_addmm"})
_INTO_DENSE: Final = frozenset({"aten::addmm", "aten::_sparse_addmm", "aten::add_.Tensor"})
"""Operators whose first tensor a body knows as a dense one alone."""
_VIEWS: Final = frozenset(
    {
        "aten::_indices",
        "aten::_values",
        "aten::_nnz",
        "aten::is_coalesced",
        "aten::sparse_dim",
        "aten::dense_dim",
    }
)
"""Operators that make no memory, which torch's fakes know."""
_BY_VALUES: Final = frozenset(
    f"aten::{name}"
    for name in ("mul.Scalar", "mul.Tensor", "div.Tensor", "neg", "pow.Tensor_Scalar", "sqrt", "abs", "detach", "alias")
)
