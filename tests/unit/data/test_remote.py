"""toolkit.data.rows.files: rows in stores and on web servers, their copies here, and what is told."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
from support.cases import cases

from toolkit.data import build
from toolkit.data.rows.files import expand_files, local_copies
from toolkit.data.tokens import tokenizer
from toolkit.errors import DataError, RecipeError
from toolkit.paths import file_name, without_query
from toolkit.recipe.recipe import Recipe, anchor_paths
from toolkit.recipe.schema import DataSection

TABLES = cases(__file__)

TEXTS = [f"line number {i} of the story about a fox and a king" for i in range(20)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    local_copies.cache_clear()
    yield
    local_copies.cache_clear()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """The address of a web server, the folder that it serves, and the files that were fetched from it.

    It answers no more once the file `down` is there, and refuses once `closed` is.
    """
    folder, fetched = tmp_path / "web", []
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_HEAD(self) -> None:
            if not self._is_out():
                super().do_HEAD()

        def do_GET(self) -> None:
            if not self._is_out():
                fetched.append(self.path)
                super().do_GET()

        def _is_out(self) -> bool:
            if (folder / "closed").exists():
                self.send_error(403)
                return True
            return (folder / "down").exists()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder, fetched
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def built(cache: Path, *sources: str, **fields: Any) -> tuple[list[list[int]], str]:
    data = DataSection.model_validate({"train": list(sources), "max_length": 16, "cache_dir": str(cache), **fields})
    made = build.build(data, tokenizer._train_byte_pairs(iter(TEXTS), 320), 0)
    return made.train.batch(range(len(made.train)))["input_ids"].tolist(), made.fingerprint


def test_rows_of_a_url_are_those_of_the_file(web: Any, memory: Any, tmp_path: Path) -> None:
    address, folder, _ = web
    (folder / "rows.jsonl").write_text(LINES)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    datasets.Dataset.from_list([{"text": text} for text in TEXTS]).to_parquet(folder / "rows.parquet")
    expected = built(tmp_path / "a", str(folder / "rows.jsonl"))
    assert built(tmp_path / "b", f"{address}/rows.jsonl") == expected, "samples, and the fingerprint that a resume asks"
    assert built(tmp_path / "c", f"{address}/rows.jsonl?version=a-secret") == expected
    assert built(tmp_path / "c", f"{address}/packed.jsonl.gz")[0] == expected[0]
    assert built(tmp_path / "d", f"{address}/rows.parquet")[0] == expected[0]
    memory.pipe("/rows/1.jsonl", LINES[: LINES.index("\n") + 1].encode())
    memory.pipe("/rows/2.jsonl", LINES[LINES.index("\n") + 1 :].encode())
    assert built(tmp_path / "e", "memory://rows/*.jsonl")[0] == expected[0]
    assert built(tmp_path / "f", "memory://rows/1.jsonl", "memory://rows/2.jsonl")[0] == expected[0]


def test_a_file_is_fetched_once_and_again_when_it_changes(
    web: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, folder, fetched = web
    (folder / "rows.jsonl").write_text(LINES)
    url = f"{address}/rows.jsonl"
    (first,) = expand_files(url, "data.train")
    local_copies.cache_clear()  # as in another process
    assert expand_files(url, "data.train") == [first]
    assert len(fetched) == 1
    (folder / "rows.jsonl").write_text(LINES + LINES)
    assert expand_files(url, "data.train") == [first], "one process reads one state"
    local_copies.cache_clear()
    (second,) = expand_files(url, "data.train")
    assert second != first
    assert (first.read_text(), second.read_text()) == (LINES, LINES + LINES)
    assert capsys.readouterr().err == ""


def test_the_last_copy_is_read_where_nothing_answers(
    web: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder, _ = web
    (folder / "rows.jsonl").write_text(LINES)
    (copy,) = expand_files(f"{address}/rows.jsonl", "data.train")
    local_copies.cache_clear()

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr("toolkit.data.rows.files.url_to_fs", unreachable)
    assert expand_files(f"{address}/rows.jsonl", "data.train") == [copy]
    assert "rows.jsonl cannot be reached (ConnectionError: no route); its copy of 20" in capsys.readouterr().err
    local_copies.cache_clear()
    with pytest.raises(DataError, match=r"other\.jsonl' cannot be read: ConnectionError: no route"):
        expand_files(f"{address}/other.jsonl", "data.train")
    copy.unlink()
    with pytest.raises(DataError, match="no route"):
        expand_files(f"{address}/rows.jsonl", "data.train")


@pytest.mark.parametrize(("out", "why"), [("down", "ServerDisconnectedError"), ("closed", "403")])
def test_a_server_that_does_not_give_a_file_has_it_all_the_same(
    web: Any, out: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address, folder, _ = web
    (folder / "rows.jsonl").write_text(LINES)
    (copy,) = expand_files(f"{address}/rows.jsonl", "data.train")
    local_copies.cache_clear()
    (folder / out).touch()
    assert expand_files(f"{address}/rows.jsonl", "data.train") == [copy]
    told = capsys.readouterr().err
    assert "rows.jsonl cannot be reached" in told
    assert why in told
    with pytest.raises(DataError, match=rf"other\.jsonl' cannot be read: .*{why}"):
        expand_files(f"{address}/other.jsonl", "data.train")


def test_half_a_download_is_no_copy(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder, _ = web
    (folder / "rows.jsonl").write_text(LINES)
    from fsspec.implementations.http import HTTPFileSystem

    async def cut(self: Any, name: str, local: str, *_: Any, **__: Any) -> None:
        Path(local).write_text(LINES[:30])
        raise ConnectionResetError("cut")

    HTTPFileSystem.clear_instance_cache()
    with monkeypatch.context() as patch:
        patch.setattr(HTTPFileSystem, "_get_file", cut)
        with pytest.raises(DataError, match="ConnectionResetError: cut"):
            expand_files(f"{address}/rows.jsonl", "data.train")
    HTTPFileSystem.clear_instance_cache()
    (copy,) = expand_files(f"{address}/rows.jsonl", "data.train")
    assert copy.read_text() == LINES


@pytest.mark.parametrize(("url", "told"), TABLES["UNREAD"])
def test_urls_that_cannot_be_read(web: Any, memory: Any, url: str, told: str) -> None:
    address, folder, _ = web
    for name in ("rows.xls", "empty.jsonl"):
        (folder / name).write_text("" if name == "empty.jsonl" else "a")
    memory.pipe("/rows/1.jsonl", LINES.encode())
    with pytest.raises(DataError, match=told) as found:
        expand_files(url.format(web=address), "data.train")
    assert "a-secret" not in str(found.value)


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("No module named 's3fs'")

    monkeypatch.setattr("toolkit.data.rows.files.url_to_fs", missing)
    with pytest.raises(DataError, match=r"driver of s3:// cannot be imported .*pip install -e '.*\[s3\]'"):
        expand_files("s3://bucket/rows.jsonl", "data.train")


def test_credentials_stand_in_no_recipe() -> None:
    with pytest.raises(ValueError, match="holds credentials; remove them") as found:
        DataSection.model_validate({"train": "https://me:hidden@host/rows.jsonl", "max_length": 16})
    assert "hidden" not in str(found.value).partition("[")[0]


def test_a_signed_url_is_refused_and_a_plain_query_is_not() -> None:
    """It stood in recipe.yaml, every manifest and the tracker; a run that resumed had to sign it again."""
    signed = [
        "https://b.s3.amazonaws.com/rows.jsonl?X-Amz-Algorithm=AWS4&X-Amz-Signature=hidden",
        "https://storage.googleapis.com/b/rows.jsonl?x-goog-signature=hidden",
        "https://a.blob.core.windows.net/c/rows.jsonl?sv=2024&sig=hidden",
        "https://c.cloudfront.net/rows.jsonl?Expires=1&Key-Pair-Id=hidden",
        "https://raw.githubusercontent.com/o/r/main/rows.jsonl?token=hidden",
        "https://host/rows.jsonl?api_key=hidden",
        "https://host/rows.jsonl#access_token=hidden",
        "https://me:hidden@host/rows.jsonl",
        "s3://key:hidden@bucket/rows.jsonl",
    ]
    wrong = []
    for url in signed:
        try:
            Recipe.load("quickstart", [f"data.train={url}"])
            wrong.append(url)
        except RecipeError as error:
            wrong += [str(error)] if "hidden" in str(error) else []
    plain = ["https://host/rows.jsonl?download=true", "https://host/r.jsonl?ref=main#part", "s3://b/r#1/rows?.jsonl"]
    for url in plain:
        Recipe.load("quickstart", {"data.train": url})
    assert not wrong
    assert [without_query(url) for url in plain] == [
        "https://host/rows.jsonl",
        "https://host/r.jsonl",
        "s3://b/r#1/rows",
    ]
    assert [file_name(url) for url in ("https://host/r.jsonl#a/b", "s3://b/r#1.jsonl")] == ["r.jsonl", "r#1.jsonl"]
    with pytest.raises(DataError) as found:
        expand_files("https://127.0.0.1:1/rows.jsonl?download=true#hidden", "data.train")
    assert "hidden" not in str(found.value)


def test_a_url_is_relative_to_nothing(tmp_path: Path) -> None:
    values = {"data": {"train": ["s3://bucket/rows.jsonl", "rows.jsonl"]}}
    anchor_paths(values, tmp_path)
    assert values["data"]["train"] == ["s3://bucket/rows.jsonl", str(tmp_path / "rows.jsonl")]
