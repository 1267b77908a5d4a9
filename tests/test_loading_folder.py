"""Model folders: config.json with safetensors, single or sharded, whole or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncsched.config import EngineConfig
from asyncsched.errors import ModelError, ModelNotFoundError, UnsupportedModelError, WeightsError
from asyncsched.gpu.loading import Checkpoint, open_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "dtype": "bfloat16"}
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {EMBED: (16, 8), NORM: (8,), HEAD: (16, 8)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_config(tmp_path)
    place = {EMBED: "model-00001-of-00002.safetensors", NORM: "model-00001-of-00002.safetensors"}
    place |= {HEAD: "model-00002-of-00002.safetensors"}
    for shard in set(place.values()):
        save_file({name: t for name, t in tensors().items() if place[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return tmp_path


def opened(folder: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(EngineConfig(model=str(folder), **options))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_read_and_converted(layout: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(layout)
    with opened(folder) as checkpoint:
        assert checkpoint.config == CONFIG
        assert checkpoint.hf_folder == folder
        assert checkpoint.name == folder.name
        assert checkpoint.generation_config == {}
        assert checkpoint.tokenizer is None
        for name, expected in tensors().items():
            assert checkpoint.has(name)
            found = checkpoint.tensor(name, tuple(expected.shape))
            assert found.dtype == torch.bfloat16
            assert found.is_contiguous()
            assert torch.equal(found, expected.to(torch.bfloat16))
        assert not checkpoint.has("model.layers.0.mlp.up_proj.weight")


def test_tensors_outlive_the_checkpoint_and_never_write_the_file(single: Path) -> None:
    before = (single / "model.safetensors").read_bytes()
    with opened(single, dtype="float32") as checkpoint:
        tensor = checkpoint.tensor(EMBED, (16, 8))  # no conversion: may be the file's own pages
    checkpoint.close()
    assert torch.equal(tensor, tensors()[EMBED])
    tensor.zero_()
    assert (single / "model.safetensors").read_bytes() == before
    with pytest.raises(WeightsError, match="closed"):
        checkpoint.tensor(EMBED, (16, 8))


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ({"dtype": "float32"}, "auto", torch.float32),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "auto", torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float32"}, "auto", torch.float32),
        ({"dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"dtype": None}, "auto", torch.float32),  # what the file holds
        ({"dtype": "float64"}, "float32", torch.float32),
        ({"dtype": "float32"}, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(single: Path, declared: dict[str, Any], asked: str, expected: torch.dtype) -> None:
    write_config(single, **declared)
    with opened(single, dtype=asked) as checkpoint:
        assert checkpoint.dtype == expected
        assert checkpoint.tensor(NORM, (8,)).dtype == expected


def test_an_unknown_dtype_needs_a_choice(single: Path) -> None:
    write_config(single, dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedModelError, match=r"float8_e4m3fn.*pass dtype="):
        opened(single)


def test_generation_config_is_read(single: Path) -> None:
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert opened(single).generation_config == {"eos_token_id": [1, 2]}


def test_missing_tensor_names_tensor_and_place(single: Path) -> None:
    with opened(single) as checkpoint, pytest.raises(WeightsError) as caught:
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight", (4, 8))
    assert "'model.layers.0.mlp.up_proj.weight'" in str(caught.value)
    assert str(single) in str(caught.value)


def test_wrong_shape_names_tensor_file_and_shapes(single: Path) -> None:
    with opened(single) as checkpoint, pytest.raises(WeightsError) as caught:
        checkpoint.tensor(EMBED, (8, 16))
    for part in (EMBED, str(single / "model.safetensors"), "[16, 8]", "[8, 16]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_refused_on_opening(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt.*download it again"):
        opened(single)


def test_a_corrupt_header_is_refused_on_opening(single: Path) -> None:
    file = single / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"x" * 32
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="corrupt"):
        opened(single)


def test_a_missing_shard_is_named_on_opening(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors is listed .* not there"):
        opened(sharded)


def test_a_shard_without_a_listed_tensor_is_named_on_opening(sharded: Path) -> None:
    save_file({"other": torch.zeros(1)}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"'lm_head.weight' is listed .* not in model-00002"):
        opened(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        opened(sharded)


def test_an_unreadable_configuration_is_named(single: Path) -> None:
    (single / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        opened(single)


def test_one_file_of_any_name_will_do_but_two_need_an_index(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    with opened(single) as checkpoint:
        assert checkpoint.has(EMBED)
    save_file(tensors(), single / "more.safetensors")
    with pytest.raises(WeightsError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        opened(single)


def test_pickled_weights_are_not_read(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="convert them to safetensors"):
        opened(single)


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="load_format='dummy'"):
        opened(single, load_format="safetensors")


def test_a_quantised_folder_is_refused(single: Path) -> None:
    write_config(single, quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedModelError, match="awq"):
        opened(single)


def test_integer_tensors_are_refused(single: Path) -> None:
    save_file({EMBED: torch.zeros(16, 8, dtype=torch.int8)}, single / "model.safetensors")
    with opened(single) as checkpoint, pytest.raises(WeightsError, match="type I8"):
        checkpoint.tensor(EMBED, (16, 8))


def test_a_file_without_tensors_is_refused(single: Path) -> None:
    save_file({}, single / "model.safetensors")
    with pytest.raises(WeightsError, match="no tensors at all"):
        opened(single)
