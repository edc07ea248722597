"""Pushing an export: private, by rank 0, after everything else; what the hub refuses loses nothing."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.hub_stand_in import TOKEN, hub
from support.ranks import meet, run_on_ranks
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama

from toolkit.recipe.recipe import Recipe


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def recipe_of(folder: Path, name: str, **export: Any) -> Any:
    values = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", max_steps=1)
    return Recipe.from_mapping({**values, "export": {"push_to_hub": "me/notes", **export}})


def pushes(folder: Path, address: str, port: int) -> dict[str, Any]:
    """What came of the same recipe, again and again, while the hub behaves otherwise."""
    from toolkit import finetune
    from toolkit.errors import ToolkitError

    huggingface_hub.constants.HF_HUB_OFFLINE = False
    huggingface_hub.constants.ENDPOINT = address
    os.environ["HF_TOKEN"] = TOKEN
    found: dict[str, Any] = {}

    def attempt(name: str, recipe: Recipe, **change: Any) -> None:
        meet()
        if os.environ["RANK"] == "0":
            asked = urllib.request.Request(f"{address}/api/told", data=json.dumps(change).encode())
            urllib.request.urlopen(asked).read()
        meet()
        try:
            found[name] = finetune(recipe).metrics
        except ToolkitError as error:
            found[name] = (type(error).__name__, error.exit_code, str(error))

    notes = recipe_of(folder, "notes")
    if os.environ["RANK"] == "0":  # the others need none
        del os.environ["HF_TOKEN"]
    attempt("without a token", notes)
    found["began"] = (folder / "notes").exists()
    os.environ["HF_TOKEN"] = TOKEN
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    attempt("offline", notes)
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    attempt("forbidden", notes, refuse={"repos/create": [403, "You have no right to create a model under me"]})
    attempt("quota", notes, refuse={"/commit/": [403, "Private repository storage limit reached"]})
    huggingface_hub.constants.ENDPOINT = f"http://127.0.0.1:{port}"
    attempt("unreachable", notes)
    huggingface_hub.constants.ENDPOINT = address
    os.environ["HF_TOKEN"] = "hf_wrong"
    attempt("wrong token", notes)
    os.environ["HF_TOKEN"] = TOKEN
    attempt("public", notes, private=False)
    # An adapter whose files stayed would be what transformers loads, and a template beside the new tokenizer its own.
    names = ("model-00001-of-00002.safetensors", "adapter_config.json", "base.json", "chat_template.jinja")
    attempt("pushed", notes, private=True, files={**dict.fromkeys(names, "old"), "notes.txt": "mine"})
    return found


def test_an_export_is_pushed_and_refusals_lose_nothing(tmp_path: Path) -> None:
    texts = make_texts(30)
    save_llama(tmp_path / "model", texts, tied=True)
    write_rows(tmp_path / "texts.jsonl", ({"text": text} for text in texts))
    export = tmp_path / "notes/export"
    with hub() as server:
        found = run_on_ranks(pushes, 2, tmp_path, server.address, closed_port())
        assert [rank["began"] for rank in found] == [False, False]
        for rank in found:
            for name, says in (("without a token", "hf auth login"), ("offline", "HF_HUB_OFFLINE")):
                assert rank[name][:2] == ("BadInputError", 2), name
                assert says in rank[name][2]
            refused = {
                "forbidden": "HTTP 403: You have no right to create a model under me (the token may not write there)",
                "quota": "HTTP 403: Private repository storage limit reached",
                "unreachable": "ConnectError",
                "wrong token": "HTTP 401: Invalid username or password. (the token is missing or wrong)",
                "public": "set export.hub_private=false",
            }
            for name, says in refused.items():
                kind, code, text = rank[name]
                assert (kind, code) == ("HubError", 1), rank[name]
                assert says in text
                assert str(export) in text
                assert TOKEN not in text
            assert [record["step"] for record in rank["pushed"] if record["split"] == "train"] == [1]
        assert server.commits == 1, "the run was trained once, refused five times, and pushed by rank 0 alone"
        assert server.private
        written = {path.name: path.read_bytes() for path in export.iterdir()}
        assert server.files == {**written, "notes.txt": b"mine"}, "files of an old export are gone"
        assert b"# notes" in server.files["README.md"], "the model card"


def refused_by_the_hub() -> list[str]:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    names = ["a/b", "me/my.model_2-x", "-me/b", "me/b-", "me/b.git", "me/a--b", "me/a..b", "me/é", "me/" + "a" * 97]
    found = []
    for name in names:
        try:
            validate_repo_id(name)
        except HFValidationError:
            found.append(name)
    assert found == names[2:], "the hub's library judges so"
    return found


def test_names_that_the_hub_refuses(tmp_path: Path) -> None:
    for name in (*refused_by_the_hub(), "model", "a/b/c", ""):
        with pytest.raises(Exception, match=r"export.push_to_hub: found .*needs NAMESPACE/NAME"):
            recipe_of(tmp_path, "notes", push_to_hub=name)


def test_a_good_name_and_a_setting_without_effect(tmp_path: Path) -> None:
    assert recipe_of(tmp_path, "notes", push_to_hub="me/my.model_2-x").export.hub_private
    with pytest.raises(Exception, match=r"hub_private false has no effect without export.push_to_hub"):
        recipe_of(tmp_path, "notes", push_to_hub=None, hub_private=False)
