"""Which torch tests run on: the oldest that is promised has less to compare with than others."""

from __future__ import annotations

import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
