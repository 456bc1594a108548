"""Transformers on shards: of the image, of the tokens, and of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compare import WORLD
from tests.models.transformer import (
    Block,
    DenseTransformer,
    Mixer,
    MixerBlock,
    PatchMerging,
    SwinBlock,
    VisionTransformer,
)
from tests.models.twin import data, twins


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_vision_transformer(pool):
    twins(lambda: VisionTransformer((20, 28), pool=pool), data(2, 3, 20, 28), (2, 3))


def test_vision_transformer_with_patches_across_blocks():
    """Blocks of 17 x 23 cells end within patches of 4."""
    twins(lambda: VisionTransformer((17, 23)), data(1, 3, 17, 23), (3, 2), train=False)


def test_dense_transformer():
    twins(DenseTransformer, data(2, 3, 18, 14), (2, 3), sharded=True)


def test_encoder_with_batch_sharded():
    twins(lambda: Block(8), data(5, 7, 8), (0,), sharded=True)
    twins(lambda: Block(8), data(4, 7, 8), (0, 1), sharded=True)


def test_encoder_with_sequence_sharded():
    twins(lambda: nn.Sequential(Block(8), Block(8)), data(2, 13, 8), (1,), sharded=True)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("multiple", [1, 4])
def test_swin_block(shift, multiple):
    """Blocks of rows that end at windows, and within them."""
    full = data(2, 12 if multiple == 1 else 4 * WORLD.size, 16, 8)
    twins(lambda: SwinBlock(8, shift=shift), full, (1, 2), sharded=True, multiple=multiple)


def test_swin_block_of_one_image():
    twins(lambda: SwinBlock(8, shift=1), data(1, 16, 12, 8), (1, 2), sharded=True)


def test_swin_of_uneven_extents():
    twins(
        lambda: nn.Sequential(SwinBlock(4), SwinBlock(4, shift=2), PatchMerging(4), SwinBlock(8, shift=1)),
        data(1, 17, 23, 4),
        (1, 2),
        sharded=True,
    )


def test_mixer():
    twins(lambda: Mixer((20, 24)), data(2, 3, 20, 24), (2, 3))
    twins(lambda: MixerBlock(6, 11), data(2, 11, 6), (1, 2), sharded=True)


@pytest.mark.parametrize("train", [True, False])
def test_torchs_encoder_layer_with_batch_sharded(train):
    layer = {"dropout": 0.0, "batch_first": True}
    twins(lambda: nn.TransformerEncoderLayer(8, 2, 16, **layer), data(5, 7, 8), (0,), sharded=True, train=train)
    twins(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **layer), 2, enable_nested_tensor=False),
        data(5, 7, 8),
        (0,),
        sharded=True,
        train=train,
    )


@pytest.mark.parametrize("layer", ["fused", "torch"])
def test_vision_transformer_of_torchs_attention(layer):
    twins(lambda: VisionTransformer((20, 28), layer=layer), data(2, 3, 20, 28), (2, 3))


def test_torchs_encoder_layer_with_sequence_sharded():
    layer = {"dropout": 0.0, "batch_first": True, "activation": torch.nn.functional.gelu}
    twins(lambda: nn.TransformerEncoderLayer(8, 2, 16, **layer), data(2, 13, 8), (1,), sharded=True)
