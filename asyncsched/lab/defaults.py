"""The server that is simulated if nobody says otherwise."""

from __future__ import annotations

from ..cost import LinearCost

DEFAULT_COST = LinearCost(
    fixed=10.4e-3,
    per_decode_row=24.7e-6,
    per_context_token=96.7e-9,
    per_prefill_token=42.8e-6,
    per_attention_pair=2.63e-9,
)
"""Llama-3.1-8B in bf16 on one RTX PRO 6000: a linear fit to the layer times of LLMServingSim 2 (casys-kaist),
which half of the steps keep within 7 %. For figures that must be right, use the tables themselves."""
