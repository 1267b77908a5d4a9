"""Every kernel against its definition in torch, on the device."""

from __future__ import annotations

import torch

from .comparison import Comparison
from .kernels_attention import compare_attention
from .kernels_rows import compare_elementwise, compare_rows
from .lab import Lab


def run(lab: Lab) -> None:
    """One group after the other, the quickest to compile first, each told of when it is done."""
    for compare in (compare_elementwise, compare_rows, compare_attention):
        comparison = Comparison(lab.device.lost)
        with torch.inference_mode(), lab.device.computing():
            compare(lab, comparison)
        for record in comparison.records():
            lab.emit(record)
