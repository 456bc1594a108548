"""Parameters that every rank holds a copy of: whether they and their gradients stay the same on all ranks.

What arrives from data on the mesh is summed over it, and the same everywhere. A gradient that came another way (of
a plain batch, or of data on some dims of the mesh) is the same only where the data are: that is compared, in the
first backward pass and then ever more rarely; under ``MPISHARD_DEBUG=1`` every gradient, and more often. Parameters
of a model that was not distributed are compared when they are first used.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from mpishard.autograd.linear import in_transform
from mpishard.autograd.withhold import held, note_accumulated, replaced
from mpishard.comm import disagreement, guard, traced
from mpishard.comm.collective import blocking
from mpishard.comm.lifetime import family_of, is_freed
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import DesyncError, MpishardError
from mpishard.layout import Layout

# under MPISHARD_DEBUG=1, passes between two comparisons
_PERIOD = 16
# in the place of what was seen of ``.grad``
_SUMMED = (-1,)

_seen_ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _Holders(NamedTuple):
    """The ranks of a mesh, each of which holds a copy.

    Not the mesh: ranks drop one at different times, as garbage is collected, and what they compare must not depend on
    that. Its communicator lives until all of them have dropped it, or freed it together.
    """

    group: Group
    outline: str
    is_planning: bool

    @property
    def alive(self) -> bool:
        return not is_freed(self.group.comm)


class Replica:
    """What is known of a replicated parameter; it is its hook, called where autograd itself added to ``.grad``.

    Attributes
    ----------
    name
        Of the parameter, for errors.
    direct
        Whether every gradient must reach autograd's own accumulation, where others (DDP) wait for it.
    together
        With which others it shares a node, and its place among them; None: it has one of its own.
    beside
        The layout beside which it was last used together with them, what their node returned, and its place.
    hides_sums
        Whether a norm's sums travelled as its gradient was computed, in the last pass that put that off; None before.
    """

    __slots__ = ("_before", "_holders", "_passes", "beside", "direct", "hides_sums", "name", "together")

    def __init__(self, name: str) -> None:
        self.name = name
        self.direct = False
        self.hides_sums: bool | None = None
        self.together: tuple[Together, int] | None = None
        self.beside: tuple[Layout, weakref.ref[Any], int] | None = None
        self._holders: list[_Holders] = []
        self._passes = 0
        # of ``.grad``, where a bucket took a gradient in this pass
        self._before: tuple[int, ...] | None = None

    def __call__(self, param: Tensor) -> None:
        """Have a gradient compared that no bucket summed. Not collective."""
        if held or replaced:
            note_accumulated(param)
        before, self._before = self._before, None
        grad = param.grad
        # torch calls also where nothing arrived
        if before in (_SUMMED, () if grad is None else (id(grad), grad._version)):
            return
        if self.is_due():
            _compare_after_backward(self, param)

    def postpone(self, param: Tensor) -> bool:
        """Note that a bucket takes a gradient, before autograd accumulates the rest of it. Not collective.

        Returns whether a sum over one mesh may leave copies that differ.
        """
        grad = param.grad
        self._before = () if grad is None else (id(grad), grad._version)
        return guard.DEBUG or len(self._holders) > 1

    def summed(self) -> None:
        """Note that autograd is about to accumulate what a bucket summed. Not collective."""
        self._before = _SUMMED

    def begin(self, mesh: CartMesh) -> None:
        """Note that the ranks of ``mesh`` hold copies from now on, and of other meshes none do. Not collective."""
        family = family_of(mesh.comm)
        self._holders = [h for h in self._holders if h.group.comm in family]
        self.on(mesh)

    def on(self, mesh: CartMesh) -> None:
        """Note that the ranks of ``mesh`` hold copies. Not collective."""
        known = self._holders
        if known and known[-1].group.comm is mesh.comm:
            return
        known[:] = [h for h in known if h.alive and h.group.comm is not mesh.comm]
        every = mesh.all_ranks
        known.append(_Holders(every, mesh.outline, mesh.device.type == "meta"))

    def holders(self) -> list[_Holders]:
        """Return whose ranks hold copies. Not collective."""
        return [h for h in self._holders if h.group.size > 1 and h.alive]

    def is_due(self) -> bool:
        """Count a backward pass, and tell whether its gradient is to be compared. Not collective."""
        self._passes += 1
        n = self._passes
        return n & (n - 1) == 0 or (guard.DEBUG and n % _PERIOD == 0)


class Together:
    """Small parameters whose uses share a node of autograd.

    Attributes
    ----------
    members
        The parameters, by place.
    used
        What their node returned, per mesh (its id) and mesh dims.
    """

    __slots__ = ("_keeper", "members", "used")

    def __init__(self, members: Sequence[Tensor], keeper: Keeper) -> None:
        self.members = [weakref.ref(param) for param in members]
        self.used: dict[tuple[int, tuple[int, ...]], weakref.ref[Any]] = {}
        # a node on a GPU belongs to the stream on which it was made: not for the next pass
        self._keeper = None if members[0].is_cuda else weakref.ref(keeper)

    def keep(self, used: Any) -> None:
        """Have what a node returned kept for later passes, as long as the model lives. Not collective."""
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.nodes.setdefault(self, deque(maxlen=_KEPT)).append(used)


class Keeper:
    """What a model holds: its mesh, and nodes of its small parameters, which if they held them would never be freed."""

    __slots__ = ("__weakref__", "mesh", "nodes")

    def __init__(self, mesh: CartMesh) -> None:
        self.mesh = mesh
        self.nodes: dict[Together, deque[Any]] = {}

    def __deepcopy__(self, _memo: dict[int, Any]) -> Keeper:
        return Keeper(self.mesh)  # a copy of the model has parameters of its own

    def __reduce__(self) -> Any:
        return dict, ()


# the attribute of a module that was distributed
KEEPER = "_uses"
# of one node: a backward pass that needs one of them computes all
_TOGETHER = 64
_SMALL_CELLS = 1024
# meshes and mesh dims over which they are used in turns
_KEPT = 4


def join_small(params: Iterable[Tensor], mesh: CartMesh) -> Keeper:
    """Have the small ones among a model's replicated parameters share nodes; return what keeps them. Not collective.

    Those of at most one dim, such as biases and weights of norms: gradients of others may be deferred, one by one.
    """
    keeper = Keeper(mesh)
    by_kind: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.ndim < 2 and param.numel() <= _SMALL_CELLS:
            by_kind.setdefault((param.dtype, param.device), []).append(param)
    for alike in by_kind.values():
        for first in range(0, len(alike), _TOGETHER):
            members = alike[first : first + _TOGETHER]
            together = Together(members, keeper)
            for place, param in enumerate(members):
                replica = replica_of(param)
                assert replica is not None
                replica.together = together, place
    return keeper


def meshes_of(model: Any) -> list[CartMesh]:
    """Return the meshes on which a model, or parts of it, was distributed. Not collective."""
    parts = model.modules() if isinstance(model, torch.nn.Module) else ()
    keepers = (vars(part).get(KEEPER) for part in parts)
    return [keeper.mesh for keeper in keepers if isinstance(keeper, Keeper)]


def replica_of(param: Tensor) -> Replica | None:
    """Return what is known of a parameter, or None. Not collective."""
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if not hooks:
        return None
    for hook in hooks.values():
        if type(hook) is Replica:
            return hook
    return None


def replicate(param: Tensor, mesh: CartMesh, name: str) -> None:
    """Note that every rank of ``mesh`` holds a copy of a leaf, which is to stay the same. Not collective."""
    replica = replica_of(param)
    if replica is None:
        replica = Replica(name)
        frozen = not param.requires_grad
        param.requires_grad_()  # torch registers no hook otherwise; one that is there stays
        param.register_post_accumulate_grad_hook(replica)
        param.requires_grad_(not frozen)
    replica.begin(mesh)


def note_use(replica: Replica, mesh: CartMesh) -> None:
    """Note that a parameter is used with data on ``mesh``. Not collective."""
    replica.on(mesh)
    note_ddp()


def note_ddp() -> None:
    """Note which parameters are those of a DDP module whose forward goes on. Not collective."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp not in _seen_ddp:
        _seen_ddp.add(ddp)
        for param in ddp.parameters():
            if (other := replica_of(param)) is not None:
                other.direct = True


# -- comparison


def meet(x: Any, mesh: CartMesh) -> None:
    """Raise where a parameter that nothing has made the same on all ranks differs, when it is first used on a mesh.

    Collective over the mesh the first time that ``x`` is such a parameter: one agreement. Rounding may differ, as
    between two kinds of processors.

    Raises
    ------
    DesyncError
        On every rank.
    """
    if type(x) is Parameter and replica_of(x) is None and mesh.compared.get(id(x)) is not x:
        _compare_first(x, mesh)


def _compare_first(param: Tensor, mesh: CartMesh) -> None:
    is_number = param.is_floating_point() or param.is_complex()
    if mesh.size == 1 or not is_number or param.is_meta or traced.recording is not None or in_transform():
        return
    with torch.no_grad():
        total, norm = _digest(param).tolist()
    # positive, so that its bits are in its order
    bits = int(np.float64(norm + total / (2 * max(param.numel(), 1) ** 0.5)).view(np.int64))
    what = f"a parameter of shape {tuple(param.shape)}, {param.dtype}, which no distribute_module made the same"
    found = guard.agree(mesh.comm, None, what, (bits, -bits))
    most, least = np.array([found[0], -found[1]]).view(np.float64)
    if most - least <= most * torch.finfo(param.dtype).eps ** 0.5:
        # not before: where an error of another call met the agreement, no rank has compared it
        mesh.compared[id(param)] = param
        return
    with guard.waiting("parameters", (), mesh.comm):
        values = disagreement.kinds(mesh.comm, f"sum {total:.9g}, norm {norm:.9g}")
    raise guard.common(
        DesyncError(
            f"{what}, differs between ranks",
            expected=f"the same on every rank of {mesh.outline}: each holds a copy of a plain tensor",
            got="; ".join(map(str, values)),
            fix="model = ms.distribute_module(model, mesh) gives every rank the parameters of rank 0; or "
            "torch.manual_seed(seed), the same on every rank, before the model is made",
        ),
        mesh.comm,
    )


class _Due(list["tuple[Replica, Tensor]"]):
    """What a backward pass compares at its end."""

    __slots__ = ("__weakref__",)


# by the pass: those of several threads may go on at once. One that fails forgets what it would call at its end
_passes: weakref.WeakValueDictionary[int, _Due] = weakref.WeakValueDictionary()


def _compare_after_backward(replica: Replica, param: Tensor) -> None:
    task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    due = _passes.get(task)
    if due is None:
        due = _passes[task] = _Due()
        at_end = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        # in two steps: what DDP queues meanwhile to finish its averages comes first
        at_end(partial(at_end, partial(compare, due)))
    due.append((replica, param))


def compare(due: Sequence[tuple[Replica, Tensor]]) -> None:
    """Raise where copies of parameters, or their gradients, differ between ranks.

    Collective over all ranks that hold copies.

    Raises
    ------
    DesyncError
        On every rank.
    """
    every = list({id(h.group.comm): h for replica, _ in due for h in replica.holders()}.values())
    error: MpishardError | None = None
    for holders in every:
        error = _found(partial(_compare_on, holders, [d for d in due if holders in d[0].holders()])) or error
    # the ranks of one mesh may agree where those of another do not
    for holders in every:
        error = _found(partial(guard.agree, holders.group.comm, error, "replicated parameters"))
    if error is not None:
        raise error


def _found(check: Callable[[], object]) -> MpishardError | None:
    try:
        check()
    except MpishardError as error:
        return error
    return None


def _compare_on(holders: _Holders, due: Sequence[tuple[Replica, Tensor]]) -> None:
    group = holders.group
    names = [replica.name for replica, _ in due]
    guard.agree(group.comm, None, f"gradients of {names}")
    with torch.no_grad():
        digests = [_digest(x) for _, param in due for x in (param, param.grad)]
        own = torch.stack([d.to("meta") for d in digests] if holders.is_planning else digests)
    most, least = blocking.all_reduce(torch.stack([own, -own]), group, "max")
    if holders.is_planning:
        return  # there are no values to differ
    limits = torch.finfo(torch.float64).tiny + torch.tensor(
        [torch.finfo(param.dtype).eps ** 0.5 for _, param in due for _ in range(2)], dtype=torch.float64, device="cpu"
    )
    # of gradients that cancel out only rounding is left: what is small beside all others does not count
    norms = most[:, 1]
    bound = limits * torch.maximum(norms, limits * norms.view(-1, 2).amax(0).repeat(len(due)))
    apart = (most + least).amax(1) > bound
    if not apart.any():
        return
    odd = int(apart.nonzero()[0])
    with guard.waiting("replicated parameters", (), group.comm):
        values = disagreement.kinds(group.comm, "sum {:.9g}, norm {:.9g}".format(*own[odd].tolist()))
    unlike = disagreement.unlike(values)
    what = "parameters" if odd % 2 == 0 else "gradients"
    differ = [due[i // 2][0].name for i in apart.nonzero().flatten().tolist() if i % 2 == odd % 2]
    raise DesyncError(
        f"{what} differ between ranks: {', '.join(differ[:4])}{' and more' if len(differ) > 4 else ''} "
        f"({f'{unlike} unlike the others' if unlike else 'on many ranks'})",
        expected=f"the same on every rank of {holders.outline}: each holds a copy",
        got="; ".join(map(str, values)),
        fix="nothing sums over data that lie outside the mesh: make one ShardTensor of the whole mesh of a batch "
        "of which ranks hold parts (ShardTensor.from_local(batch, mesh, ms.Shard(0)): a mean is then over all); or "
        "average replicas with torch's DistributedDataParallel(ms.distribute_module(model, mesh['y'])); a plain "
        "batch, and plain random numbers, must be the same on every rank",
    )


def apart(x: Tensor, group: Group) -> bool:
    """Tell whether a tensor differs between the ranks of a group, beyond rounding. Collective."""
    own = _digest(x)
    most, least = blocking.all_reduce(torch.stack([own, -own]), group, "max")
    return bool(((most + least) > torch.finfo(x.dtype).eps ** 0.5 * most[1] + torch.finfo(torch.float64).tiny).any())


def _digest(x: Tensor | None) -> Tensor:
    """Return two numbers that differ where tensors differ: sum and norm."""
    if x is None or not x.numel():
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    x = x.detach()
    if x.ndim + x.is_complex() > 64:
        x = x.reshape(-1)  # torch sums over at most 64 dims
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    found = torch.stack([x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64)])
    return (found if found.is_meta else found.cpu()).nan_to_num(nan=1e300, posinf=1e301, neginf=-1e301)
