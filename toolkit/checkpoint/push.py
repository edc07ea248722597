"""Pushing an export to the hub, where the recipe asks for it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from toolkit import ranks
from toolkit.errors import BadInputError, HubError, first_line, in_words
from toolkit.recipe.schema import ExportSection
from toolkit.terminal import Pass, Terminal

WEIGHTS = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
"""Of an earlier export in the repository. Those that the new one lacks are removed: transformers would load an old
`model.safetensors` and overlook a new index."""


def require_login(settings: ExportSection) -> None:
    """Raises BadInputError, before anything runs, where the export could not be pushed after training."""
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
    """Pushes a whole export, card included; rank 0 does, the others wait over the host. Every rank calls this.

    Raises:
        HubError: on every rank, where the hub cannot be reached or refuses.
    """
    name = settings.push_to_hub
    if name is None:
        return
    console = Terminal(quiet=ranks.rank() != 0)
    with Pass(console, f"pushing the export to {name}"):
        address = ranks.on_first_rank(lambda: _pushed(name, settings.hub_private, folder))
    console.print(f"pushed to {address}", markup=False)


def _pushed(name: str, private: bool, folder: Path) -> str:
    """The address of the commit that holds the folder's files."""
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        # An existing repository keeps its visibility, whatever is asked.
        if private and not api.model_info(name).private:
            raise HubError(
                f"export.push_to_hub: {name!r} is on the hub already, and public; set export.hub_private=false to push "
                f"there, or name another. The export was not pushed; it is whole in {str(folder)!r}"
            )
        message = "Push an export of finetune-toolkit"
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=WEIGHTS))
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
    """The hub's own words where it has answered; those of the library are about a request's number and address."""
    if not isinstance(error, HfHubHTTPError):
        return in_words(error)
    said = error.server_message or first_line(error)
    meaning = {401: "the token is missing or wrong", 403: "the token may not write there"}
    status = error.response.status_code
    return f"HTTP {status}: {said.splitlines()[0]}" + (f" ({meaning[status]})" if status in meaning else "")
