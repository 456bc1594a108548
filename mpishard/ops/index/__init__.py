"""Indexing: slices, tensors as indices, masks, gather and scatter, look-ups."""

from mpishard.ops.index import advanced, basic, embedding, gather, getitem, index_put, masked, scatter, searchsorted
