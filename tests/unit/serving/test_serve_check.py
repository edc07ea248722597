"""`toolkit serve-check` against a server that answers by transformers, and against what is none."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.texts import make_texts, write_rows
from support.tiny import VOCAB_SIZE, llama, recipe_values
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import BadInputError

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.to }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = ["the king", "queen of hearts", "by the river", "a fox who sang of bread"]
SIZES = {"max_position_embeddings": 256, "initializer_range": 0.3}
TABLES = cases(__file__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with an export, whose answer to the second row ends after three tokens, and rows held out."""
    run = tmp_path_factory.mktemp("checked")
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    tokenizer.bos_token, tokenizer.chat_template = tokenizer.pad_token, TEMPLATE
    tokenizer.save_pretrained(run / "export")
    model = llama(seed=1, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, **SIZES)
    asked = [[{"role": "user", "content": each}] for each in ASKED]
    prompt = tokenizer.apply_chat_template(asked[1], add_generation_prompt=True, return_dict=False)
    model.generation_config.eos_token_id = greedy(model, prompt, 3, None)[0][-1]
    model.save_pretrained(run / "export")
    said = [{"messages": [*each, {"role": "assistant", "content": "so"}]} for each in asked]
    rows = write_rows(run / "rows.jsonl", said)
    (run / "recipe.yaml").write_text(json.dumps(recipe_values(run / "export", rows, run, run / "cache")))
    splits = {1: "train", 2: "validation", 4: "validation"}
    shown = [{"row": f"rows.jsonl:{number}", "split": split} for number, split in splits.items()]
    (run / "data_report.json").write_text(json.dumps({"examples": shown}))
    return run


def greedy(model: Any, prompt: list[int], most: int, ends: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, by transformers."""
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "eos_token_id": ends}
    out = model.generate(torch.tensor([prompt]), max_new_tokens=most, **how)
    return out.sequences[0, len(prompt) :].tolist(), [float(each.log_softmax(-1).max()) for each in out.logits]


class Served:
    """What a server answers; tests change its parts."""

    def __init__(self, folder: Path, tells: bool = True) -> None:
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.ends: set[int] = {self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id}
        self.change: Callable[[list[int]], list[int]] = lambda ids: ids
        self.tells, self.requests = tells, list[Any]()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if not path.endswith("/completions"):
            return (200 if "models" in path else 404), {"data": [{"id": "tuned"}]}
        self.requests.append(json.loads(json.dumps(body)))
        if "prompt" in body:
            prompt = self.tokenizer(body["prompt"]).input_ids
        else:
            for call in (call for each in body["messages"] for call in each.get("tool_calls", [])):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            settings = {"add_generation_prompt": True, "return_dict": False, "tools": body.get("tools")}
            prompt = self.change(self.tokenizer.apply_chat_template(body["messages"], **settings))
        ids, found = greedy(self.model, prompt, body["max_tokens"], [*self.ends])
        stopped = ids[-1] in self.ends
        text = self.tokenizer.decode(ids[: len(ids) - stopped], skip_special_tokens=True)
        choice = {"finish_reason": "stop" if stopped else "length", "text": text, "message": {"content": text}}
        if self.tells:
            listed = [{"token": "", "logprob": each} for each in found]
            choice |= {"token_ids": ids, "prompt_token_ids": prompt, "logprobs": {"content": listed}}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}


@contextmanager
def serving(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[tuple[str, list[str | None]]]:
    """Yields the address of a server, and the keys that it is sent."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            content = self.rfile.read(int(self.headers["Content-Length"] or 0))
            status, found = answer(self.path, json.loads(content or "null"))
            self.send_response(status)
            self.send_header("Location", found if status == 302 else "")
            self.end_headers()
            self.wfile.write((found if isinstance(found, str) else json.dumps(found)).encode())

        do_POST = do_GET  # noqa: N815 (its name in http.server)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", keys
    server.shutdown()
    server.server_close()


def invoke(url: str, source: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["serve-check", url, str(source), *more])


def refusal(url: str, source: Path) -> str:
    found = invoke(url, source).exception
    assert isinstance(found, BadInputError)
    return str(found)


CHANGES: dict[str, Callable[[Served], dict[str, Any]]] = {
    "": lambda _: {},
    "BOS twice": lambda _: {"change": lambda ids: [ids[0], *ids]},
    "BOS missing": lambda _: {"change": lambda ids: ids[1:]},
    "template": lambda _: {"change": lambda ids: [*ids[:-1], ids[0], ids[0]]},
    "stop token": lambda served: {"ends": {served.tokenizer.eos_token_id}},
    "dtype or quantisation": lambda served: {"model": served.model.to(torch.bfloat16).float()},
    "another model": lambda served: {"model": llama(seed=2, vocab_size=len(served.tokenizer), **SIZES).eval()},
}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("cause", CHANGES)
def test_each_cause_is_named(cause: str, tells: bool, run: Path) -> None:
    served = Served(run / "export", tells)
    for name, value in CHANGES[cause](served).items():
        setattr(served, name, value)
    with serving(served.answer) as (url, _):
        done = invoke(f"{url}/v1/", run, "--json")
    assert done.exit_code == bool(cause)
    found = json.loads(done.stdout)
    if not tells and cause in ("dtype or quantisation", "another model"):
        cause = "another model or quantisation"
    assert [each.partition(":")[0] for each in found["causes"]] == [cause][: bool(cause)], found
    assert [row["row"] for row in found["rows"]] == ["rows.jsonl:2", "rows.jsonl:4"]
    assert [each["messages"][0]["content"] for each in served.requests] == [ASKED[1], ASKED[3]]
    assert cause or all(row["same"] == row["tokens"] and row["prompt"] and row["stop"] for row in found["rows"])


@pytest.mark.parametrize("case", TABLES["NO_SERVER"])
def test_what_is_no_such_server(case: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr("toolkit.serving.client.LIST_SECONDS", 0.5)
    status, content, expected = TABLES["NO_SERVER"][case]
    with serving(lambda *_: (status or 200 + threading.Event().wait(3), content)) as (url, keys):
        said = refusal(url, run)
    assert (expected in said, "secret" in said, keys[0]) == (True, False, "Bearer sk-secret")


def test_nobody_else_is_asked(run: Path) -> None:
    with serving(lambda *_: (200, {})) as (other, keys), serving(lambda *_: (302, other)) as (url, _):
        assert "HTTP 302" in refusal(url, run)
    assert keys == []
    assert "Connection refused" in refusal(url, run)
    assert "begins with http" in refusal("file:///etc/passwd", run)


def test_rows_as_they_are_asked(run: Path, tmp_path: Path) -> None:
    """Tools and calls, and a text without a template."""
    write_rows(tmp_path / "rows.jsonl", [TABLES["WITH_CALLS"]])
    (tmp_path / "asked.txt").write_text("the queen\n")
    plain = tmp_path / "plain/export"
    shutil.copytree(run / "export", plain, ignore=shutil.ignore_patterns("chat_template.jinja"))
    served = Served(run / "export")
    with serving(served.answer) as (url, _):
        assert invoke(url, run, "--rows", str(tmp_path / "rows.jsonl")).exit_code == 0
        assert "in no run's folder" in refusal(url, plain)
        done = invoke(url, plain, "--rows", str(tmp_path / "asked.txt"), "--max-new-tokens", "4")
    assert served.requests[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"to": "the river"}'
    assert (served.requests[1]["prompt"], served.requests[1]["max_tokens"]) == ("the queen", 4)
    assert "prompts: 1 of 1 the same; the server tells of 1\ngreedy tokens: 4 of 4 the same\n" in done.stdout
