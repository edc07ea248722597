"""Compares what a server answers with what the export that it serves answers, and names the cause of a difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from toolkit.errors import BadInputError, counted
from toolkit.generation.text.command import quiet
from toolkit.generation.text.complete import HALF_CHARACTER, Prompt, before_stop, generated, room_of
from toolkit.generation.text.load import Loaded, load_model
from toolkit.generation.text.options import Sampling
from toolkit.generation.text.rows import encode_rows, read_rows
from toolkit.serving.client import Reply, Server
from toolkit.serving.held_out import held_out_rows, in_protocol

GAP, GAP_OF_16_BITS = 0.02, 0.1
"""Allowed difference of log-probabilities, in nats, if the export's weights are float32, and else."""

FAR = 0.5
"""Difference in nats that half of the rows of another model exceed; 16 bits and quantisation stay below it."""

LIKELY = 50
"""Number of the export's most likely tokens among which one is looked for that a server tells as text."""

TEMPLATE_MENDED = "serve the export's own: `toolkit help serving`, and for llama.cpp --jinja and a file of this export"
BOS_MENDED = "send messages and not text that a template wrote, and take the token from the template or from the server"
STOP_MENDED = "vLLM: --generation-config FOLDER; others: a `stop` in each request"
ADAPTER_MENDED = "give its name as the model (--model)"
SAMPLING_MENDED = "its repetition penalty changes them: set it to 1 in each request, or in generation_config.json"
DTYPE_MENDED = "serve the export's type, or allow the difference (--gap)"


class Ours(NamedTuple):
    """What the export answers: tokens, with the one that ends them if `stopped`, and log-probabilities, (tokens, V)."""

    ids: list[int]
    stopped: bool
    logprobs: torch.Tensor


@dataclass(frozen=True)
class RowComparison:
    """A row's comparison.

    Attributes:
        row: its name.
        prompt: whether the prompts have the same tokens, or as many where the server tells no more; None if it tells
            nothing.
        tokens: greedy tokens of the export, with the one that ends the answer.
        same: how many of them the server's answer begins with.
        other: whether the next one is another, which is less likely by more than what is allowed.
        gap: largest difference of log-probabilities up to there, in nats.
        stop: whether the server does not go on after the end, or end before it.
    """

    row: str
    prompt: bool | None
    tokens: int
    same: int
    other: bool
    gap: float
    stop: bool


@dataclass(frozen=True)
class Checked:
    """The comparison of all rows; `model` is the server's name, `allowed` a gap in nats, `causes` why rows differ."""

    model: str
    allowed: float
    causes: list[str]
    rows: list[RowComparison]

    def lines(self) -> list[str]:
        """Returns what the command prints."""
        rows, total = self.rows, len(self.rows)
        known = sum(row.prompt is not None for row in rows)
        return [
            f"model: {self.model}",
            f"prompts: {sum(bool(row.prompt) for row in rows)} of {total} the same; the server tells of {known}",
            f"greedy tokens: {sum(row.same for row in rows)} of {sum(row.tokens for row in rows)} the same",
            f"log-probabilities: differ by up to {max(row.gap for row in rows):.1e} nats; allowed: {self.allowed:g}",
            f"stop: {sum(row.stop for row in rows)} of {total} the same",
            *[f"differs: {cause}" for cause in self.causes],
        ]


@dataclass(frozen=True)
class _Case:
    """A model, and the rows that it and the server answer."""

    loaded: Loaded
    places: Sequence[str]
    prompts: Sequence[Prompt]
    replies: Sequence[Reply]
    length: int
    allowed: float

    def compared(self, number: int, ids: list[int] | None = None) -> RowComparison:
        """Compares a row; with other tokens of its prompt, if they are given."""
        prompt, reply = self.prompts[number], self.replies[number]
        ours = _ours(self.loaded, prompt if ids is None else replace(prompt, ids=ids), self.length)
        same, ends = _shared(self.loaded, ours, reply, self.allowed)
        count, best = len(ours.ids), ours.logprobs.max(-1).values.tolist()
        gaps = [abs(mine - his) for mine, his in zip(best[: same + 1], reply.logprobs, strict=False)]
        if other := same < count:
            # What the server chose: the token that it tells, one that ends answers, or a likely one of that text.
            his = (reply.ids or [])[same : same + 1] or (sorted(self.loaded.stops) if ends else [])
            if not his:
                likely = ours.logprobs[same].topk(min(LIKELY, ours.logprobs.shape[1])).indices.tolist()
                begun = [each for each in likely if _begins(self.loaded, reply.text, [*ours.ids[:same], each])]
                his = begun or likely[-1:]
            chosen = max((float(ours.logprobs[same, each]) for each in his), default=-math.inf)
            gaps[same:] = [abs(chosen - each) for each in reply.logprobs[same : same + 1]]
            other = best[same] - chosen > 2 * self.allowed  # each of both may move by what is allowed
        is_same = None if reply.num_prompt is None else reply.num_prompt == len(prompt.ids)
        is_same = reply.prompt == prompt.ids if reply.prompt is not None else is_same
        stop = not (ends and other) if same < count else ends or not ours.stopped
        return RowComparison(
            self.places[number], is_same, count, same, other and not ends, max(gaps, default=0.0), stop
        )

    def explains(self, number: int, ids: list[int] | None = None) -> bool:
        """Tells whether the server's answer is that of the model as it is now."""
        return not self.differs(self.compared(number, ids))

    def differs(self, row: RowComparison) -> bool:
        return row.other or not row.gap <= self.allowed  # NaN is one, too

    def causes(self, rows: list[RowComparison]) -> Iterator[str]:
        """Yields why rows differ. Answers to other prompts say nothing."""
        if wrong := [number for number, row in enumerate(rows) if row.prompt is False]:
            yield f"{self._cause_of_prompts(wrong)} ({_named(rows, wrong)})"
        right = [number for number in range(len(rows)) if number not in wrong]
        if odd := [number for number in right if self.differs(rows[number])]:
            yield f"{self._cause_of_answers(odd, [rows[number].gap for number in odd])} ({_named(rows, odd)})"
        if ends := [number for number in right if not rows[number].stop and number not in odd]:
            on = rows[ends[0]].same == rows[ends[0]].tokens
            does, mend = ("goes on after", STOP_MENDED) if on else ("ends before", "as by a stop text, or a penalty")
            tokens = ", ".join(self.loaded.tokenizer.convert_ids_to_tokens(sorted(self.loaded.stops)))
            yield f"stop token: the server {does} the export's end, one of {tokens}; {mend} ({_named(rows, ends)})"

    def _cause_of_prompts(self, wrong: list[int]) -> str:
        bos, tokenizer = self.loaded.tokenizer.bos_token_id, self.loaded.tokenizer
        for way, more, start in (("twice", [bos], 0), ("missing", [], 1)) if bos is not None else ():
            if all(self._has_prompt(number, [*more, *self.prompts[number].ids[start:]]) for number in wrong):
                return f"BOS {way}: {tokenizer.bos_token!r} at the start of the server's prompts; {BOS_MENDED}"
        reply, ids = self.replies[wrong[0]], self.prompts[wrong[0]].ids
        if reply.prompt is None:
            return f"template: a prompt has {reply.num_prompt} tokens, and the export's {len(ids)}; {TEMPLATE_MENDED}"
        at = next((i for i, (one, other) in enumerate(zip(ids, reply.prompt, strict=False)) if one != other), len(ids))
        his, own = (tokenizer.decode(each[at : at + 8]) for each in (reply.prompt, ids))
        return f"template: from token {at} on a prompt has {his!r}, and the export's {own!r}; {TEMPLATE_MENDED}"

    def _has_prompt(self, number: int, ids: list[int]) -> bool:
        reply = self.replies[number]
        if reply.prompt is not None or not ids:
            return reply.prompt == ids
        return reply.num_prompt == len(ids) and self.explains(number, ids)

    def _cause_of_answers(self, odd: list[int], gaps: list[float]) -> str:
        model = self.loaded.model
        with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
            if hasattr(model, "disable_adapter") and all(map(self.explains, odd)):
                return f"adapter: the server answers as the base without the adapter; {ADAPTER_MENDED}"
        if not all(self.replies[number].logprobs for number in odd):
            return "another model or quantisation: the server tells no log-probabilities, which would say what of both"
        if max(gaps) <= self.allowed:
            return f"sampling: log-probabilities agree, and the server chooses other tokens; {SAMPLING_MENDED}"
        differ = f"log-probabilities differ by {min(gaps):.1e} to {max(gaps):.1e} nats"
        if median(gaps) <= FAR:
            return f"dtype or quantisation: {differ}; {DTYPE_MENDED}"
        return f"another model: {differ}; the server has other weights under this name, or its adapter is not applied"


def check(
    url: str, source: str, file: Path | None, model: str | None, count: int, length: int, dtype: str, gap: float | None
) -> Checked:
    """Asks a server, and compares its answers with those of a run's or an export's model.

    Args:
        file: prompts; None takes the run's held-out rows.
        model: the server's name of the model; None takes its only one.
        count: number of rows that are asked, the first ones.
        length: most tokens of an answer.
        dtype: as in `load_model`.
        gap: allowed difference of log-probabilities, in nats; None: GAP or GAP_OF_16_BITS.

    Raises:
        BadInputError: if the server, the model or rows cannot be used.
    """
    server = Server(url)
    name = server.model(model)
    rows = held_out_rows(source, count) if file is None else read_rows(file, "--rows", True, True)[:count]
    if any(row.images for row in rows):
        raise BadInputError("--rows: rows with images are not sent; name a file of text")
    with quiet(), torch.no_grad():
        loaded = load_model(source, dtype)
        if loaded.encoder_decoder:
            raise BadInputError(f"{source!r} is an encoder-decoder, which these servers do not serve")
        is_plain = loaded.tokenizer.chat_template is None or (file is None and isinstance(rows[0].prompt, str))
        prompts = encode_rows(loaded, rows, "--rows", None, is_plain)
        by_type = GAP if loaded.model.dtype == torch.float32 else GAP_OF_16_BITS
        allowed = by_type if gap is None else gap
        replies = [
            server.answer(name, in_protocol(row, is_plain), room_of(loaded, prompt, Sampling(length)))
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        case = _Case(loaded, [row.place for row in rows], prompts, replies, length, allowed)
        found = [case.compared(number) for number in range(len(rows))]
        return Checked(name, allowed, list(case.causes(found)), found)


def _ours(loaded: Loaded, prompt: Prompt, length: int) -> Ours:
    """Answers a prompt as `toolkit generate --temperature 0` does."""
    room = room_of(loaded, prompt, Sampling(length))
    written = generated(loaded, [prompt], room, Sampling(room, 0.0))[0].tolist()
    ids, stopped = before_stop(written, loaded.stops)
    ids = written[: len(ids) + stopped]
    whole = torch.tensor([[*prompt.ids, *ids]], device=loaded.model.device)
    logits = loaded.model(input_ids=whole).logits[0, len(prompt.ids) - 1 : -1]
    return Ours(ids, stopped, logits.float().log_softmax(-1).cpu())


def _shared(loaded: Loaded, ours: Ours, reply: Reply, allowed: float) -> tuple[int, bool]:
    """Returns how many of our tokens the server's answer begins with, and whether it ends there.

    Servers without numbers of tokens give texts, and most leave out the token that ends an answer.
    """
    words = len(ours.ids) - ours.stopped
    if reply.ids is not None:
        pairs = enumerate(zip(ours.ids, reply.ids, strict=False))
        same = next((at for at, (mine, his) in pairs if mine != his), min(len(ours.ids), len(reply.ids)))
        ends = reply.stopped and len(reply.ids) == same
    else:
        begins = (_begins(loaded, reply.text, ours.ids[: at + 1]) for at in range(words))
        same = next((at for at, has_begun in enumerate(begins) if not has_begun), words)
        ends = reply.stopped and any(_whole(reply.text) in _texts(loaded, ours.ids[:end]) for end in (same, words + 1))
        if same == words and ours.stopped and not ends:  # an end at which the server does not stop has no text either
            same += all(abs(float(ours.logprobs[words].max()) - each) <= allowed for each in reply.logprobs[words:][:1])
    return same + (same == words and ours.stopped and ends), ends


def _begins(loaded: Loaded, text: str, ids: list[int]) -> bool:
    return any(map(_whole(text).startswith, _texts(loaded, ids)))


def _texts(loaded: Loaded, ids: list[int]) -> list[str]:
    """Returns the text of tokens with special ones and without, which most servers leave out."""
    return [_whole(loaded.tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True)]


def _whole(text: str) -> str:
    """Returns a text without the space that some decoders drop, and without half a character at its end."""
    return text.lstrip().rstrip(HALF_CHARACTER)


def _named(rows: list[RowComparison], numbers: list[int]) -> str:
    return f"{len(numbers)} of {counted(len(rows), 'row')}, the first {rows[numbers[0]].row}"
