"""Questions about a ShardTensor that need no data: answered for the global tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils.dlpack

from mpishard.comm.null import A_VALUE, no_values
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.strides import is_dense_alike, row_major

# torch's own descriptors and methods, which read only what the wrapper knows
_OF_LOCAL = (
    "is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_mps is_xpu is_ipu is_xla is_maia is_mtia "
    "is_mkldnn is_vulkan is_nested itemsize names"
).split()
_METHODS_OF_LOCAL = (
    "is_complex is_floating_point is_signed is_conj is_neg is_inference element_size get_device has_names "
    "dense_dim sparse_dim is_pinned"
).split()

for _name in _OF_LOCAL:
    _descriptor = getattr(torch.Tensor, _name, None)
    if _descriptor is not None and hasattr(_descriptor, "__get__"):
        implements(_descriptor.__get__, sharded="local")(lambda self, _name=_name: getattr(self.block, _name))
for _name in _METHODS_OF_LOCAL:
    for _function in spellings(_name):
        implements(_function, sharded="local")(
            lambda self, *args, _name=_name, **kwargs: getattr(self.block, _name)(*args, **kwargs)
        )


@implements(torch._has_compatible_shallow_copy_type, sharded="local")
def fits_in_place(input: Any, from_: Any) -> bool:
    """Tell whether ``.data`` of one can be the other, as ``nn.Module.to`` asks; else it makes a new parameter.

    That one would have no hooks, and an optimizer would not know it.
    """
    if not (isinstance(input, ShardTensor) and isinstance(from_, ShardTensor) and input.sharding == from_.sharding):
        return False
    return torch._has_compatible_shallow_copy_type(input.block, from_.block)


@implements(torch.Tensor.__dir__, sharded="local")
def names_of(self: ShardTensor) -> list[str]:
    """Return the names of its attributes and methods. Not collective."""
    return sorted({*dir(type(self)), *vars(self)})


@implements(torch.Tensor.numel, torch.numel, torch.Tensor.nelement, sharded="local")
def numel(self: ShardTensor) -> int:
    """Return the number of cells of the global tensor. Not collective."""
    return math.prod(self.sharding.shape)


@implements(torch.Tensor.stride, sharded="local")
def stride(self: ShardTensor, dim: int | None = None) -> Any:
    """Return the strides that the gathered tensor has. Not collective."""
    strides = row_major(self.sharding.shape)
    return strides if dim is None else strides[_kind_of_dim(self, dim)]


def _kind_of_dim(self: ShardTensor, dim: Any) -> Any:
    """Return a dim; refuse what torch takes for none, such as a truth. Not collective."""
    if dim.__class__ is not int:
        self.block.size(dim)
    return dim


@implements(torch.Tensor.is_contiguous, sharded="local")
def is_contiguous(self: ShardTensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Tell whether the tensor lies in a memory format: the same on every rank. Not collective.

    A block of one cell, or none, along a dim in which others have more lies in several formats. Where a rank has one,
    the answer is that for a new tensor, and for views of it: ``view`` takes all of them.
    """
    return is_dense_alike(self, memory_format)


@implements(torch.result_type, sharded="local")
def result_type(tensor1: Any, tensor2: Any) -> torch.dtype:
    """Return the dtype that an operation on both gives. Not collective."""
    return torch.result_type(*(t.block if isinstance(t, ShardTensor) else t for t in (tensor1, tensor2)))


def whole_value(x: ShardTensor) -> torch.Tensor:
    """Return the whole one-cell tensor. Collective unless it is replicated."""
    if numel(x) != 1:
        raise RuntimeError(f"a Tensor with {numel(x)} elements cannot be converted to Scalar")
    if x.block.is_meta:
        raise no_values(A_VALUE)
    x = resolved(x)
    return x.block.detach() if x.sharding.is_replicated else x.detach().full_tensor()  # type: ignore[attr-defined]


@implements(torch.Tensor.__bool__, sharded="local")
def truth(self: ShardTensor) -> bool:
    """Return whether the only cell is not zero. Collective unless it is replicated."""
    if cells := numel(self):
        return bool(whole_value(self)) if cells == 1 else _ambiguous("more than one value")
    return _ambiguous("no values")


@implements(torch._assert, sharded="local")
def assert_(condition: ShardTensor, message: str) -> None:
    """Raise on every rank where the only cell is zero. Collective unless it is replicated."""
    if not truth(condition):
        raise AssertionError(message)


@implements(*spellings("_assert_async"), sharded="local")
def assert_async(
    input: ShardTensor, assert_msg: str = "Expected Tensor with single nonzero value, but got zero"
) -> None:
    """Raise on every rank where the only cell is zero. Collective unless it is replicated."""
    if not truth(input):
        raise RuntimeError(assert_msg)


def _ambiguous(values: str) -> NoReturn:
    raise RuntimeError(f"Boolean value of Tensor with {values} is ambiguous")


def _number_rule(kind: Callable[[torch.Tensor], Any], error: type, text: str) -> Callable[[ShardTensor], Any]:
    def rule(self: ShardTensor) -> Any:
        if numel(self) != 1:
            raise error(text)
        return kind(whole_value(self))

    return rule


for _kind in (int, float, complex):
    implements(getattr(torch.Tensor, f"__{_kind.__name__}__"), sharded="local")(
        _number_rule(_kind, ValueError, "only one element tensors can be converted to Python scalars")
    )
implements(torch.Tensor.__index__, sharded="local")(
    _number_rule(
        torch.Tensor.__index__, TypeError, "only integer tensors of a single element can be converted to an index"
    )
)
implements(torch.is_nonzero, torch.Tensor.is_nonzero, sharded="local")(lambda self: bool(whole_value(self)))


@implements(torch.Tensor.tolist, sharded="local")
def tolist(self: ShardTensor) -> Any:
    """Return the whole as lists. Collective."""
    if self.block.is_meta:
        raise no_values(A_VALUE)
    return self.full_tensor().tolist()


implements(torch.Tensor.dim, torch.Tensor.ndimension, sharded="local")(lambda self: len(self.sharding.shape))
implements(torch.Tensor.size, sharded="local")(
    lambda self, dim=None: (
        self.shape if dim is None else self.sharding.shape[dim if dim.__class__ is int else _kind_of_dim(self, dim)]
    )
)
implements(torch.Tensor.nbytes.__get__, sharded="local")(  # type: ignore[attr-defined]
    lambda self: math.prod(self.sharding.shape) * self.block.itemsize
)
implements(torch.Tensor.storage_offset, sharded="local")(lambda _self: 0)
implements(torch.is_same_size, torch.Tensor.is_same_size, sharded="local")(
    lambda self, other: tuple(self.shape) == tuple(other.shape)
)
implements(torch.Tensor.item, sharded="local")(lambda self: whole_value(self).item())


def _between_rule(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rule(start: Any, end: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return numbers between two values, a plain tensor. Collective unless both are replicated."""
        ends = (x.item() if isinstance(x, ShardTensor) else x for x in (start, end))
        return func(*ends, *args, **kwargs)

    return rule


implements(torch.linspace, sharded="local")(_between_rule(torch.linspace))
implements(torch.logspace, sharded="local")(_between_rule(torch.logspace))


# -- functions in C that ask for no rule

_capsule = torch.utils.dlpack.to_dlpack


def to_dlpack(tensor: Any) -> Any:
    """Return a capsule of the memory of a plain tensor; a ShardTensor has none, and says so. Not collective."""
    return tensor.__dlpack__() if isinstance(tensor, ShardTensor) else _capsule(tensor)


torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # type: ignore[assignment]
