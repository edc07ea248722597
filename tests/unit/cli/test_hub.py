"""A hub that cannot be reached: said at once, and nothing is tried again and again."""

from __future__ import annotations

import http.server
import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.refusals import finetune

from toolkit.cli.shared import hub
from toolkit.cli.shared.hub import OFFLINE, settle_hub
from toolkit.recipe.recipe import Recipe


def recipe(model: dict[str, Any], train: str = "a.jsonl") -> Recipe:
    values = {
        "model": model,
        "data": {"train": train, "max_length": 32},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"output_dir": "out", "max_steps": 1},
    }
    return Recipe.from_mapping(values)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a hub that nobody answers for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("HTTP_PROXY", "http_proxy", OFFLINE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(OFFLINE, "")  # taken back after the test, whatever is set meanwhile
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a hub that answers is asked."""
    asked: list[str] = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv(OFFLINE, "")
    yield asked
    server.shutdown()
    server.server_close()


def test_the_command_refuses_it_well(endpoint: str, tmp_path: Any) -> None:
    assert (
        finetune("quickstart", "model.config=null", "model.name_or_path=some/model").problems("model.name_or_path")
        == []
    )


def test_without_the_hub_the_cache_is_used(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"name_or_path": "some/model", "revision": "v1", "tokenizer": "other/one"}
    settle_hub(recipe(model, train="some/rows"))
    assert os.environ[OFFLINE] == "1", "for the libraries, which are imported later, and for other ranks"
    looks, warning = capsys.readouterr().err.splitlines()
    assert looks == f"looking on {endpoint} for some/model, other/one, some/rows"
    assert warning.startswith(f"warning: {endpoint} cannot be reached ([Errno 111] Connection refused); the cache is")
    settle_hub(recipe(model))
    assert capsys.readouterr().err == "", "offline, nothing is asked"


def test_a_hub_that_answers_is_left_to_its_library(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle_hub(recipe({"name_or_path": "some/model"}))
    assert len(asked) == 1
    assert os.environ[OFFLINE] == ""
    assert capsys.readouterr().err.startswith("looking on http")
    monkeypatch.setenv("RANK", "3")
    settle_hub(recipe({"name_or_path": "some/model"}))
    assert capsys.readouterr().err == "", "one rank speaks"
    settle_hub(recipe({"name_or_path": "./folder"}))
    settle_hub(recipe({"config": {"model_type": "llama"}, "train_tokenizer_vocab_size": 300}))
    assert len(asked) == 2, "for what is here nothing is asked"


def test_a_hub_that_never_answers(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        settle_hub(recipe({"name_or_path": "some/model"}))
    assert re.search(r"no answer within 0\.2 s|timed out", capsys.readouterr().err)
    assert os.environ[OFFLINE] == "1"
