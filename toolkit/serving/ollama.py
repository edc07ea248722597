"""Writes Ollama's Modelfile: the GGUF file, the chat template in Ollama's language, and where answers stop.

Ollama ignores a chat template in a GGUF file that is not close to one of its own list, and then writes none. Its
templates are in Go's language, so ours is derived from what the chat template writes, and compared with it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from toolkit.data.layouts.template_arguments import writes_date
from toolkit.data.rows.examples import Message
from toolkit.data.templates.stops import configured_ends, turn_ends
from toolkit.data.templates.templates import rendered
from toolkit.data.tokens.tokenizer import bos_of

GGUF, MODELFILE, HALF = "model.gguf", "Modelfile", "\N{REPLACEMENT CHARACTER}"

SYSTEM, USERS, ANSWERS = "Systemword", ("Firstword", "Secondword", "Thirdword"), ("Onereply", "Tworeply")
"""Words that are found again in what a chat template writes."""


def write_modelfile(export: Path, folder: Path) -> list[str]:
    """Writes the Modelfile of a GGUF file in `folder`, of the model in `export`. Returns notes, a sentence each."""
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    lines, notes = [f"FROM ./{GGUF}"], []
    turns = Turns.of(tokenizer)
    if tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif turns is None:
        notes.append(
            "the chat template does more than put words around messages: write a TEMPLATE for Ollama into the Modelfile"
        )
    else:
        lines.append(f'TEMPLATE """{turns.in_go()}"""')
        if not turns.takes_system:
            notes.append(
                "the chat template takes no system message: the Modelfile puts one before the first user's, with a "
                "blank line between them"
            )
    has_settings = (export / "generation_config.json").is_file()
    ends = configured_ends(GenerationConfig.from_pretrained(export)) if has_settings else []
    ids = [*sorted(turn_ends(tokenizer) | ({tokenizer.eos_token_id} - {None})), *ends]
    for stop in dict.fromkeys(_text_of(tokenizer, each) for each in ids):
        # A text without letters is in every answer, and half a character in none.
        if stop and HALF not in stop and (stop.isprintable() or not stop.strip("\n")):
            # Ollama takes what is between the quotes as it is, and three of them over several lines.
            quotes = '"""' if stop.startswith(('"', "\n")) else '"'
            lines.append(f"PARAMETER stop {quotes}{stop}{quotes}")
        else:
            notes.append(f"answers do not stop at {stop!r} in Ollama: a Modelfile cannot hold it")
    (folder / MODELFILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return notes


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Returns what a token writes inside a text: an ordinary one has another spelling in the vocabulary."""
    if (added := tokenizer.added_tokens_decoder.get(token)) is not None:
        return str(added.content)
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode([*before, token]))[len(tokenizer.decode(before)) :]


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the messages of a conversation.

    Attributes:
        system: before a system message, which is the first.
        first: before a user's message that is the first.
        after_system: before a user's message that follows a system message.
        answer: before an assistant's message.
        after_answer: before a user's message that follows an assistant's.
        end: after the last message of a user, up to the beginning of the answer.
        takes_system: whether the chat template takes a system message.
    """

    system: str
    first: str
    after_system: str
    answer: str
    after_answer: str
    end: str
    takes_system: bool = True

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Turns | None:
        """Returns what a tokenizer's chat template writes, or None if it writes more than that, or has no template."""
        if tokenizer.chat_template is None or writes_date(tokenizer):
            return None
        plain, after_system = conversation(False, 3), conversation(True, 3)
        try:
            first, answer, after_answer, *_, end = _around(rendered(tokenizer, plain, prompt=True), plain)
            system, second, whole = first, "\n\n", ""
            with suppress(Exception):  # as below: some take no system message
                whole = rendered(tokenizer, after_system, prompt=True)
            if whole:
                system, second, *_ = _around(whole, after_system)
            found = cls(system, first, second, answer, after_answer, end, bool(whole))
            systems = (False, True) if whole else (False,)
            probes = [conversation(has_system, users) for has_system in systems for users in (1, 2, 3)]
            if any(found.write(probe) != rendered(tokenizer, probe, prompt=True) for probe in probes):
                return None
        except Exception:  # a template is a program, and may refuse a conversation in any way
            return None
        bos = bos_of(tokenizer, None)
        # llama.cpp puts it before the whole text if the tokenizer does.
        begin = "" if bos is None else str(tokenizer.convert_ids_to_tokens(bos))
        return replace(found, system=system.removeprefix(begin), first=first.removeprefix(begin))

    def write(self, messages: list[Message]) -> str:
        """Writes a conversation that ends with a user's message, as `in_go` does."""
        before = {
            ("", "system"): self.system,
            ("", "user"): self.first,
            ("system", "user"): self.after_system,
            ("user", "assistant"): self.answer,
            ("assistant", "user"): self.after_answer,
        }
        roles = ["", *(str(message["role"]) for message in messages)]
        texts = [
            before[pair] + str(message["content"]) for pair, message in zip(pairwise(roles), messages, strict=True)
        ]
        return "".join(texts) + self.end

    def in_go(self) -> str:
        """Returns a template of Ollama's, in one line: all its texts are quoted, so no space is trimmed."""
        system, first, second, answer, later, end = map(_quoted, astuple(self)[:6])
        user = _chosen({'eq $last ""': first, 'eq $last "system"': second}, later)
        before = _chosen({'eq .Role "system"': system, 'eq .Role "user"': user}, answer)
        after = _chosen({'eq $last "user"': end}, "")
        each = f"{before}{{{{ .Content }}}}{{{{ $last = .Role }}}}"
        return f'{{{{ $last := "" }}}}{{{{ range .Messages }}}}{each}{{{{ end }}}}{after}'


def conversation(has_system: bool, users: int) -> list[Message]:
    """Returns a conversation that ends with a user's message, of this many of them."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}] if has_system else []
    for number in range(users):
        messages.append({"role": "user", "content": USERS[number]})
        if number + 1 < users:
            messages.append({"role": "assistant", "content": ANSWERS[number]})
    return messages


def _around(text: str, messages: list[Message]) -> list[str]:
    """Returns the pieces before, between and after the messages of a text. Raises ValueError if one is missing."""
    pieces = []
    for message in messages:
        before, found, text = text.partition(str(message["content"]))
        if not found:
            raise ValueError(message["content"])
        pieces.append(before)
    return [*pieces, text]


def _quoted(text: str) -> str:
    """Returns an action of a Go template that writes a text: JSON's escapes are Go's, too.

    Ollama drops characters of a Modelfile that cannot be printed, such as a no-break space, unless they are escaped.
    """
    written = json.dumps(text, ensure_ascii=False)
    escaped = "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in written)
    return f"{{{{ {escaped} }}}}" if text else ""


def _chosen(texts: dict[str, str], otherwise: str) -> str:
    """Returns an action of a Go template that writes the text of the first condition that holds, or the other one."""
    first, *more = [f"if {condition} }}}}{text}" for condition, text in texts.items()]
    return "{{ " + "{{ else ".join([first, *more]) + f"{{{{ else }}}}{otherwise}{{{{ end }}}}"
