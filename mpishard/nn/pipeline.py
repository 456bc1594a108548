"""A model cut into stages on different ranks, which work on different parts of a batch at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import nullcontext
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mpishard.autograd.argument import require, require_mesh
from mpishard.autograd.bucket import finish_withheld
from mpishard.autograd.linear import node_of
from mpishard.autograd.withhold import no_sync
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.lifetime import made
from mpishard.comm.memory.buffer import uncopied, unfit
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.comm.point_to_point.send_recv import send_recv
from mpishard.comm.tag import hashed
from mpishard.errors import LayoutError, MeshError, MpishardError, UnsupportedOperationError
from mpishard.layout import Layout
from mpishard.nn.microbatch import Cut, cut_of, joined, parts_of, rows_of
from mpishard.nn.module import distribute_module
from mpishard.nn.user_call import UserCalls, left_halfway
from mpishard.tensor.function import block_of
from mpishard.tensor.gradient import autograd_backward
from mpishard.tensor.operand import resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# of losses
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Stage = nn.Module | Callable[[], nn.Module]


class _Form(NamedTuple):
    """What the next stage must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None


# of a stage, or None where it or one before it has failed
_Inputs = tuple[Any, ...] | None


class Pipeline(nn.Module):
    """Stages of a model along a mesh dim, each on its own ranks; micro-batches follow one another through them.

    Parameters
    ----------
    stages
        One module per coordinate of the mesh dim, or functions that make them, of which a rank calls its own alone.
        Each takes what the one before returns: a tensor, or a tuple of tensors.
    mesh
        The mesh.
    mesh_dim
        Mesh dim of the stages, by name or index. Over the others each stage is distributed as by
        `distribute_module`; what goes from stage to stage is sharded as the stage left it.
    microbatches
        Into how many parts a batch is cut along its first dim. Every rank cuts what it holds of a batch that is
        sharded.
    **options
        Of `distribute_module`, such as ``shard_parameters="data"``.

    Attributes
    ----------
    stage : torch.nn.Module
        That of this rank: the parameters to optimise and to save.
    index, count : int
        Which stage that is, and of how many.
    pipeline_mesh : CartMesh
        The ranks of all stages: the mesh that was given. A checkpoint of the pipeline is saved on it.
    stage_mesh : CartMesh
        The ranks of this stage: ``mesh``, or where that is None a mesh of this rank alone.
    is_first, is_last : bool
        Whether it takes the batch, and whether it makes the loss.
    mesh : CartMesh or None
        The mesh dims beside that of the stages, on which batches and targets live; None where there are none: then
        they are plain tensors.

    Raises
    ------
    MeshError
        There is no such mesh dim.
    LayoutError
        There are not as many stages as coordinates, or no micro-batch; a stage is no module.
    MpishardError
        On every rank: what making a stage raised, or its text where that is no error of this package.

    Examples
    --------
    >>> mesh = ms.init_mesh((2, 2), ("stage", "y"))
    >>> pipe = ms.Pipeline([encoder, decoder], mesh, "stage", microbatches=4)
    >>> optimizer = torch.optim.AdamW(pipe.parameters())
    >>> x = ms.scatter_tensor(full, 0, pipe.mesh, [ms.Shard(2)])
    >>> loss = pipe.step(x, target, F.mse_loss)
    >>> optimizer.step()
    """

    def __init__(
        self, stages: Sequence[Stage], mesh: CartMesh, mesh_dim: str | int, microbatches: int = 1, **options: Any
    ) -> None:
        super().__init__()
        require_mesh("Pipeline", mesh)
        self._comm = mesh.all_ranks.comm
        error: Exception | None = None
        signature, m = "Pipeline", 0
        try:
            m = mesh.mesh_dim(mesh_dim)
            require("Pipeline", "stages", stages, Sized, "give a sequence of modules, or of functions that return them")
            if len(stages) != mesh.shape[m] or not isinstance(microbatches, Integral) or microbatches < 1:
                raise LayoutError(
                    "Pipeline: stages or micro-batches do not fit",
                    expected=f"{mesh.shape[m]} stages, one per coordinate of {mesh.mesh_dim_names[m]!r}, and at least "
                    "one micro-batch",
                    got=f"{len(stages)} stages, microbatches={microbatches}",
                    fix="join or cut stages, or change the extent of the mesh dim",
                )
            signature = f"Pipeline {len(stages)} {m} {microbatches}"
        except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
            error = e
        mesh.agree(self._comm, error, signature)
        self._group, self.index, self.count = mesh.group((m,)), mesh.coords[m], len(stages)
        self._microbatches = microbatches
        others = tuple(d for d in range(mesh.ndim) if d != m)
        self.pipeline_mesh = mesh
        self.mesh = mesh[others] if others else None
        self.stage_mesh = _alone(self._comm, mesh.device) if self.mesh is None else self.mesh
        self.is_first, self.is_last = self.index == 0, self.index == self.count - 1
        self._alone = self.stage_mesh.size == 1
        with UserCalls(self._group, alone=self._alone) as run:
            stage = run(lambda: self._made(stages[self.index], mesh.device), ())
            run.end(self._comm, "Pipeline: a stage is made")
            beside = self.mesh
            if beside is not None:
                stage = run(lambda: distribute_module(stage, beside, **options), ())
                run.end(self._comm, "Pipeline: a stage is distributed")
        self.stage = stage
        self._device = mesh.device

    @staticmethod
    def _made(stage: Stage, device: torch.device) -> nn.Module:
        made = stage() if callable(stage) and not isinstance(stage, nn.Module) else stage
        require("Pipeline", "stages", made, nn.Module, "give modules, or functions that return them")
        return made.to(device)

    def forward(self, x: Any = None) -> Any:
        """Return the output of the last stage, on its ranks; None elsewhere. Collective.

        Parameters
        ----------
        x
            The batch, on the ranks of the first stage; ignored elsewhere. Without gradients: `step` finds these.
        """
        parts, cut = self._cut("forward", x)
        out: list[Any] = []
        with torch.no_grad(), UserCalls(self._group, alone=self._alone) as run:
            run.travels = self.count > 1
            for part in parts:
                inputs = self._taken(part)
                if self.is_last:
                    out.append(run(self.stage, inputs))
                else:
                    self._send_forward(run(lambda *given: _outputs(self.stage(*given)), inputs))
            whole = run(joined, (out, cut)) if self.is_last else None
            run.end(self._comm)
        return whole

    def step(self, x: Any, target: Any, loss_fn: Callable[[Any, Any], Tensor], *, reduction: str = "mean") -> Tensor:
        """Run a batch forward and backward, adding to the gradients of all stages. Collective.

        The schedule is one-forward-one-backward: a stage holds the activations of at most as many micro-batches as
        there are stages after it, and its own.

        Parameters
        ----------
        x
            The batch, on the ranks of the first stage; ignored elsewhere. Where it requires a gradient, it, or what it
            was made of, gets it.
        target
            What ``loss_fn`` compares with, on the ranks of the last stage. Laid out as ``x`` along the samples, it is
            cut where it is; else its samples are found, and moved. Ignored elsewhere.
        loss_fn
            Called with an output and its part of the target on the last stage.
        reduction
            What the loss of a part is: a ``"mean"`` over its samples, so that parts count by their number of samples,
            or a ``"sum"``. A mean over something else (targets that ``ignore_index`` leaves) is neither: sum, and
            divide by the count of the batch in ``loss_fn``.

        Returns
        -------
        torch.Tensor
            The loss, a plain scalar on every rank, of the dtype that ``loss_fn`` returns.

        Raises
        ------
        LayoutError
            On every rank: there is no batch or no target where it belongs, fewer samples than micro-batches, or an
            unknown reduction.
        MeshError
            On every rank: batch or target is on another mesh than ``self.mesh``.
        MpishardError
            On every rank: what a stage or ``loss_fn`` raised, or its text where that is no error of this package, when
            all stages have come to the end of the step. What gradients have got by then is undefined. One that some
            ranks of a stage alone raise, while the others wait for them, is printed, and ends the job past
            ``MPISHARD_TIMEOUT``.

        Notes
        -----
        The result is that of one process on the whole batch, but where a stage mixes samples (batch norm in training):
        then it is that of one process which accumulates over the same micro-batches.
        """
        with UserCalls(self._group, alone=self._alone) as run:
            return self._stepped(run, x, target, loss_fn, reduction)

    def _stepped(self, run: UserCalls, x: Any, target: Any, loss_fn: Callable[..., Tensor], reduction: str) -> Tensor:
        batch = x
        if self.is_first and isinstance(x, Tensor) and x.requires_grad and not x.is_leaf:
            x = x.detach().requires_grad_()  # what made it is differentiated once, not by each part
        parts, cut = self._cut("step", x, target, reduction)
        run.travels = self.count > 1
        count = len(parts)
        ahead = min(self.count - 1 - self.index, count)
        flying: deque[tuple[_Inputs, _Inputs]] = deque()
        targets: Any = run(parts_of, (target, cut)) if self.is_last else None
        # the loss, and which dtype it has
        total = torch.zeros(2, dtype=torch.float64, device=self._device)

        def staged(i: int, *inputs: Any) -> tuple[Any, ...]:
            returned = self.stage(*(inputs if self.is_first else map(_entered, inputs)))
            outputs = _tuple(returned) if self.is_last else _outputs(returned)
            if self.is_last:
                weight = targets[i].shape[0] / target.shape[0] if reduction == "mean" else 1.0
                loss = loss_fn(outputs[0] if len(outputs) == 1 else outputs, targets[i]) * weight
                own = loss.detach()
                total[0] += own.full_tensor() if isinstance(own, ShardTensor) else own
                total[1] = _DTYPES.index(own.dtype)
                outputs = (loss,)
            return tuple(resolved(y) if isinstance(y, ShardTensor) else y for y in outputs)

        def forward(i: int, inputs: _Inputs) -> _Inputs:
            outputs = run(partial(staged, i), inputs)
            flying.append((inputs, outputs))
            return outputs

        def backward(cotangents: Sequence[Tensor | None], is_final: bool) -> list[Tensor]:
            inputs, outputs = flying.popleft()
            wanted = [(y, g) for y, g in zip(outputs or (), cotangents) if y.requires_grad]
            with nullcontext() if is_final else no_sync():
                if wanted:
                    ys, gs = [y for y, _ in wanted], [_as(y, g) for y, g in wanted]
                    run(autograd_backward, (ys, gs))
                elif is_final and run.error is None:
                    finish_withheld()  # which a last pass does
            return [] if self.is_first or inputs is None else [_gradient(x) for x in inputs]

        for i in range(ahead):
            self._send_forward(forward(i, self._taken(parts[i])))
        inputs = self._taken(parts[ahead]) if ahead < count else None
        for i in range(ahead, count):
            outputs = forward(i, inputs)
            got: Sequence[Tensor | None] = [None]
            if not self.is_last:
                got = self._send_forward(outputs, receive=flying[0][1])
            found = backward(got, i - ahead == count - 1)
            more = i + 1 < count
            inputs = self._taken(parts[i + 1] if more else None, found, receive=more)
        for i in range(ahead):
            found = backward(self._exchanged(+1, [], flying[0][1] or ()), i == ahead - 1)
            self._taken(None, found, receive=False)
        if x is not batch and x.grad is not None:
            run(autograd_backward, ([batch], [x.grad]))
        run.end(self._comm)
        loss, dtype = blocking.broadcast(total, self._group, self.count - 1)
        return loss.to(_DTYPES[int(dtype)])

    # -- messages

    def _send_forward(self, outputs: _Inputs, receive: _Inputs = None) -> list[Tensor]:
        """Send to the next stage; return the cotangents of ``receive``, which come from there."""
        forms = None if outputs is None else [_form_of(y) for y in outputs]
        comm = self._group.comm
        with guard.waiting("Pipeline", [self.index + 1], comm):
            comm.send(forms, self.index + 1, hashed("Pipeline forms"))
        return self._exchanged(+1, [block_of(y).detach() for y in outputs or ()], receive or ())

    def _taken(self, part: Any, cotangents: Sequence[Tensor] = (), receive: bool = True) -> _Inputs:
        """Return the inputs of a forward, from the batch or the stage before, which gets ``cotangents``."""
        if self.is_first:
            return None if part is None else _tuple(part)
        forms: list[_Form] | None = None
        comm = self._group.comm
        if receive:
            with guard.waiting("Pipeline", [self.index - 1], comm):
                forms = comm.recv(None, self.index - 1, hashed("Pipeline forms"))
        came = self._exchanged(-1, cotangents, forms or ())
        return None if forms is None else tuple(self._input(t, form) for t, form in zip(came, forms))

    def _input(self, block: Tensor, form: _Form) -> Any:
        block = block.requires_grad_(form.requires_grad and torch.is_grad_enabled())
        if form.layout is None:
            return block
        assert self.mesh is not None
        return wrap(block, form.layout, self.mesh)

    def _exchanged(self, way: int, sends: Sequence[Tensor], like: Sequence[Any]) -> list[Tensor]:
        """Send blocks to a neighbour, and receive from it blocks of the shapes and dtypes of ``like``."""
        peer, came = self.index + way, []
        for i in range(max(len(sends), len(like))):
            out = sends[i] if i < len(sends) else None
            into = like[i] if i < len(like) else None
            if out is not None and into is not None and out.dtype != _dtype(into):
                came.append(self._one_way(peer, out, into, way))
                continue
            x = torch.empty(0, dtype=_dtype(into), device=self._device) if out is None else out
            dest, source = None if out is None else peer, None if into is None else peer
            y = send_recv(
                x, self._group, dest, source, () if into is None else _local_shape(into, self.mesh), "Pipeline"
            )
            if into is not None:
                came.append(y)
        return came

    def _one_way(self, peer: int, out: Tensor, into: Any, way: int) -> Tensor:
        """Exchange blocks of different dtypes: that which goes forward first."""

        def send() -> None:
            send_recv(out, self._group, peer, None, (), "Pipeline")

        if way > 0:
            send()
        x = torch.empty(0, dtype=_dtype(into), device=self._device)
        y = send_recv(x, self._group, None, peer, _local_shape(into, self.mesh), "Pipeline")
        if way < 0:
            send()
        return y

    # -- micro-batches

    def _cut(self, what: str, x: Any, target: Any = None, reduction: str = "mean") -> tuple[list[Any], Cut]:
        """Return the parts of the batch, and how it was cut; agreed on all ranks."""
        error: MpishardError | None = left_halfway(f"Pipeline.{what}", self._group)
        given = {"x": x} if self.is_first else {}
        if self.is_last and what == "step":
            given["target"] = target
        count = self._microbatches
        cuts = [cut_of(v, count) for v in given.values()]
        of_batch = cuts[0] if self.is_first else None
        # the last part has the fewest
        empty = of_batch is not None and of_batch.length(count - 1) < 1
        if empty or any(cut is None or cut.samples < count for cut in cuts):
            error = LayoutError(
                f"Pipeline.{what}: a batch or target that does not fit",
                expected=f"tensors of at least {count} samples, on every rank that holds some: x at "
                "the first stage, target at the last",
                got={k: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for k, v in given.items()},
                fix="give larger batches or fewer micro-batches",
            )
        elsewhere = {k: v.mesh for k, v in given.items() if isinstance(v, ShardTensor) and v.mesh is not self.mesh}
        if elsewhere:
            error = MeshError(
                f"Pipeline.{what}: a batch or target on another mesh",
                expected=f"plain tensors, or ShardTensors on {self.mesh}" if self.mesh is not None else "plain tensors",
                got=elsewhere,
                fix="shard them on pipe.mesh: the mesh dims beside that of the stages",
            )
        if reduction not in ("mean", "sum"):
            error = LayoutError(
                f"Pipeline.{what}: reduction", expected="'mean' or 'sum'", got=repr(reduction), fix="give one of them"
            )
        comm = self._group.comm
        with guard.waiting("Pipeline", (), comm):
            cut: Cut = comm.bcast(of_batch if error is None else None)
        if "target" in given and cut is not None and error is None:
            try:
                rows_of(target, cut)
            except LayoutError as e:
                error = e
        # ranks of a stage that cut differently would wait for each other
        forms = {k: None if cut_of(v, count) is None else _form_of(v) for k, v in given.items()}
        try:
            guard.agree(self.stage_mesh.all_ranks.comm, error, f"Pipeline.{what} of {forms}")
        except MpishardError as e:
            error = e
        guard.agree(self._comm, error, f"Pipeline.{what} {reduction}")
        return parts_of(x, cut) if self.is_first else [None] * count, cut


def _alone(comm: Any, device: torch.device) -> CartMesh:
    """Return a mesh of this rank alone. Collective."""
    own = made("Pipeline", comm, lambda: comm.Split(comm.Get_rank()))
    try:
        return init_mesh((1,), comm=own, device=device)
    finally:
        own.Free()


class _Enter(Function):
    """An input of a stage, which is no leaf then: in one process a stage may write into it."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


_enter = node_of(_Enter)


def _entered(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x
    y = _enter(block_of(x))
    return wrap(y, x.sharding, x.mesh) if isinstance(x, ShardTensor) else y  # type: ignore[no-any-return]


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _outputs(x: Any) -> tuple[Any, ...]:
    """Return what a stage returns for the next one; raise where that cannot be sent."""
    for y in (own := _tuple(x)):
        odd = (
            (unfit(block_of(y)) or uncopied(block_of(y)))
            if isinstance(y, Tensor)
            else (type(y).__name__, "return tensors")
        )
        if odd:
            got, fix = odd
            raise UnsupportedOperationError(
                "Pipeline: a stage returns what cannot be sent to the next one",
                expected="a dense tensor, or a tuple of them",
                got=got,
                fix=fix,
            )
    return own


def _dtype(x: Any) -> torch.dtype:
    return x.dtype  # type: ignore[no-any-return]


def _form_of(x: Tensor) -> _Form:
    layout = x.sharding if isinstance(x, ShardTensor) else None
    return _Form(tuple(x.shape), x.dtype, x.requires_grad, layout)


def _local_shape(x: Any, mesh: CartMesh | None) -> tuple[int, ...]:
    if isinstance(x, Tensor):
        return tuple(block_of(x).shape)
    return x.shape if x.layout is None else x.layout.local_shape(mesh.coords)  # type: ignore[no-any-return, union-attr]


def _as(y: Tensor, g: Tensor | None) -> Tensor | None:
    return wrap(g, y.sharding, y.mesh) if g is not None and isinstance(y, ShardTensor) else g


def _gradient(x: Tensor) -> Tensor:
    block = block_of(x)
    return torch.zeros_like(block) if block.grad is None else block.grad
