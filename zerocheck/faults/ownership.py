"""Faults in who owns what, and in padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..case.schema import Case
from ..contract import Shard, Step, StepReport
from ..implementations.fsdp2 import Fsdp2
from ..implementations.textbook.partition import Piece
from ..implementations.textbook.zero1 import Zero1
from ..implementations.textbook.zero2 import GradientBucket, Zero2
from ..implementations.textbook.zero3 import Zero3
from .parts import ClipsInParts
