"""Models by their name on the Hugging Face hub. The cache and the environment variables are those of huggingface_hub.

Only a model of kind `hub` is ever downloaded: a mistyped `path` never is.
"""

from __future__ import annotations

from pathlib import Path

from penstock.engines.settings import HubModel
from penstock.errors import ConfigError

FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""The files of a model. Weights that need unpickling are left out."""


def cached(model: HubModel) -> Path | None:
    """Its directory in the local cache, without network access; None if it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model.name,
            revision=model.revision or None,
            cache_dir=model.cache,
            local_files_only=True,
            allow_patterns=FILES,  # else a snapshot without the other files would count as incomplete
        )
    except HFValidationError as error:
        raise ConfigError(f"model.name {model.name!r} is not a name of the hub: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    directory = Path(found)
    whole = (directory / "config.json").exists() and any(directory.glob("*.safetensors"))
    return directory if whole else None


def directory_of(model: HubModel) -> Path:
    """Its directory, downloaded first if it is not in the cache. ConfigError if that fails."""
    found = cached(model)
    if found is not None:
        return found
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    revision = f" at revision {model.revision!r}" if model.revision else ""
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"model {model.name!r}{revision} is not in the cache {model.cache or constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids downloads; download it once with: hf download "
            f"{model.name}, or name a directory with kind = 'path'"
        )
    try:
        snapshot_download(model.name, revision=model.revision or None, cache_dir=model.cache, allow_patterns=FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {model.name!r}{revision} could not be downloaded from the hub ({reason}). Check the name and the "
            "network, or name a directory with kind = 'path'"
        ) from error
    found = cached(model)
    if found is None:
        raise ConfigError(f"model {model.name!r}{revision} has no config.json with safetensors beside it")
    return found
