"""Reductions along dims, scans, sorting and softmax."""

from mpishard.ops.reduce import count, cumsum, histogram, logsumexp, min_max, norm, prod, softmax, sort, sum, var
