"""Pushes an export to the hub if the recipe asks for it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from toolkit import ranks
from toolkit.errors import BadInputError, HubError, first_line, in_words
from toolkit.model.beside_weights.base_files import CONFIG, GENERATION, PROCESSORS, TOKENIZERS
from toolkit.paths import BASE_FILE
from toolkit.recipe.schema import ExportSection
from toolkit.terminal import LongAction, Terminal

OF_EXPORTS = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    BASE_FILE,
    *(CONFIG, GENERATION, *TOKENIZERS, *PROCESSORS),
]
"""Files of an earlier export in the repository. Those that the new one lacks are removed: transformers would load an
old `model.safetensors`, ignoring a new index, and take a whole model for an adapter by an old `adapter_config.json`."""


def require_login(settings: ExportSection) -> None:
    """Checks before training that the export can be pushed after it.

    Raises:
        BadInputError: if the hub is offline or no token is found, and the recipe asks to push.
    """
    if settings.push_to_hub is None:
        return
    if huggingface_hub.is_offline_mode():
        raise BadInputError(
            "export.push_to_hub: HF_HUB_OFFLINE is set, or the hub did not answer at the start; unset it, or remove "
            f"export.push_to_hub and run `hf upload {settings.push_to_hub} OUTPUT_DIR/export` where there is a network"
        )
    if huggingface_hub.get_token() is None:
        raise BadInputError(
            "export.push_to_hub: no token of the hub was found; run `hf auth login`, or set HF_TOKEN to a token that "
            "may write"
        )


def push_export(settings: ExportSection, folder: Path) -> None:
    """Pushes a whole export, card included. Rank 0 pushes, and the others wait over gloo. Collective.

    Raises:
        HubError: on every rank, if the hub cannot be reached or refuses the export.
    """
    name = settings.push_to_hub
    if name is None:
        return
    console = Terminal(quiet=ranks.rank() != 0)
    with LongAction(console, f"pushing the export to {name}"):
        address = ranks.on_first_rank(lambda: _upload_folder(name, settings.hub_private, folder))
    console.print(f"pushed to {address}", markup=False)


def _upload_folder(name: str, private: bool, folder: Path) -> str:
    """Uploads the folder's files and returns the address of the commit."""
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        # An existing repository keeps its visibility, whatever the setting.
        if private and not api.model_info(name).private:
            raise HubError(
                f"export.push_to_hub: {name!r} is on the hub already, and public; set export.hub_private=false to push "
                f"there, or name another. The export was not pushed; it is whole in {str(folder)!r}"
            )
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Push an export of finetune-toolkit",
            delete_patterns=OF_EXPORTS,
        )
        return str(done)
    except HubError:
        raise
    # The hub's library, its HTTP client and its uploader have no base of their exceptions in common.
    except Exception as error:
        raise HubError(
            f"export.push_to_hub: {name!r} could not be pushed to {api.endpoint}: {_why(error)}. Nothing is lost: the "
            f"run is done, and the export is whole in {str(folder)!r}. The same command pushes it again, and trains "
            f"nothing; so does `hf upload {name} {folder}`"
        ) from error


def _why(error: Exception) -> str:
    """Returns the hub's own message if it answered. The library's message only has the request's id and address."""
    if not isinstance(error, HfHubHTTPError):
        return in_words(error)
    said = error.server_message or first_line(error)
    meaning = {401: "the token is missing or wrong", 403: "the token may not write there"}
    status = error.response.status_code
    return f"HTTP {status}: {said.splitlines()[0]}" + (f" ({meaning[status]})" if status in meaning else "")
