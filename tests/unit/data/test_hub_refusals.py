"""What the hub refuses, and what is in the way to it: each its own sentence, with what to do about it."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants
from support.cases import cases
from support.hub_stand_in import TOKEN, Hub, hub
from support.refusals import finetune, toolkit

from toolkit import errors
from toolkit.data.rows.files import local_copies
from toolkit.data.rows.hub_refusals import download, hub_error
from toolkit.data.rows.sources import open_source
from toolkit.data.tokens.tokenizer import load as load_tokenizer
from toolkit.errors import BadInputError, ToolkitError
from toolkit.generation.text.load import ModelPlace, tokenizer_of
from toolkit.model.load import NoTokens, load_without_weights
from toolkit.recipe.schema import DataSection, ModelSection, SourceSection

NAME = "someone/thing"
ROWS = DataSection(train=[SourceSection(path="-")], max_length=8)

LOADERS: dict[str, tuple[str, str, Callable[[], object]]] = {
    "a model": (
        "model.name_or_path",
        "model",
        lambda: load_without_weights(ModelSection(name_or_path=NAME), NoTokens()),
    ),
    "its files": ("model.name_or_path", "model", lambda: download(NAME, "model.name_or_path", None, ["*.json"])),
    "a tokenizer": (
        "model.tokenizer",
        "tokenizer",
        lambda: load_tokenizer(ModelSection(config={"model_type": "llama"}, tokenizer=NAME), ROWS),
    ),
    "a data set": ("data.train", "data set", lambda: open_source(SourceSection(path=NAME), "data.train")),
    "its file": ("data.train", "data set", lambda: local_copies(f"hf://datasets/{NAME}/rows.jsonl", "data.train")),
    "a model that generates": (
        "SOURCE",
        "model",
        lambda: tokenizer_of(ModelPlace(NAME, on_hub=True), ModelPlace(NAME, on_hub=True)),
    ),
}
"""What is loaded -> the field that names it, its kind, and what loads it."""


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in that the libraries take for the hub, while nothing of it is in the cache."""
    with hub() as server:
        take_for_hub(server.address, monkeypatch, tmp_path)
        yield server


def take_for_hub(address: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")


def told(load: Callable[[], object]) -> ToolkitError:
    huggingface_hub.HfFileSystem.clear_instance_cache()
    local_copies.cache_clear()
    with pytest.raises(ToolkitError) as found:
        load()
    return found.value


ANSWERS: list[tuple[list[Any], str | None, str, str]] = cases(__file__)["ANSWERS"]
"""What the hub answers, the token of this machine, the error, and a part of its sentence."""


def test_each_refusal_has_its_own_sentence(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for what, (field, kind, load) in LOADERS.items():
        page = f"{there.address}/{'datasets/' if kind == 'data set' else ''}{NAME}"
        for refusal, token, error, sentence in ANSWERS:
            if token is None:
                monkeypatch.delenv("HF_TOKEN", raising=False)
            else:
                monkeypatch.setenv("HF_TOKEN", token)
            there.refuse = {"": tuple(refusal)}
            found = told(load)
            parts = (field.partition(".")[0], sentence.format(name=repr(NAME), kind=kind, page=page))
            if not isinstance(found, getattr(errors, error)) or any(part not in str(found) for part in parts):
                wrong.append((what, refusal, token, type(found).__name__, str(found)))
    assert wrong == []


def test_what_is_in_the_way_to_the_hub(there: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = []
    for what, (field, kind, load) in LOADERS.items():
        command = (
            f"run `hf download {NAME}{' --repo-type dataset' if kind == 'data set' else ''}` where there is a network"
        )
        for name, sentence in (
            (
                "offline",
                f"'{NAME}' is not in the hub's cache, and {there.address} cannot be reached (HF_HUB_OFFLINE is",
            ),
            ("unreachable", f"'{NAME}' is not in the hub's cache, and http://127.0.0.1:9 cannot be reached ("),
        ):
            with monkeypatch.context() as patch:
                if name == "offline":
                    patch.setattr(constants, "HF_HUB_OFFLINE", True)
                    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
                else:
                    take_for_hub("http://127.0.0.1:9", patch, tmp_path)
                found = told(load)
            if not isinstance(found, BadInputError) or any(
                part not in str(found) for part in (field, sentence, command)
            ):
                wrong.append((what, name, str(found)))
    assert wrong == []


def test_what_the_disk_is_in_the_way_of() -> None:
    full, locked = OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "Permission denied")
    for error in (full, locked):
        outer = OSError("We couldn't connect to 'https://huggingface.co' to load the files")
        outer.__cause__ = error
        told = f"cannot be downloaded to {constants.HF_HUB_CACHE}: {error.strerror}"
        assert told in str(hub_error(outer, "model.name_or_path", NAME))
    # What does not come from the hub keeps the sentence of who loads.
    assert hub_error(ValueError("hidden_size is not a multiple"), "model.name_or_path", NAME) is None
    assert hub_error(full, "model.name_or_path", "./folder") is None
    assert hub_error(full, "data.train", "rows.jsonl", "data set") is None


def test_the_commands_say_it_and_end_as_for_bad_input(there: Hub, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a b c"}) + "\n")
    given = ("pretrain", "model.config=null", "model.train_tokenizer_vocab_size=null", f"model.name_or_path={NAME}")
    there.refuse = {"someone": (403, "Access is restricted", "GatedRepo")}
    wrong = []
    for outcome in (
        toolkit("init", NAME, str(rows), "--to", str(tmp_path / "r.yaml")),
        toolkit("plan", *given),
        toolkit("data", *given),
        toolkit("generate", NAME, "--prompt", "a"),
        toolkit("verify", "quickstart", *given[1:]),
        finetune(*given),
        toolkit("data", "pretrain", f"data.train={NAME}"),
    ):
        if (
            outcome.problems(f"'{NAME}' is gated on the hub")
            or f"{NAME}, and wait until it is granted" not in outcome.told
        ):
            wrong.append(outcome)
    assert wrong == []
