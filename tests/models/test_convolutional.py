"""Convolutional networks on shards: ResNet, U-Net, ConvNeXt, dilated heads, ConvLSTM."""

from __future__ import annotations

import pytest
import torch

from tests.models.convolutional import ConvLSTM, ConvNeXt, ConvNeXtBlock, DeepLabHead, ResNet, UNet
from tests.models.twin import data, twins

FIELD = (2, 3)


@pytest.mark.parametrize("train", [True, False])
def test_resnet(train):
    twins(ResNet, data(2, 3, 37, 43), FIELD, train=train)


@pytest.mark.parametrize("up", ["transposed", "interpolated"])
def test_unet_2d(up):
    twins(lambda: UNet(2, up=up), data(2, 1, 17, 23), FIELD, sharded=True)


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_unet_2d_norms(norm):
    twins(lambda: UNet(2, norm=norm), data(1, 1, 18, 21), FIELD, sharded=True)


def test_unet_2d_eval():
    twins(lambda: UNet(2), data(2, 1, 17, 23), FIELD, train=False)


@pytest.mark.parametrize("up", ["transposed", "interpolated"])
def test_unet_3d(up):
    twins(lambda: UNet(3, width=2, up=up), data(1, 1, 9, 11, 10), (3, 2), sharded=True)


def test_convnext():
    twins(lambda: ConvNeXtBlock(4), data(2, 4, 17, 23), FIELD, sharded=True)
    twins(ConvNeXt, data(2, 3, 33, 29), FIELD)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_deeplab_head(train, align_corners):
    twins(lambda: DeepLabHead(align_corners=align_corners), data(2, 3, 17, 23), FIELD, train=train, sharded=True)


def test_conv_lstm():
    twins(ConvLSTM, data(2, 3, 2, 11, 9), (3, 4), sharded=True)


def test_channels_last_memory():
    twins(
        lambda: UNet(2).to(memory_format=torch.channels_last),
        data(2, 1, 17, 23).contiguous(memory_format=torch.channels_last),
        FIELD,
    )
