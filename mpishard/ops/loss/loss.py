"""Losses: summed over the global tensor, divided by global counts. Plain targets count as full tensors."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from mpishard.autograd.graph import apart
from mpishard.autograd.redistribute import sum_partial
from mpishard.autograd.use import use
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, layout_of
from mpishard.ops.loss.cut_classes import loss_of_cut_classes
from mpishard.ops.rule.agreement import agreed, blank, in_range
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import whole_along
from mpishard.ops.rule.reduction import HALVES, reduced, summed
from mpishard.tensor.forgotten import forgotten
from mpishard.tensor.operand import beside, broadcast_of, fitted, mesh_of, moved, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import R, implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[dict[str, Any], str]:
    """Return the named arguments, Partial sums resolved, and the kind of reduction."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = {k: resolved(v) if isinstance(v, Tensor) else v for k, v in bound.arguments.items()}
    size_average, reduce = named.pop("size_average", None), named.pop("reduce", None)
    reduction = named.pop("reduction")
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("none", "mean", "sum", *(["batchmean"] if "log_target" in signature.parameters else [])):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return named, reduction


def _reduce(loss: Any, reduction: str) -> Any:
    """Reduce a loss per cell, given as a ShardTensor."""
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _local_sum(call: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Sum a local loss in float32 or wider, without a temporary where torch's own sum is wide enough."""
    return call("none").sum(dtype=torch.float32) if dtype in HALVES else call("sum")


def _total(local: Tensor, mesh: CartMesh, out: Layout) -> Tensor:
    return sum_partial(local, mesh, reduced(out, None).over)


def _scalar(local: Tensor, mesh: CartMesh) -> ShardTensor:
    return wrap(local, replicated_layout(mesh, ()), mesh)


# where the shapes of input and target differ; torch broadcasts those of others without a word
_WARNS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def _pointwise_loss(func: Callable[..., Tensor], *names: str, same_shape: bool = False) -> Callable[..., ShardTensor]:
    """Return the rule of a loss per cell of its broadcast tensor arguments ``names``, the input first."""
    signature = inspect.signature(func)

    def rule(*args: Any, **kwargs: Any) -> ShardTensor:
        named, reduction = _arguments(signature, args, kwargs)
        tensors = [named[n] for n in names if isinstance(named[n], Tensor)]
        shapes = {tuple(t.shape) for t in tensors[:2]}
        if len(shapes) > 1:
            if same_shape:
                raise ValueError(
                    f"Using a target size ({tensors[1].shape}) that is different to the input size "
                    f"({tensors[0].shape}) is deprecated. Please ensure they have the same size."
                )
            if func in _WARNS:
                warnings.warn(
                    f"Using a target size ({tensors[1].shape}) that is different to the input size "
                    f"({tensors[0].shape}). This will likely lead to incorrect results due to broadcasting.",
                    stacklevel=3,
                )
        if func is F.margin_ranking_loss and len({t.ndim for t in tensors}) > 1:
            raise RuntimeError(
                "margin_ranking_loss : All input tensors should have same dimension but got sizes: "
                + ", ".join(f"{n}: {tuple(t.shape)}" for n, t in zip(names, tensors))
            )
        mesh, out = broadcast_of(tensors)
        if func is F.soft_margin_loss and out.shape != tuple(tensors[0].shape):
            raise RuntimeError(
                f"output with shape {list(tensors[0].shape)} doesn't match the broadcast shape {list(out.shape)}"
            )
        local = {k: fitted(v, mesh, out) if k in names else v for k, v in named.items()}
        if len(shapes) > 1:
            shape = out.local_shape(mesh.coords)
            local |= {n: local[n].expand(shape) for n in names[:2]}

        def call(how: str) -> Tensor:
            if func is F.binary_cross_entropy:  # which looks whether its cells are probabilities
                given = [local[n] for n in names[:2]]
                return agreed(
                    lambda *two: func(**{**local, **dict(zip(names, two))}, reduction=how),
                    mesh,
                    (out,),
                    *given,
                    check=lambda *two: func(*two, reduction="none"),
                )
            return func(**local, reduction=how)

        if reduction == "none":
            return wrap(call("none"), out, mesh)
        dtype = torch.result_type(local[names[0]], local[names[1]])
        total = _local_sum(call, dtype)
        count = math.prod(out.shape)
        if reduction == "batchmean":
            named_shape = named[names[0]].shape
            count = named_shape[0] if named_shape else 1
        result = total.dtype
        if dtype in HALVES:  # torch's own dtype, also under autocast
            cells = {k: v.new_zeros(1) if isinstance(v, Tensor) else v for k, v in local.items()}
            result = func(**cells, reduction="sum").dtype
        if reduction == "mean" and not (result.is_floating_point or result.is_complex):
            torch.empty(0, dtype=result, device="cpu").mean()  # raises torch's own error
        then = (lambda t: t.to(result)) if reduction == "sum" else (lambda t: (t / count).to(result))
        return summed(total, mesh, reduced(out, None).over, replicated_layout(mesh, ()), then, result)

    return rule


for _func in (F.smooth_l1_loss, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss):
    implements(_func, sharded="reduction")(_pointwise_loss(_func, "input", "target"))
implements(F.binary_cross_entropy, sharded="reduction")(
    _pointwise_loss(F.binary_cross_entropy, "input", "target", "weight", same_shape=True)
)
implements(F.margin_ranking_loss, sharded="reduction")(
    _pointwise_loss(F.margin_ranking_loss, "input1", "input2", "target")
)
_plain_kl = _pointwise_loss(F.kl_div, "input", "target")
_plain = {f: _pointwise_loss(f, "input", "target") for f in (F.mse_loss, F.l1_loss, F.huber_loss)}
_logits = _pointwise_loss(F.binary_cross_entropy_with_logits, "input", "target", "weight", same_shape=True)


def _weighted(func: Any) -> Callable[..., ShardTensor]:
    signature = inspect.signature(func)

    def rule(*args: Any, **kwargs: Any) -> ShardTensor:
        named, reduction = _arguments(signature, args, kwargs)
        weight = named.pop("weight", None)
        if weight is None and func is F.l1_loss:  # which does not hand it on
            weight = forgotten(func, "weight")
        if weight is None:
            return _plain[func](**named, reduction=reduction)
        if tuple(weight.shape) != tuple(named["input"].shape):
            raise ValueError("Weights and input must have the same size.")
        named["input"] = on_mesh(named["input"], mesh_of((weight, named["input"], named["target"])))
        loss = _plain[func](**named, reduction="none")
        if func is not F.huber_loss:  # torch composes these, so that autocast leaves their dtype
            loss = loss.to(torch.promote_types(named["input"].dtype, named["target"].dtype))
        loss = loss * weight
        if reduction == "mean" and func is not F.huber_loss:  # torch's huber_loss divides by the count instead
            return loss.sum() / weight.sum()  # type: ignore[no-any-return]
        return _reduce(loss, reduction)  # type: ignore[no-any-return]

    return rule


for _func in _plain:
    implements(_func, sharded="reduction")(_weighted(_func))


@implements(F.kl_div, sharded="reduction")
def kl_div(*args: Any, **kwargs: Any) -> ShardTensor:
    """Kullback-Leibler divergence per cell. Collective where it is reduced."""
    with warnings.catch_warnings():
        # torch's advice on 'mean' would be given for the local 'sum' too
        warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
        return _plain_kl(*args, **kwargs)


_logits_signature = inspect.signature(F.binary_cross_entropy_with_logits)


@implements(F.binary_cross_entropy_with_logits, sharded="reduction")
def binary_cross_entropy_with_logits(*args: Any, **kwargs: Any) -> ShardTensor:
    """Binary cross entropy of logits; ``pos_weight`` broadcasts. Collective where it is reduced."""
    named, reduction = _arguments(_logits_signature, args, kwargs)
    pos_weight = named.pop("pos_weight")
    if pos_weight is not None:
        named["input"] = on_mesh(named["input"], mesh_of((pos_weight, *named.values())))
        mesh, out = broadcast_of([named["input"], named["target"]])
        named["pos_weight"] = fitted(pos_weight, mesh, out)
    return _logits(**named, reduction=reduction)


def _scores(name: str, named: dict[str, Any]) -> tuple[ShardTensor, int]:
    """Return the scores, and the dim of their classes. Collective over Partial dims."""
    x = named["input"]
    mesh = mesh_of(named.values())
    if not isinstance(x, ShardTensor):
        # beside sharded targets, plain scores count as full ones
        x = on_mesh(x, mesh)
        target = named["target"]
        if isinstance(target, ShardTensor) and x.ndim > 1 and tuple(target.shape) == (*x.shape[:1], *x.shape[2:]):
            like = target.unsqueeze(1).sharding
            x = moved(x, layout_of(mesh.shape, like.placements, x.shape, like.sizes))
    if x.ndim == 0:
        raise ValueError(f"{name}: expected at least 1 dim of classes")
    return resolved(x), min(1, x.ndim - 1)


def _class_input(name: str, named: dict[str, Any]) -> tuple[ShardTensor, CartMesh]:
    """Return the scores with whole classes. Collective where they are sharded over the classes: those are gathered."""
    x, dim = _scores(name, named)
    return whole_along(x, (dim,)), x.mesh


def _may_stay_cut(x: ShardTensor, dim: int, weight: Tensor | None) -> bool:
    """Tell whether classes are cut, and the weights those that torch takes, without a gradient. Not collective."""
    cut = x.sharding.sizes[dim]
    fits = weight is None or (tuple(weight.shape) == (x.shape[dim],) and not weight.requires_grad)
    return cut is not None and len(cut) > 1 and fits


def _class_loss(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:
    """Return the rule of a loss whose mean is weighted by the classes of its targets."""
    signature, name = inspect.signature(func), func.__name__

    def rule(*args: Any, **kwargs: Any) -> ShardTensor:
        named, reduction = _arguments(signature, args, kwargs)
        x, dim = _scores(name, named)
        mesh = x.mesh
        target, weight, ignore = named["target"], named["weight"], named["ignore_index"]
        out = reduced(x.sharding, dim).out
        shares = tuple(target.shape) == tuple(x.shape) and target.is_floating_point()
        expected = tuple(x.shape) if shares else out.shape
        if tuple(target.shape) != expected:
            raise ValueError(f"{name}: expected target of size {list(expected)}, got {list(target.shape)}")
        if isinstance(weight, ShardTensor):
            weight = weight.full_tensor()
        extra = {"label_smoothing": named["label_smoothing"]} if "label_smoothing" in named else {}
        if _may_stay_cut(x, dim, weight) and not (shares and ignore >= 0):
            # torch's own errors of dtypes and options
            one = x.block.new_zeros((1, 1) if shares else (1,), dtype=target.dtype)
            scale = None if weight is None else weight.new_ones(1)
            dtype = func(x.block.new_zeros(1, 1), one, scale, ignore_index=ignore, **extra).dtype
            if autocast_enabled(x.block.device.type) and x.dtype in HALVES:
                x, weight = x.to(dtype), None if weight is None else weight.to(dtype)  # type: ignore[assignment]
            smoothing, logits = extra.get("label_smoothing", 0.0), func is F.cross_entropy
            return loss_of_cut_classes(
                x, dim, target, weight, shares=shares, logits=logits, ignore=ignore, smoothing=smoothing,
                reduction=reduction,
            )  # fmt: skip
        x = whole_along(x, (dim,))
        labels = fitted(target, mesh, x.sharding if shares else out)
        w = weight if weight is None else use(weight, mesh, x.sharding.sharded_mesh_dims)
        local = x.block

        shape, classes = local.shape, local.shape[dim]

        def loss_of(labels: Tensor) -> Tensor:
            def call(how: str) -> Tensor:
                return func(local, labels, w, ignore_index=ignore, reduction=how, **extra)

            return call("none") if reduction == "none" else _local_sum(call, local.dtype)

        def check(labels: Tensor) -> None:
            if not shares and not in_range(labels[labels.long() != ignore], 0, classes):
                F.nll_loss(blank(shape, labels), labels, ignore_index=ignore)

        total = agreed(loss_of, mesh, (out,), labels, check=check)
        if reduction == "none":
            return wrap(total, out, mesh)
        dtype = total.dtype
        if local.dtype in HALVES:  # torch's own dtype, also under autocast
            one = labels.new_zeros((1, 1) if shares else (1,))
            scale = w if w is None else w.new_ones(1)
            dtype = func(local.new_zeros(1, 1), one, scale, ignore_index=ignore, reduction="sum", **extra).dtype
        if reduction == "sum":
            return _scalar(_total(total, mesh, out).to(dtype), mesh)
        if shares:
            return _scalar((_total(total, mesh, out) / math.prod(out.shape)).to(dtype), mesh)
        if labels.dtype == torch.uint8:  # in which -100 is a class, and whose tensors are no indices
            labels = labels.long()
        live = labels != ignore
        if weight is None:
            share = live.sum().double()
        else:
            scale = w if weight.requires_grad else weight.detach()
            share = torch.where(live, scale[torch.where(live, labels, 0)], 0).sum(dtype=torch.float64)
        # sum and count travel together
        both = _total(torch.stack([total.double(), share]), mesh, out)
        return _scalar((both[0] / both[1]).to(dtype), mesh)

    return rule


implements(F.cross_entropy, sharded="reduction")(_class_loss(F.cross_entropy))
implements(F.nll_loss, sharded="reduction")(_class_loss(F.nll_loss))


def _sample_loss(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:
    """Return the rule of a loss per sample whose classes lie along the last dim."""
    signature, name = inspect.signature(func), func.__name__

    def rule(*args: Any, **kwargs: Any) -> ShardTensor:
        named, reduction = _arguments(signature, args, kwargs)
        if not named["input"].ndim:
            one_each = func is F.multilabel_margin_loss
            named |= {k: named[k].reshape(1) for k in ("input", "target") if k == "input" or one_each}
        x, mesh = _class_input(name, named)
        out = reduced(x.sharding, x.ndim - 1).out
        target, weight = named.pop("target"), named.get("weight")
        labels = fitted(target, mesh, x.sharding if target.ndim == x.ndim and func is F.multilabel_margin_loss else out)
        if weight is not None:
            weight = weight.full_tensor() if isinstance(weight, ShardTensor) else weight
            named["weight"] = use(weight, mesh, x.sharding.sharded_mesh_dims)
        named["input"] = x.block
        if x.ndim == 1:
            return _scalar(func(**named, target=labels, reduction=reduction), mesh)
        empty = not len(x.block)

        def loss_of(labels: Tensor, input: Tensor) -> Tensor:
            if not empty:
                return func(**{**named, "input": input}, target=labels, reduction="none")
            # torch refuses blocks without samples; one with the graph of none keeps dtype and nodes
            sample = named | {"input": x.block.new_zeros(1, *x.block.shape[1:]) + x.block.sum()}
            return func(**sample, target=labels.new_zeros(1, *labels.shape[1:]), reduction="none")

        loss = agreed(
            loss_of, mesh, (out,), labels, x.block, check=lambda labels, x: empty or func(x, labels, reduction="none")
        )
        return _reduce(wrap(apart(loss[:0]) if empty else loss, out, mesh), reduction)  # type: ignore[no-any-return]

    return rule


implements(F.multi_margin_loss, sharded="reduction")(_sample_loss(F.multi_margin_loss))
implements(F.multilabel_margin_loss, sharded="reduction")(_sample_loss(F.multilabel_margin_loss))


def _composed(func: Callable[..., Tensor]) -> Callable[[R], R]:
    """Register as the rule of a loss what makes its terms of torch's arguments, to be reduced. Not collective."""
    signature = inspect.signature(func)

    def register(terms: R) -> R:
        def rule(*args: Any, **kwargs: Any) -> Any:
            """Reduce terms. Collective where sharded dims are reduced."""
            named, reduction = _arguments(signature, args, kwargs)
            return _reduce(terms(**named), reduction)

        implements(func, sharded="reduction")(rule)
        return terms

    return register


@_composed(F.multilabel_soft_margin_loss)
def _soft_margins(input: Any, target: Any, weight: Any) -> Any:
    """Mean over classes of the binary cross entropies of logits."""
    input.shape[-1]
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    return (loss if weight is None else loss * weight).mean(-1)


@_composed(F.gaussian_nll_loss)
def _likelihoods(input: Any, target: Any, var: Any, full: bool, eps: float) -> Any:
    """Negative log likelihood of a normal distribution. Collective."""
    x = input
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(x)
    else:
        if bool((var < 0).any()):
            raise ValueError("var has negative entry/entries")
        torch.empty(0, dtype=var.dtype, device="cpu").clamp_(min=eps)  # torch's own error
    if tuple(var.shape) != tuple(x.shape):
        if tuple(x.shape[:-1]) == tuple(var.shape):
            var = var.unsqueeze(-1)
        elif x.ndim != var.ndim or sum(b for a, b in zip(x.shape, var.shape) if a != b) != 1:
            raise ValueError("var is of incorrect size")
    # a floor on the value that leaves the gradient as it is, as torch has it
    floor = (var.detach().clamp(min=eps) - var.detach()) + var
    floor = torch.where(var.detach() < eps, floor, var)
    loss = 0.5 * (torch.log(floor) + (x - target) ** 2 / floor)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


@_composed(F.cosine_embedding_loss)
def _cosines(input1: Any, input2: Any, target: Any, margin: float) -> Any:
    """1 - cosine where the target is 1, its excess over the margin where -1."""
    a, b = input1, input2
    if a.ndim != b.ndim or a.ndim != target.ndim + 1:
        raise RuntimeError(
            f"cosine_embedding_loss: expected inputs of one dim more than the target, got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and target {tuple(target.shape)}"
        )
    tiny = 1e-12
    product, size_a, size_b = (a * b).sum(-1), (a * a).sum(-1) + tiny, (b * b).sum(-1) + tiny
    cosine = product / (size_a * size_b).sqrt()
    zero = torch.zeros_like(cosine)
    return torch.where(target == 1, 1 - cosine, zero) + torch.where(target == -1, (cosine - margin).clamp_min(0), zero)


@_composed(F.triplet_margin_with_distance_loss)
def _triplets(anchor: Any, positive: Any, negative: Any, distance_function: Any, margin: float, swap: bool) -> Any:
    """Distance to the positive less that to the negative, above a margin."""
    distance = distance_function or torch.pairwise_distance
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise RuntimeError("The anchor, positive, and negative tensors are expected to have the same number of dims")
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)


@_composed(F.triplet_margin_loss)
def _triplets_by_norm(p: float, eps: float, **named: Any) -> Any:
    """Compare distances by p-norms."""
    return _triplets(**named, distance_function=lambda a, b: torch.pairwise_distance(a, b, p, eps))


@implements(F.ctc_loss, sharded="gathers")
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Align sequences and labels; each rank aligns its samples.

    Collective: the loss is one small sum. Time, classes and labels are gathered where they are sharded; so is the
    batch where the labels of all samples lie in one vector.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    given = (input_lengths, target_lengths)
    lengths = [n if isinstance(n, Tensor) else beside(torch.as_tensor(n, device="cpu"), log_probs) for n in given]
    batched = log_probs.ndim == 3
    batch = "batch" if batched and targets.ndim == 2 else None
    labels = (
        (None, batch, None) if batched else (None, None),
        (batch, None) if targets.ndim == 2 else (None,),
        *((batch,) if n.ndim else () for n in lengths),
    )
    met = meet((log_probs, targets, *lengths), labels)
    scores, symbols, *counts = met.locals

    def aligned() -> Tensor:
        if batch is None or scores.shape[1]:
            return F.ctc_loss(scores, symbols, *counts, blank, "none", zero_infinity)
        # torch refuses an empty batch; one sample has the graph of none
        one = scores.new_zeros(len(scores), 1, scores.shape[2]) + scores.sum()
        lengths = [beside(torch.tensor([n], device="cpu"), scores) for n in (len(scores), 0)]
        return F.ctc_loss(one, symbols.new_zeros(1, symbols.shape[1]), *lengths, blank, "none", zero_infinity)[:0]

    loss = agreed(aligned, met.mesh, met.plan.operands)
    every = met.result(loss, (batch,) if batched else ())
    if reduction == "mean":
        every = every / met.result(counts[1].clamp_min(1).to(loss.dtype), (batch,) if counts[1].ndim else ())
    return _reduce(every, reduction)


implements(torch.pairwise_distance, F.pairwise_distance, sharded="reduction")(
    lambda x1, x2, p=2.0, eps=1e-06, keepdim=False: torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
)
