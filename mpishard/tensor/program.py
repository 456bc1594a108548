"""A graph of torch functions on ShardTensors as a compiled program of this rank's blocks.

The rules run once in the hands of torch's AOTAutograd, forward and backward: they compute with blocks, which have no
data then, and what communicates becomes ``mpishard::communicate`` (`mpishard.comm.traced`). Before that the graph is
rehearsed: it runs once as ever, forward and backward, on copies of its inputs, so that all ranks make all plans
together, and the trace communicates nothing.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from mpishard.autograd.graph import unpacked
from mpishard.autograd.replica import meet
from mpishard.autograd.use import use_together
from mpishard.comm import guard, traced
from mpishard.comm.agreement import most_of
from mpishard.comm.mesh import CartMesh
from mpishard.comm.traced import Recording, recorded
from mpishard.errors import MpishardError, UnsupportedOperationError, text_of
from mpishard.layout import Layout
from mpishard.tensor.function import block_of
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import Trail, laid, strides_of

# `_gathered_view` and `_trail` of a ShardTensor
Flags = tuple[bool, Trail | None]
Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Sequence[Any]]]


class CannotCompileError(UnsupportedOperationError):
    """Why a call runs eagerly."""


class SharedMemoryError(CannotCompileError):
    """Why calls with these inputs, which lie in the same memory, run eagerly; others may compile."""


class _Output(NamedTuple):
    """What becomes of an output of the program: a ShardTensor of ``layout`` (else as it is), or an input again."""

    layout: Layout | None
    is_input: int | None
    flags: Flags


def key_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a program depends on beside shapes and dtypes. Not collective."""
    own = ((x.sharding, id(x.mesh), *_flags(x)) if isinstance(x, ShardTensor) else None for x in inputs)
    return (*own, _shared(inputs))


def _shared(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return for each input which one before it lies in the same memory, itself where none does. Not collective.

    torch's compilers look at that once, with the first inputs, and leave it to Dynamo to look again: which has seen
    tensors without memory.
    """
    first: dict[int, int] = {}
    found = []
    for i, x in enumerate(map(block_of, inputs)):
        if type(x) in (Tensor, Parameter) and x.layout is torch.strided:
            storage = x.untyped_storage()
            # of an empty block there is no address
            found.append(first.setdefault(storage.data_ptr() or storage._cdata, i))
        else:
            found.append(i)
    return tuple(found)


def why_not(inputs: Sequence[Any], mesh: CartMesh) -> str:
    """Tell why a program of these inputs is not compiled, or nothing. Not collective."""
    for x in inputs:
        if isinstance(x, ShardTensor):
            if x.mesh is not mesh:
                return "ShardTensors of several meshes"
            if x._halo is not None:
                return "a tensor with its halo beside it (of a simulation, or with ghost=)"
            if x._root is not None:
                return "a tensor that was written into"
        elif isinstance(x, Tensor) and hasattr(x, "_gathered"):
            return "sharded parameters"
    return ""


class Program:
    """A compiled graph for one layout of its inputs. Made by all ranks of the mesh together.

    Parameters
    ----------
    graph
        Calls torch functions, on ShardTensors or plain tensors.
    backend
        Of torch's compilers: takes a graph of plain tensors and example inputs.
    inputs
        Of the first call.
    mesh
        The mesh of all ShardTensors.

    Raises
    ------
    CannotCompileError
        On every rank.
    """

    def __init__(self, graph: GraphModule, backend: Backend, inputs: Sequence[Any], mesh: CartMesh) -> None:
        self.mesh = mesh
        self._graph = graph
        self._given = [(x.sharding, _flags(x)) if isinstance(x, ShardTensor) else None for x in inputs]
        self._outputs: list[_Output] = []
        self._mutates: list[bool] = []
        comm = mesh.all_ranks.comm
        # what one rank alone rehearsed, as backward, would meet other calls of the others
        compare(mesh, f"a graph of {_outline(graph, inputs)}")
        rehearsal = Recording(tracing=False)
        _agreed(comm, lambda: self._rehearse(rehearsal, inputs))
        shared = _shared(inputs)
        groups = {first for i, first in enumerate(shared) if i != first}
        if most_of(mesh, any(m and first in groups for m, first in zip(self._mutates, shared)), "compile"):
            raise SharedMemoryError("an input is written into that lies in the memory of another one")
        compare(mesh, f"{rehearsal.names}")
        self._uses = rehearsal.uses
        self._trace = Recording(tracing=True)
        self._compiled: Callable[..., Any]
        _agreed(comm, lambda: self._compile(backend, inputs))
        weakref.finalize(self, self._trace.forget)

    # -- rehearsal

    def _rehearse(self, recording: Recording, inputs: Sequence[Any]) -> None:
        grad = torch.is_grad_enabled()
        generator = torch.get_rng_state()
        try:
            # in inference mode nobody counts versions; what surrounds the call, a checkpoint, is not to see the copies
            with torch.inference_mode(False), torch.set_grad_enabled(grad), unpacked(), recorded(recording):
                copies = [_copy(x) for x in inputs]
                blocks = [block_of(x) for x in copies]
                versions = [x._version if isinstance(x, Tensor) else 0 for x in blocks]
                recording.restart(blocks)
                outputs = self._graph(*copies)
                self._note(copies, blocks, outputs)
                self._mutates = [isinstance(x, Tensor) and x._version != v for x, v in zip(blocks, versions)]
                roots = [y for y in map(block_of, outputs) if isinstance(y, Tensor) and y.requires_grad]
                leaves = [x for x in blocks if isinstance(x, Tensor) and x.requires_grad]
                if roots and leaves and torch.is_grad_enabled():
                    torch.autograd.grad(roots, leaves, [torch.zeros_like(y) for y in roots], allow_unused=True)
        finally:
            torch.set_rng_state(generator)

    def _note(self, inputs: Sequence[Any], blocks: Sequence[Any], outputs: Sequence[Any]) -> None:
        for x, block, given in zip(inputs, blocks, self._given):
            if given is not None and (x.block is not block or x.sharding is not given[0]):
                raise CannotCompileError("an input that is laid out anew where it is written into")
        for y in outputs:
            if isinstance(y, ShardTensor):
                again = next((i for i, x in enumerate(inputs) if x is y), None)
                self._outputs.append(_Output(y.sharding, again, _flags(y)))
            else:
                self._outputs.append(_Output(None, None, (False, None)))

    # -- trace

    def _compile(self, backend: Backend, inputs: Sequence[Any]) -> None:
        import torch._functorch.config as functorch_config
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode

        blocks = [_evaluated(block_of(x)) for x in inputs]
        graph = Graph()
        arguments = [graph.placeholder(f"block_{i}") for i in range(len(blocks))]
        result = graph.call_function(self._of_blocks, tuple(arguments))
        graph.output(tuple(graph.call_function(operator.getitem, (result, i)) for i in range(len(self._outputs))))
        # plans hold tensors: these become constants
        context = TracingContext(FakeTensorMode(allow_non_fake_inputs=True))
        # torch's cache of whole programs would know this one by its name alone
        changes = {"enable_autograd_cache": False}
        # else backward is compiled when it is run, and where that fails on one rank nobody tells the others
        ahead = hasattr(functorch_config, "force_non_lazy_backward_lowering")
        if ahead:
            # it cannot know yet whether the graph is retained, so what is saved is not its to write into
            changes |= {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
        with (
            warnings.catch_warnings(),
            functorch_config.patch(changes),
            unpacked(),
            tracing(context),
            recorded(self._trace),
        ):
            # compilers call what torch has deprecated itself, and ask tensors for gradients that they may not have
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            self._compiled = backend(GraphModule({}, graph), blocks)
            if ahead and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []  # torch takes None for some
        # only now: a tensor of the first call need not stay
        self._strides = [x.stride() if isinstance(x, Tensor) else None for x in blocks]

    def _of_blocks(self, *blocks: Any) -> list[Any]:
        self._trace.restart(blocks)
        by: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
        for index, mesh_dims in self._uses:
            # a back-end that runs the graph as it is computes with blocks as ever
            if traced.recording is not None and blocks[index].requires_grad:
                by.setdefault((mesh_dims, blocks[index].dtype), []).append(index)
        for (mesh_dims, _), indices in by.items():
            aliases = use_together([blocks[i] for i in indices], self.mesh, mesh_dims)
            self._trace.aliases.update({(i, mesh_dims): alias for i, alias in zip(indices, aliases)})
        shards = [
            b if given is None else _flagged(wrap(b, given[0], self.mesh), given[1])
            for b, given in zip(blocks, self._given)
        ]
        return [block_of(y) for y in self._graph(*shards)]

    # -- run

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on this rank's blocks. Collective as what it does is."""
        for x in inputs:
            meet(x, self.mesh)
        blocks, copied = [block_of(x) for x in inputs], []
        for i, (x, strides) in enumerate(zip(blocks, self._strides)):
            if strides is None:
                continue
            # as the one that it was compiled for; ranks need not agree on that
            y = _evaluated(x)
            if y.stride() != strides and y.numel():
                y = _laid_out(y, strides)
            if y is not x:
                blocks[i] = y
                if self._mutates[i]:
                    copied.append((x, y))
        results = self._compiled(*blocks)
        for x, y in copied:
            # as the program wrote: into the history of a tensor too, but not of a leaf, which has none
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (x.is_leaf and x.requires_grad)):
                x.copy_(y)
        out: list[Any] = []
        for y, (layout, again, flags) in zip(results, self._outputs):
            if again is not None:
                out.append(inputs[again])
            elif layout is not None:
                out.append(_flagged(wrap(y, layout, self.mesh), flags))
            else:
                out.append(y)
        return out


def compare(mesh: CartMesh, told: str) -> None:
    """Raise where the ranks tell of different programs. Collective."""
    try:
        guard.agree(mesh.all_ranks.comm, None, f"compile {told}")
    except MpishardError:
        raise CannotCompileError("the ranks' programs differ") from None


def _outline(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return what all ranks' graphs have in common: not their numbers, of which some are a rank's own."""

    def kind(argument: Any) -> Any:
        return argument if isinstance(argument, (bool, str, torch.dtype)) else type(argument).__name__

    nodes = [
        (node.op, getattr(node.target, "__name__", node.target), *map(kind, tree_leaves((node.args, node.kwargs))))
        for part in graph.modules()
        if isinstance(part, GraphModule)
        for node in part.graph.nodes
    ]
    needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    return f"{nodes}, {needs_grad}, {torch.is_grad_enabled()}, {torch.is_inference_mode_enabled()}"


def _agreed(comm: Any, act: Callable[[], None]) -> None:
    """Do something that may fail on some ranks; then it fails on all. Collective."""
    error: Exception | None = None
    try:
        act()
    except Exception as e:  # noqa: BLE001  # whatever a compiler raises
        error = e
    reason = "" if error is None else f"{type(error).__name__}: {next(iter(text_of(error).strip().splitlines()), '')}"
    try:
        guard.agree(comm, None if error is None else CannotCompileError(reason))
    except MpishardError as agreed:
        raise CannotCompileError(str(agreed)) from error


def _flags(x: ShardTensor) -> Flags:
    # of x[i] the same for every i
    return x._gathered_view, None if x._trail is None else laid(x, x.sharding.shape, strides_of(x))


def _flagged(x: ShardTensor, flags: Flags) -> ShardTensor:
    x._gathered_view, x._trail = flags
    return x


def _copy(x: Any) -> Any:
    """Return a leaf of the same values: what the rehearsal writes into is not the caller's."""
    if isinstance(x, ShardTensor):
        return _flagged(wrap(_copy(x.block), x.sharding, x.mesh), _flags(x))
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _evaluated(x: Any) -> Any:
    """Return a tensor whose conjugate or negative is not left to be taken: compilers read what is in memory."""
    return x.resolve_conj().resolve_neg() if isinstance(x, Tensor) and (x.is_conj() or x.is_neg()) else x


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy with these strides, differentiably."""
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    dense = x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
    if dense.stride() == strides:
        return dense
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
