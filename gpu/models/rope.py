"""Rotary position embedding: frequencies and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModelError

_SUPPORTED = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model (Su et al., RoFormer, 2021).

    Attributes:
        theta: Base of the geometric series of wavelengths.
        kind: ``"default"``, ``"linear"`` (position interpolation, Chen et al., 2023) or ``"llama3"``
            (interpolation of the long wavelengths only, Llama 3.1, 2024).
        factor: How far the context is stretched; 1 for ``"default"``.
        low_freq_factor, high_freq_factor: Wavelengths above ``original_length / low`` are stretched
            fully, below ``original_length / high`` not at all (``"llama3"``).
        original_length: Context length before the stretch (``"llama3"``).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, max_length: int) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4).

        Raises:
            UnsupportedModelError: a scaling type or a partial rotation that this decoder lacks.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in _SUPPORTED:
            raise UnsupportedModelError(
                f"rope scaling type {kind!r} is not supported by the built-in decoder, only {', '.join(_SUPPORTED)}"
            )
        partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0 or head_dim % 2:
            raise UnsupportedModelError(f"rotating {partial} of {head_dim}-wide heads is not supported by the built-in decoder")
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_length=int(scaling.get("original_max_position_embeddings") or max_length),
        )

    def frequencies(self, head_dim: int) -> Tensor:
        """Angle per position, float32 ``[head_dim / 2]``."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        wavelength = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        # 1 keeps the frequency, 0 divides it by the factor, in between is interpolated.
        keep = ((self.original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1.0 - keep) * plain / self.factor + keep * plain

    def table(self, head_dim: int, length: int) -> Tensor:
        """Cosines, then sines, of every position: float32 ``[length, head_dim]``."""
        angles = torch.arange(length, dtype=torch.int64).float()[:, None] * self.frequencies(head_dim)
        return torch.cat((angles.cos(), angles.sin()), dim=1).contiguous()
