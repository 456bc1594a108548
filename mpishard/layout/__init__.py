"""Layouts and plans: pure arithmetic, no MPI, testable in one process for any number of ranks."""

from mpishard.layout.align import Alignment, Labels, align, aligned_to, extents_of, first_sharded, in_full
from mpishard.layout.block_sizes import (
    FEW,
    BlockSizes,
    Each,
    are_equal,
    as_block_sizes,
    bounds,
    key_of,
    largest,
    moved_borders,
    repeated,
    runs_of,
    scaled,
    sizes_of,
    total,
)
from mpishard.layout.cells import Spans, blocks_of, holders, spans_of
from mpishard.layout.coupling import Share, is_idle, plan_sources, plan_targets
from mpishard.layout.halo import plan_halo
from mpishard.layout.layout import Layout, by_dim, layout_of, watch_empty_blocks
from mpishard.layout.partition import balanced, owner, weighted
from mpishard.layout.placement import Partial, Placement, Replicate, Shard, as_placements
from mpishard.layout.route import Leg, Trip, plan_route
from mpishard.layout.stage import Piece, Pieces, Run, Runs, Stage, interval_runs, near, plan_stage
from mpishard.layout.transfer import Box, Transfer, plan_fetch, plan_transfer

__all__ = [
    "FEW",
    "Alignment",
    "BlockSizes",
    "Box",
    "Each",
    "Labels",
    "Layout",
    "Leg",
    "Partial",
    "Piece",
    "Pieces",
    "Placement",
    "Replicate",
    "Run",
    "Runs",
    "Shard",
    "Share",
    "Spans",
    "Stage",
    "Transfer",
    "Trip",
    "align",
    "aligned_to",
    "are_equal",
    "as_block_sizes",
    "as_placements",
    "balanced",
    "blocks_of",
    "bounds",
    "by_dim",
    "extents_of",
    "first_sharded",
    "holders",
    "in_full",
    "interval_runs",
    "is_idle",
    "key_of",
    "largest",
    "layout_of",
    "moved_borders",
    "near",
    "owner",
    "plan_fetch",
    "plan_halo",
    "plan_route",
    "plan_sources",
    "plan_stage",
    "plan_targets",
    "plan_transfer",
    "repeated",
    "runs_of",
    "scaled",
    "sizes_of",
    "spans_of",
    "total",
    "watch_empty_blocks",
    "weighted",
]
