"""Asks a server that speaks OpenAI's protocol: which models it has, the tokens of a prompt, and greedy answers."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from toolkit.errors import BadInputError, in_words
from toolkit.paths import parse_json

KEY = "OPENAI_API_KEY"

LIST_SECONDS, ANSWER_SECONDS = 10.0, 300.0
"""Longest waits for a server that sends nothing: for the list of its models, and for an answer."""

MOST_BYTES, SHOWN = 2**24, 200
"""Most bytes that are read of an answer, and characters of it that an error shows."""


class _AsItIs(urllib.request.HTTPErrorProcessor):
    """Passes errors on as answers, and redirections too: the key would go along to another address."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


@dataclass(frozen=True)
class Reply:
    """What a server says of an answer; None for what it does not tell.

    Attributes:
        prompt: the tokens of the prompt.
        num_prompt: their number.
        ids: the tokens of the answer.
        text: the answer, with special tokens if the server writes them.
        logprobs: the log-probability of each of its tokens, in nats.
        stopped: whether a token ended it, and not the limit of tokens.
    """

    prompt: list[int] | None
    num_prompt: int | None
    ids: list[int] | None
    text: str
    logprobs: list[float]
    stopped: bool


class Server:
    """A server at an address, with or without `/v1` at its end; the key is in OPENAI_API_KEY.

    Raises:
        BadInputError: by every method, if there is no such server or it refuses what is asked.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadInputError(f"URL: {url!r} is no address; it begins with http:// or https://")
        self.root, self._key = url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY, "").strip()
        self._open = urllib.request.build_opener(_AsItIs).open

    def model(self, name: str | None) -> str:
        """Returns the name of a model that the server has; None takes its only one."""
        found = self._call("/v1/models", None, LIST_SECONDS) or {}
        names = [str(each["id"]) for each in found.get("data") or [] if isinstance(each, dict) and "id" in each]
        if name in names or (name is None and len(names) == 1):
            return name or names[0]
        has = f"{self.root} has {', '.join(map(repr, names)) or 'no model'}"
        raise BadInputError(f"--model: {has}; name one of them" if name is None else f"--model: no {name!r}: {has}")

    def answer(self, model: str, asked: str | dict[str, Any], max_tokens: int) -> Reply:
        """Returns the greedy answer to a text, or to `messages` with their `tools` and `chat_template_kwargs`."""
        chat = (
            {"prompt": asked, "logprobs": 1}
            if isinstance(asked, str)
            else {**asked, "logprobs": True, "top_logprobs": 1}
        )
        body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **chat}
        path = "/v1/completions" if isinstance(asked, str) else "/v1/chat/completions"
        try:
            return self._reply(self._call(path, body) or {}, asked)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"{self.root}{path}: no answer of OpenAI's protocol: {in_words(error)}") from error

    def _reply(self, found: dict[str, Any], asked: str | dict[str, Any]) -> Reply:
        choice = found["choices"][0]
        logs = choice.get("logprobs") or {}
        # llama.cpp lists the tokens of a completion as those of a conversation.
        listed = logs.get("content") or [
            {"token": token, "logprob": value}
            for token, value in zip(logs.get("tokens") or [], logs.get("token_logprobs") or [], strict=True)
        ]
        ids = choice.get("token_ids") or [each["id"] for each in listed if "id" in each]
        # Parsers take thoughts and calls out of the words of an answer, but not out of its tokens.
        pieces = [bytes(each.get("bytes") or each["token"].encode()) for each in listed]
        text = b"".join(pieces).decode("utf-8", "replace")
        words = choice.get("text", (choice.get("message") or {}).get("content"))
        prompt = found.get("prompt_token_ids") or choice.get("prompt_token_ids") or self._prompt(asked)
        return Reply(
            prompt,
            (found.get("usage") or {}).get("prompt_tokens") if prompt is None else len(prompt),
            ids or None,
            text or words or "",
            [float(each["logprob"]) for each in listed],
            choice["finish_reason"] != "length",
        )

    def _prompt(self, asked: str | dict[str, Any]) -> list[int] | None:
        """Returns the tokens of a prompt, which llama.cpp's server tells by itself."""
        given = {"prompt": asked} if isinstance(asked, str) else self._call("/apply-template", asked, missing=True)
        if not given or not isinstance(given.get("prompt"), str):
            return None
        body = {"content": given["prompt"], "add_special": True, "parse_special": True}
        tokens = (self._call("/tokenize", body, missing=True) or {}).get("tokens")
        return tokens if isinstance(tokens, list) else None

    def _call(
        self, path: str, body: dict[str, Any] | None, seconds: float = ANSWER_SECONDS, missing: bool = False
    ) -> dict[str, Any] | None:
        """Returns what the server says, or None if it need not have what is asked."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        content, where = None if body is None else json.dumps(body).encode(), self.root + path
        said, problem, hint = b"", "sends nothing", "start the server, or name the address that it prints"
        try:
            request = urllib.request.Request(where, data=content, headers=headers)  # noqa: S310 - see __init__
            with self._open(request, timeout=seconds) as answer:
                said, problem = answer.read(MOST_BYTES), f"HTTP {answer.status}"
            if answer.status == 200 and isinstance(found := parse_json(said), dict):
                return found
            hint = f"set {KEY} to the server's key" if answer.status in (401, 403) else hint
        except TimeoutError:
            pass
        except (OSError, HTTPException, ValueError) as error:
            problem = in_words(error)
        if missing:
            return None
        shown = " ".join(said.decode("utf-8", "replace").split())[:SHOWN]
        shown = shown.replace(self._key, "***") if self._key else shown
        raise BadInputError(f"URL: {where}: {problem}{f' ({shown})' if shown else ''}; {hint}")
