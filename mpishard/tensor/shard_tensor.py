"""ShardTensor: a torch.Tensor whose data is spread over a mesh; autograd lives on the local blocks."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from mpishard.autograd.linear import apply
from mpishard.autograd.plain import given_layout, note_wrapped, taken
from mpishard.autograd.redistribute import keep_step, redistribute
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import two_meshes
from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, Replicate, as_placements, layout_of, without_partial
from mpishard.tensor.by_data import data_of, gradient_block, note_set
from mpishard.tensor.out import call_into
from mpishard.tensor.refusal import explained, stumbled, with_ints
from mpishard.tensor.registry import BLOCKWISE, RULES, by_torch_names, in_rule, no_rule, outline, rule_below

if TYPE_CHECKING:
    from mpishard.tensor.resident import ResidentHalo

_subclass = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_strided = torch.strided
_number = torch.ops.aten._local_scalar_dense.default
_detach = torch.ops.aten.detach.default


class ShardTensor(Tensor):
    """A tensor of global shape, of which every rank of a mesh holds a block.

    Make one with `distribute_tensor`, `scatter_tensor`, `ShardTensor.from_local` or the factories. Torch
    functions on it run their sharding rule, or raise `NoShardingRule`. Autograd lives on the local blocks, so
    ``backward``, ``grad`` and hooks work as on any tensor.

    Attributes
    ----------
    shape, dtype, device
        Global shape; dtype and device of the local block.
    placements : tuple of Placement
        How each mesh dim holds the tensor.
    mesh : CartMesh
        The mesh that holds it.
    sharding : Layout
        Mesh shape, placements, global shape and block sizes: frozen and hashable.
    block : Tensor
        What this rank holds, where autograd runs: for rules. `to_local` is for all others.
    """

    __slots__ = ("block", "mesh", "sharding")
    block: Tensor
    sharding: Layout
    mesh: CartMesh
    # a view in torch, but a copy here, because cells travelled: writing into it would be lost
    _gathered_view: bool = False
    # of a view, and of blocks that the user cut out of larger arrays: how the whole would lie in memory
    # (`mpishard.tensor.strides`)
    _trail: tuple[Any, ...] | None = None
    # of a gathered view: the tensor it was taken from, and how (`mpishard.ops.rule.write`)
    _origin: tuple[ShardTensor, tuple[Any, ...]] | None = None
    # where another block of the same cells took the place of the first, to which autograd goes back: that one, its
    # layout, and the version of the other up to which both are the same
    _root: tuple[Tensor, Layout, int] | None = None
    # where the block's storage has room for its halo: how wide, and whether it is fresh
    _halo: ResidentHalo | None = None
    # of a parameter whose `.data` was asked for (`mpishard.tensor.by_data`)
    _by_data: tuple[Tensor, Tensor, int] | None = None
    # what stands for `grad_fn` where a module has full backward hooks
    _hook_node: Any = None

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, mesh: CartMesh) -> ShardTensor:
        """Wrap a block; use `ShardTensor.from_local`, which checks it. Not collective."""
        note_wrapped(local, layout, mesh)
        return wrap(local, layout, mesh)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the sharding rule of ``func``."""
        if func in BLOCKWISE and len(args) == 1 and not kwargs:
            x = args[0]
            layout = x.sharding
            if not layout.partial_dims:
                return wrap(func(x.block), layout, x.mesh)
        rule = RULES.get(func) or rule_below(func)
        if rule is None:
            raise no_rule(func, args, kwargs or {})
        try:
            if not kwargs:
                return rule(*args)
            kwargs = by_torch_names(func, kwargs)
            return call_into(func, rule, args, kwargs) if "out" in kwargs else rule(*args, **kwargs)
        except BaseException as e:
            if stumbled(func, e, args, kwargs):
                if again := with_ints(args, kwargs or {}, e):  # type: ignore[arg-type]
                    return cls.__torch_function__(func, types, *again)
                if told := explained(func, args, kwargs or {}, e):  # type: ignore[arg-type]
                    raise told from None
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse: what arrives here went past the rules, and would see no data. But torch may ask for a number."""
        if func is _number:  # as torch.full, torch.arange, torch.histc do
            return args[0].item()
        if func is _detach and args[0].sharding.is_replicated:  # as torch.tensor does, which makes a plain one
            return args[0].block.detach()
        raise no_rule(func, args, kwargs or {}, past_rules=True)

    # -- what it is: Python properties, 0.1 us instead of a dispatch through torch's descriptors

    shape = property(lambda self: torch.Size(self.sharding.shape), doc="Global shape.")  # type: ignore[assignment]
    ndim = property(lambda self: len(self.sharding.shape), doc="Number of dims.")  # type: ignore[assignment]
    dtype = property(lambda self: self.block.dtype, doc="Dtype of the elements.")  # type: ignore[assignment]
    device = property(lambda self: self.block.device, doc="Device of the local block.")  # type: ignore[assignment]
    layout = property(lambda self: self.block.layout, doc="As of any tensor: torch.strided.")  # type: ignore[assignment]
    _base = property(lambda self: self.block._base)  # type: ignore[assignment]
    placements = property(lambda self: self.sharding.placements, doc="One placement per mesh dim.")
    name = None  # as of any tensor: pandas and xarray ask

    # -- the same by the names that DTensor and PhysicsNeMo have for it; the others are in mpishard.tensor.spec

    device_mesh = property(lambda self: self.mesh, doc="The mesh.")
    _local_tensor = property(lambda self: self.block, doc="The block.")
    _spec: Any
    offsets: Callable[..., Any]

    # -- autograd lives on the local block

    is_leaf = property(lambda self: root_of(self)[0].is_leaf, doc="As of any tensor.")  # type: ignore[assignment]
    retains_grad = property(lambda self: root_of(self)[0].retains_grad, doc="As of any tensor.")  # type: ignore[assignment]
    _version = property(lambda self: self.block._version, doc="As of any tensor.")  # type: ignore[assignment]

    @property
    def output_nr(self) -> NoReturn:  # type: ignore[override]
        """Refuse: with respect to an edge of the graph autograd gives this rank's block. Not collective."""
        raise UnsupportedOperationError(
            "the gradient edge (get_gradient_edge, output_nr) of a ShardTensor",
            expected="tensors, whose gradients are laid out as they are",
            got=outline(self),
            fix="hand the ShardTensor itself over: torch.autograd.grad(y, x)",
        )

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Node of the local block; while torch.nn registers a module's backward hooks, one that gives them shards."""
        node = root_of(self)[0].grad_fn
        hooked = self._hook_node
        return hooked if hooked is not None and hooked.node is node else node

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the local block takes part in autograd."""
        return root_of(self)[0].requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property  # type: ignore[override]
    def grad(self) -> ShardTensor | None:  # type: ignore[override]
        """Gradient, in the layout of the tensor (Replicate where that is Partial).

        What is assigned is brought there: collective where it lies differently. A plain tensor counts as whole.
        """
        block, layout = root_of(self)
        return None if block.grad is None else global_cotangent(block.grad, layout, self.mesh)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        layout = without_partial(self.sharding)
        root_of(self)[0].grad = None if value is None else gradient_block(value, layout, self)

    @property  # type: ignore[override]
    def data(self) -> ShardTensor:  # type: ignore[override]
        """The same cells outside autograd.

        What is assigned is brought to where this tensor lies, if it has the same shape: collective then. So is a plain
        tensor of that shape and dtype, which every rank has: each takes its own cells.
        """
        return self._twin(data_of(self), ("detach",))

    @data.setter
    def data(self, value: Tensor) -> None:
        if type(value) is Tensor and (value.shape, value.dtype) == (self.shape, self.dtype):
            whole = layout_of(self.mesh.shape, [Replicate()] * self.mesh.ndim, self.sharding.shape)
            value = wrap(value, whole, self.mesh)
        if not isinstance(value, ShardTensor):
            raise UnsupportedOperationError(
                "ShardTensor.data: assignment of another kind of tensor",
                expected=f"a ShardTensor, or a plain tensor of this shape and {self.dtype}",
                got=f"{type(value).__name__}{[*getattr(value, 'shape', ())]} of {getattr(value, 'dtype', 'no dtype')}",
                fix="shard it first, with distribute_tensor or ShardTensor.from_local; or convert it, with .to",
            )
        if value.mesh is not self.mesh:  # where neither its gradient is, nor an optimizer's state
            raise two_meshes(self.mesh, value.mesh)
        is_other_kind = (value.dtype, value.device) != (self.dtype, self.device)
        if value.sharding != self.sharding and value.sharding.shape == self.sharding.shape:
            # a parameter stays where its gradient and an optimizer's state are
            with torch.no_grad():
                self.block.data = redistribute(value.block, self.mesh, value.sharding, self.sharding)
            value = wrap(self.block, self.sharding, self.mesh)
        else:
            is_copy = value._gathered_view and value._origin is None  # of the values, to be written into
            self.block.data = value.block.clone() if is_copy else value.block
            self.sharding = value.sharding
            value = wrap(self.block, self.sharding, self.mesh) if is_copy else value
        # what told of the cells before tells nothing of these
        self._halo, self._origin, self._gathered_view = value._halo, value._origin, value._gathered_view
        self._trail = value._trail
        if is_other_kind:  # torch's part of the wrapper tells it too, to `_foreach_` functions
            torch._C._swap_tensor_impl(self, wrap(self.block, self.sharding, self.mesh))  # type: ignore[attr-defined]
        note_set(self)

    # -- from and to local and whole tensors; the communicating ones are set by mpishard.tensor.convert

    from_local: Callable[..., ShardTensor]
    full_tensor: Callable[..., Tensor]
    redistribute: Callable[..., ShardTensor]
    rebalance: Callable[..., ShardTensor]

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's block: differentiable, no copy.

        Not collective; nor its backward, but for what ``grad_placements`` sums and as the notes say.

        Parameters
        ----------
        grad_placements
            What the cotangent of the block is, one placement per mesh dim: that of the tensor, or ``Partial()`` where
            all ranks hold the same (`Replicate`) and each finds a part of the cotangent. None: as in the notes.

        Raises
        ------
        LayoutError
            ``grad_placements`` do not fit.
        DesyncError
            In the backward pass: cotangents differ that must be the same.

        Notes
        -----
        Adjoint: the cotangent of the block is the block of the cotangent (DTensor's rule). So a loss that a rank
        computes of its blocks counts as one term of a *sum* over the ranks: ``F.mse_loss(model(x).to_local(),
        y.to_local()).backward()`` has as many times the gradient of the mean as there are blocks. Give the loss the
        ShardTensors, ``F.mse_loss(model(x), y)``, and the mean is that of all cells, also where blocks are uneven.

        Of a `Replicate` dim every rank holds the whole cotangent, the same on all. In a rule (`implements`), and of
        what was computed, it is a sum over the ranks where the result becomes a ShardTensor that is sharded there, or
        is reduced with `all_reduce` and its kin; else it is compared in the backward pass. So is that of a `Partial`
        dim, over which each rank has a term of its own: it is the cotangent of the sum.
        """
        local = self.block
        if not local.requires_grad or not torch.is_grad_enabled():
            return local
        held = without_partial(self.sharding)
        if grad_placements is not None:
            given = given_layout("to_local", held, as_placements(grad_placements, self.mesh.ndim, self.ndim))
            return taken(local, self.mesh, held, held, given)
        if len(self.sharding.sharded_mesh_dims) == self.mesh.ndim or not (in_rule() or local.grad_fn is not None):
            return local
        return taken(local, self.mesh, held, held, terms=self.sharding.partial_dims)

    # -- Python's protocols

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.block.requires_grad else ""
        if self.block.grad_fn is not None:
            grad = f", grad_fn=<{type(self.block.grad_fn).__name__}>"
        return (
            f"ShardTensor(shape={tuple(self.sharding.shape)}, placements={list(self.sharding.placements)}, "
            f"local_shape={tuple(self.block.shape)}, dtype={self.block.dtype}, mesh={self.mesh}{grad})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else format(repr(self), spec)

    def __len__(self) -> int:
        if self.ndim == 0:
            # torch.tensor asks, too: it takes what has a __getitem__ in Python for a list
            raise TypeError("len() of a 0-d tensor (torch.tensor takes numbers: torch.tensor([float(x)]))")
        return self.sharding.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        block = self.block
        if getattr(self, "_is_param", False) and id(block) not in memo:  # torch copies a parameter without its gradient
            memo[id(block)] = block.detach().clone().requires_grad_(block.requires_grad)
        out = wrap(copy.deepcopy(block, memo), self.sharding, self.mesh)
        out._trail = self._trail  # torch copies what a view leaves out, too
        memo[id(self)] = self._as_kept(out)
        return out

    def __copy__(self) -> ShardTensor:
        return self._as_kept(self._twin(self.block))

    def _as_kept(self, out: ShardTensor) -> ShardTensor:
        """Return a copy as what a module keeps this tensor: as a parameter or a buffer, if it is one."""
        for name in ("_is_param", "_is_buffer", "persistent"):  # torch's own
            if hasattr(self, name):
                setattr(out, name, getattr(self, name))
        return out

    def _twin(self, local: Tensor, view: tuple[Any, ...] = ()) -> ShardTensor:
        """Return another tensor of the same cells; a Partial is for reading: writing sums it, here alone."""
        out = wrap(local, self.sharding, self.mesh)
        if self._gathered_view or self.sharding.partial_dims:
            out._gathered_view = True
            out._origin = (self, view) if self._gathered_view else None
        out._trail = self._trail
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.sharding.is_replicated:  # the plain tensor that every rank has, for files and processes without a mesh
            whole = self.block.detach()
            whole = nn.Parameter(whole) if getattr(self, "_is_param", False) else whole
            return whole.requires_grad_(self.requires_grad).__reduce_ex__(protocol)
        text = described(
            "a ShardTensor cannot be pickled",
            expected="data of one process",
            got=outline(self),
            fix="pickle x.to_local() and x.placements, x.full_tensor(), or write it with mpishard.io; give a stream of "
            "samples to mpishard.io.Loader",
        )
        if multiprocessing.parent_process() is not None:
            return _refuse, (text,)  # a queue drops what fails here, and its reader would wait for ever
        return _refuse(text)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_all("numpy.asarray").__array__(*args, **kwargs)

    def __array_wrap__(self, array: Any, *_: Any) -> Tensor:
        """Return what a function of numpy made of this rank's whole tensor, a plain tensor. Not collective."""
        return torch.as_tensor(array, device="cpu")

    def numpy(self, *, force: bool = False) -> Any:
        """Return what every rank holds whole as an array; refused otherwise. Not collective.

        Parameters
        ----------
        force
            As of `torch.Tensor.numpy`: a copy, where the tensor requires a gradient or lies on a GPU.

        Returns
        -------
        numpy.ndarray
            It shares the tensor's memory where torch's does.

        Raises
        ------
        UnsupportedOperationError
            Ranks hold different parts.
        """
        return self._of_all("numpy").numpy(force=force)

    def _of_all(self, name: str) -> Tensor:
        if not self.sharding.is_replicated:
            raise _whole_needed(name, self)
        return self.block

    def as_subclass(self, cls: type) -> NoReturn:
        """Refuse: its cells would have no mesh. Not collective."""
        raise UnsupportedOperationError(
            f"{cls.__name__} of a ShardTensor (as_subclass)",
            expected="a plain tensor: a tensor is of one subclass",
            got=outline(self),
            fix="give it x.full_tensor(), or x.to_local() where it needs no more; MONAI's transforms take tensors as "
            "they are after monai.data.set_track_meta(False)",
        )

    def set_(self, source: Any = None, *region: Any) -> ShardTensor:
        """Take the cells of another tensor for its own, as torch.nn.utils.parametrize has it do.

        Collective where that is a ShardTensor that is laid out in another way.
        """
        if region or not isinstance(source, Tensor):
            raise UnsupportedOperationError(
                "Tensor.set_ of a ShardTensor",
                expected="one tensor, whose cells it takes",
                got=f"{type(source).__name__}{' and numbers' if region else ''}",
                fix="x.copy_(values)",
            )
        self.data = source
        return self

    def data_ptr(self) -> NoReturn:
        """Refuse: the data is not on this rank alone. Not collective."""
        raise _whole_needed("data_ptr", self)


def _refuse(text: str) -> NoReturn:
    raise UnsupportedOperationError(text)


def wrap(local: Tensor, layout: Layout, mesh: CartMesh) -> ShardTensor:
    """Return a ShardTensor of a block that is known to fit its layout. Not collective.

    For sharding rules; users call `ShardTensor.from_local`, which checks.
    """
    # by position: the same call with keywords takes a third longer
    self: ShardTensor = _subclass(ShardTensor, layout.shape, None, None, None, local.dtype, _strided, local.device)
    self.block = local
    self.sharding = layout
    self.mesh = mesh
    return self


class _Pending(ShardTensor):
    """A ShardTensor whose block is under way; it becomes an ordinary one where somebody asks for the block."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        settle = self.__dict__.get("_settle") if name == "block" else None
        if settle is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        block = settle(True)
        self.__dict__.pop("_settle", None)
        self.__class__ = ShardTensor  # type: ignore[assignment]
        self.block = block
        return block


# what errors and programs read
_Pending.__name__ = _Pending.__qualname__ = ShardTensor.__name__


def wrap_pending(
    settle: Callable[[bool], Tensor], like: Tensor, dtype: torch.dtype, layout: Layout, mesh: CartMesh
) -> ShardTensor:
    """Return a ShardTensor whose block, on the device of ``like``, ``settle`` returns when it is first used.

    Not collective; nor may ``settle`` be. It is told whether to wait for the value: backward needs the graph alone.
    """
    self: ShardTensor = _subclass(_Pending, layout.shape, None, None, None, dtype, _strided, like.device)
    self.__dict__["_settle"] = settle
    self.sharding = layout
    self.mesh = mesh
    return self


def end_of_graph(x: ShardTensor) -> Tensor:
    """Return what backward starts from: the block, or one like it whose value is still under way. Not collective."""
    settle = x.__dict__.get("_settle")
    return x.block if settle is None else settle(False)


def root_of(x: ShardTensor) -> tuple[Tensor, Layout]:
    """Return the block that autograd knows ``x`` by, and its layout. Not collective."""
    if x._root is not None:
        block, layout, version = x._root
        # what is written into is another value; a leaf stays one
        if block.is_leaf or x.block._version == version:
            return block, layout
    return x.block, x.sharding


def rebind(x: ShardTensor, local: Tensor, layout: Layout) -> None:
    """Hold the cells of ``x`` in another block, made from its own by recorded operations. Not collective."""
    block, before = root_of(x)
    x._root = (block, before, local._version) if block.requires_grad else None
    x.block, x.sharding, x._halo = local, layout, None


def global_cotangent(g: Tensor, layout: Layout, mesh: CartMesh) -> ShardTensor:
    """Return the cotangent of a block of ``layout`` as users see it. Not collective.

    Notes
    -----
    Every rank uses the cotangent of a Partial with its own part: as one tensor, it counts on coordinate 0.
    """
    if layout.partial_dims:
        g = apply(keep_step(mesh, layout.partial_dims).adjoint, g)
    return wrap(g, without_partial(layout), mesh)


def _whole_needed(name: str, x: ShardTensor) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{name} of a ShardTensor",
        expected="a tensor that every rank holds whole",
        got=outline(x),
        fix="call it on x.to_local() (this rank's block) or x.full_tensor() (gathers on every rank)",
    )
