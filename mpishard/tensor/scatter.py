"""scatter_tensor: the tensor of one rank becomes the blocks of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpishard.autograd.argument import require_mesh, valueless, whole_number
from mpishard.autograd.batch import is_batched, vmap_refused
from mpishard.autograd.graph import recorded
from mpishard.comm import guard
from mpishard.comm.collective.transfer import scatter_blocks
from mpishard.comm.device_mesh import names_of_dtensor
from mpishard.comm.interruption import whole
from mpishard.comm.memory.buffer import followed, uncopied, unfit
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, UnsupportedDtypeError, UnsupportedOperationError
from mpishard.layout import layout_of
from mpishard.layout.partition import coords_of
from mpishard.tensor.factory import asked, check_sizes, new_layout
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@names_of_dtensor
@whole
def scatter_tensor(
    tensor: Tensor | None,
    src: int,
    mesh: CartMesh,
    placements: Any,
    *,
    requires_grad: bool = False,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> ShardTensor:
    """Shard a tensor that one rank holds; no other rank ever holds more than its own block.

    Collective.

    Parameters
    ----------
    tensor
        The full tensor on mesh rank ``src``; ignored elsewhere.
    src
        Mesh rank of the source.
    mesh, placements
        Where and how to shard it.
    requires_grad
        Of the result, a leaf: gradients stop here.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples: give a network's total stride, and every
        strided convolution of it works on whole blocks.

    Returns
    -------
    ShardTensor

    Raises
    ------
    LayoutError
        There is nothing to scatter, or placements or sizes do not fit it; `Partial` is refused.
    UnsupportedDtypeError
        It shall require a gradient, and has a dtype that has none.
    UnsupportedOperationError
        It is quantized, sparse, nested, or has no values.
    DesyncError
        The ranks' arguments differ.

    Examples
    --------
    >>> full = load() if mesh.rank == 0 else None
    >>> x = ms.scatter_tensor(full, 0, mesh, (ms.Shard(2), ms.Shard(3)), requires_grad=True)
    """
    require_mesh("scatter_tensor", mesh)

    def ours() -> tuple[Tensor | None, int, bool, tuple[Any, ...]]:
        root = whole_number("scatter_tensor", "src", src)
        if not 0 <= root < mesh.size:
            raise LayoutError(
                "scatter_tensor: no such source rank",
                expected=f"0 <= src < {mesh.size}",
                got=root,
                fix="name a rank of the mesh",
            )
        if mesh.rank != root:
            return None, root, requires_grad, ()
        if not isinstance(tensor, Tensor) or isinstance(tensor, ShardTensor):
            raise LayoutError(
                "scatter_tensor: nothing to scatter",
                expected=f"a plain tensor on rank {root}",
                got=type(tensor).__name__,
                fix="pass the full tensor on the source rank",
            )
        odd = unfit(tensor) or uncopied(tensor) or followed()
        if odd := odd or (valueless(tensor) if mesh.device.type != "meta" else None):
            got, fix = odd
            raise UnsupportedOperationError(
                "scatter_tensor: cells that cannot be cut and sent",
                expected=f"a dense tensor on rank {root}",
                got=got,
                fix=fix,
            )
        if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedDtypeError(
                "scatter_tensor: a dtype without gradients",
                expected="a floating or complex dtype, or requires_grad=False",
                got=tensor.dtype,
                fix="convert the tensor first",
            )
        return tensor.detach(), root, requires_grad, ()

    return scattered("scatter_tensor", ours, mesh, placements, sizes, multiple)


def scattered(
    call: str,
    ours: Callable[[], tuple[Tensor | None, int, bool, tuple[Any, ...]]],
    mesh: CartMesh,
    placements: Any,
    sizes: Mapping[int, Sequence[int]] | None,
    multiple: int,
) -> ShardTensor:
    """Shard the tensor of one rank. Collective; what this rank's arguments raise, every rank raises.

    ``ours`` checks them, and returns this rank's tensor, the source rank, whether the result requires a gradient, and
    what else the ranks have in common.
    """
    error: Exception | None = None
    layout = meta = tensor = None
    root, requires_grad, signature = 0, False, call
    try:
        tensor, root, requires_grad, alike = ours()
        check_sizes(sizes)
        signature = f"{call}{(root, *asked(placements, sizes), multiple, requires_grad, *alike)}"
        if mesh.rank == root:
            assert tensor is not None
            if is_batched(tensor):
                raise vmap_refused(call)
            layout = new_layout(call, mesh, placements, tensor.shape, sizes, multiple)
            meta = (tuple(tensor.shape), tensor.dtype)
    except Exception as e:  # noqa: BLE001 (of wrong arguments Python and torch raise anything)
        error = e
    comm = mesh.all_ranks.comm
    # what fits on the source fits everywhere: the others give the same
    guard.agree(comm, error, signature)
    with guard.waiting(call, (root,), comm):
        shape, dtype = comm.bcast(meta, root=root)
    if layout is None:
        layout = layout_of(mesh.shape, placements, shape, sizes, multiple)
    source = tensor if mesh.rank == root else None
    local = scatter_blocks(mesh, root, source, lambda rank: layout.box(coords_of(rank, mesh.shape)), dtype)
    return wrap(recorded(local, requires_grad), layout, mesh)
