"""Models of the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ModelNotFoundError

_DESCRIPTION = ["*.json", "*.jinja"]  # configuration, tokenizer, shard index, chat template
_WEIGHTS = ["model*.safetensors"]  # not "consolidated.safetensors", which some publish as a second copy


def snapshot(name: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a hub model, from the cache if it is complete there, else downloaded.

    Honours ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` (read by ``huggingface_hub`` when it is
    first imported). Worker thread only; a download takes as long as it takes.

    Args:
        name: ``"org/name"``.
        revision: Branch, tag or commit; ``None`` is the default branch.
        weights: Whether the weights are wanted, or only what describes the model.

    Raises:
        ModelNotFoundError: unknown, private, or neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else [])]
    cached = _cached(name, revision, patterns)
    if cached is not None and _complete(cached, weights):
        return cached
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelNotFoundError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no revision {revision!r}; pass a branch, tag or commit that exists") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {name!r}, or it is private; check the name, or set HF_TOKEN") from error
    # The client's errors have no common base (HTTP, OS, value and connection errors): all of them mean
    # that the files are not here.
    except Exception as error:
        wanted = name if revision is None else f"{name} at revision {revision!r}"
        raise ModelNotFoundError(
            f"{wanted} is not complete in the hub cache and could not be downloaded ({error}); "
            "check the connection and HF_HUB_OFFLINE, or pass a local folder"
        ) from error
    if not _complete(folder, weights):  # offline, the client is content with whatever the cache holds
        raise ModelNotFoundError(
            f"{folder} does not hold {name} completely (config.json and every model*.safetensors); "
            "unset HF_HUB_OFFLINE to download the rest, or convert the model to safetensors if the hub has no such files"
        )
    return folder


def _cached(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def _complete(folder: Path, weights: bool) -> bool:
    """Whether the whole model is there, or only a part that another tool needed."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / shard).is_file() for shard in shards)
