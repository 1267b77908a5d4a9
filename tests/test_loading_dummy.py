"""Random weights: deterministic, well scaled, and no two rows alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from asyncsched.config import EngineConfig
from asyncsched.gpu.loading import Checkpoint, open_checkpoint

Q = "model.layers.0.self_attn.q_proj"


def dummy(folder: Path, *, dtype: Literal["auto", "float32"] = "auto", **config: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return open_checkpoint(EngineConfig(model=str(folder), load_format="dummy", dtype=dtype))


def test_only_the_configuration_is_needed_and_names_seed_the_numbers(tmp_path: Path) -> None:
    first, second = dummy(tmp_path), dummy(tmp_path)
    assert first.dtype == torch.bfloat16
    one = first.tensor(Q + ".weight", (64, 32))
    assert torch.equal(one, second.tensor(Q + ".weight", (64, 32)))
    assert not torch.equal(one, first.tensor("model.layers.1.self_attn.q_proj.weight", (64, 32)))
    assert torch.equal(one, dummy(tmp_path, dtype="float32").tensor(Q + ".weight", (64, 32)).to(torch.bfloat16))


def test_the_first_numbers_are_the_same_on_every_machine(tmp_path: Path) -> None:
    found = dummy(tmp_path, dtype="float32").tensor(Q + ".weight", (1, 4))
    torch.testing.assert_close(
        found,
        torch.tensor([[-0.8916975855827332, -0.056699953973293304, -1.0226573944091797, -0.4192601144313812]]),
        rtol=1e-6,
        atol=0.0,
    )


def test_scale(tmp_path: Path) -> None:
    with dummy(tmp_path, dtype="float32") as checkpoint:
        matrix = checkpoint.tensor(Q + ".weight", (512, 1024))
        assert matrix.std().item() == pytest.approx(1024**-0.5, rel=0.02)
        assert (matrix @ torch.ones(1024)).std().item() == pytest.approx(1.0, rel=0.2)
        assert torch.equal(checkpoint.tensor("model.layers.0.input_layernorm.weight", (16,)), torch.ones(16))
        assert torch.equal(checkpoint.tensor("model.norm.weight", (16,)), torch.ones(16))
        assert 0 < checkpoint.tensor(Q + ".bias", (512,)).abs().max().item() < 0.2


def test_a_large_matrix_has_no_equal_rows(tmp_path: Path) -> None:
    table = dummy(tmp_path, dtype="float32").tensor("model.embed_tokens.weight", (151_936, 8))
    assert torch.unique(table, dim=0).shape[0] == 151_936


@pytest.mark.parametrize(
    ("config", "present", "absent"),
    [
        ({"tie_word_embeddings": True}, [Q + ".weight"], ["lm_head.weight", Q + ".bias"]),
        ({"model_type": "qwen2"}, ["lm_head.weight", Q + ".bias"], ["model.layers.0.self_attn.o_proj.bias"]),
        ({"model_type": "qwen3"}, ["model.layers.0.self_attn.q_norm.weight"], [Q + ".bias"]),
        ({"attention_bias": True}, [Q + ".bias", "model.layers.0.self_attn.o_proj.bias"], ["model.layers.0.mlp.up_proj.bias"]),
        ({"mlp_bias": True}, ["model.layers.0.mlp.up_proj.bias"], ["model.layers.0.self_attn.k_norm.weight"]),
    ],
)
def test_has_follows_the_configuration(tmp_path: Path, config: dict[str, Any], present: list[str], absent: list[str]) -> None:
    checkpoint = dummy(tmp_path, **config)
    assert [checkpoint.has(name) for name in present] == [True] * len(present)
    assert [checkpoint.has(name) for name in absent] == [False] * len(absent)
