"""Prompts as tokens, and what a model writes behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.generation.load import Loaded
from toolkit.generation.options import Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

CONTEXT = 8
"""Tokens before a continuation that are decoded with it, so that its first space shows."""

PROBED = 4
"""Tokens of a prompt, and of padding, with which it is tried whether a model sees padding."""

_FOUND_TO_SEE_PADDING: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

NOTHING: Mapping[str, Any] = {}

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Completion:
    """What a model wrote.

    Attributes:
        num_tokens: without the one that ends the text.
        stopped: whether a token ended the text; else it was cut at the most tokens that it might have.
    """

    text: str
    num_tokens: int
    stopped: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
        context: its last tokens, where the completion goes on in the same text.
        shown: makes what the model is given of the prompt's images, by the names of its arguments; None: it has none.
        row, k: of its file, and of the row's completions, both from 0: with the seed they say what is drawn.
    """

    ids: list[int]
    context: list[int]
    shown: Callable[[], Mapping[str, torch.Tensor]] | None = None
    row: int = 0
    k: int = 0


def encode_prompt(
    loaded: Loaded,
    prompt: str | list[Message],
    system: str | None = None,
    raw: bool = False,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """The tokens that a completion follows, as training has them.

    A text is a user's turn, unless there is no chat template or it is `raw`; then it is plain text, behind the
    begin-of-text token where the tokenizer adds it.

    Args:
        system: put before messages that have no system text of their own.
        arguments: of the chat template, such as `enable_thinking`.

    Raises:
        BadInputError: where it needs a chat template and there is none, the template refuses it, or it is too long.
    """
    text, is_plain = _written(loaded, prompt, system, raw, tools, arguments or {})
    if is_plain and loaded.encoder_decoder:  # the target is a text of its own
        return Prompt(fitting(loaded, loaded.tokenizer(text, verbose=False)["input_ids"]), [])
    ids = _encoded(loaded.tokenizer, text, is_plain)
    return Prompt(fitting(loaded, ids), ids[-CONTEXT:] if is_plain else [])


def encode_continuation(
    loaded: Loaded,
    prompt: str | list[Message],
    text: str,
    system: str | None = None,
    raw: bool = False,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and those of a text behind it. Raises BadInputError as `encode_prompt` does."""
    before, is_plain = _written(loaded, prompt, system, raw, tools, arguments or {})
    ids = fitting(loaded, _encoded(loaded.tokenizer, before, is_plain))
    # Training has both in one text, where a tokenizer may write a word's beginning otherwise than at a text's start;
    # so both are encoded as one where that leaves the prompt's tokens.
    whole = _encoded(loaded.tokenizer, before + text, is_plain)
    if whole[: len(ids)] == ids:
        return ids, whole[len(ids) :]
    return ids, loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _written(
    loaded: Loaded,
    prompt: str | list[Message],
    system: str | None,
    raw: bool,
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> tuple[str, bool]:
    """The prompt's text, and whether it is plain: without a chat template."""
    if raw or loaded.tokenizer.chat_template is None:
        if system is not None or not isinstance(prompt, str):
            what = "messages" if system is None else "a system text"
            cause = "--raw leaves it out" if raw else f"the tokenizer of {loaded.name!r} has none"
            raise BadInputError(f"{what} need{'s' if system else ''} a chat template, and {cause}; give plain text")
        if arguments:
            raise BadInputError("chat_template_kwargs have no effect on plain text; remove them")
        return prompt, True
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return templated(loaded.tokenizer, after_system(messages, system), tools, arguments), False


def after_system(messages: list[Message], system: str | None) -> list[Message]:
    """The messages behind a system text, if there is one and they have none of their own."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, is_plain: bool) -> list[int]:
    from toolkit.data.tokenizer import bos_of

    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    # A template writes the begin-of-text token itself.
    bos = bos_of(tokenizer, None) if is_plain else None
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] = NOTHING,
) -> str:
    """What the chat template writes, up to where the answer begins. Raises BadInputError if it refuses."""
    from toolkit.data.problem import RowProblem
    from toolkit.data.template_arguments import require_taken
    from toolkit.data.templates import rendered

    try:
        require_taken(arguments, tokenizer.get_chat_template(tools=tools))
        return rendered(tokenizer, messages, tools, prompt=True, arguments=arguments)
    except BadInputError:  # it comes to no end
        raise
    except RowProblem as problem:
        raise BadInputError(str(problem)) from None
    except Exception as error:  # a template is a program, and may refuse a conversation in any way
        raise BadInputError(f"the chat template rejects it: {first_line(error)}") from error


def fitting(loaded: Loaded, ids: list[int]) -> list[int]:
    """The tokens. Raises BadInputError where there are none, too many, or one that the model does not know."""
    rows = int(loaded.model.get_input_embeddings().weight.shape[0])
    if not ids:
        raise BadInputError("the prompt is empty")
    if loaded.positions is not None and len(ids) >= loaded.positions:
        raise BadInputError(
            f"the prompt's {len(ids)} tokens leave no room in the model's {loaded.positions} positions; shorten it"
        )
    if max(ids) >= rows:
        raise BadInputError(
            f"the tokenizer makes token {max(ids)} of it, and the model has embeddings for {rows}; "
            "use the tokenizer that belongs to the model"
        )
    return ids


def complete(loaded: Loaded, prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
    """A completion of each prompt, in one batch; those near the model's last position, and with images, in others."""
    batches: dict[tuple[int, int], list[int]] = {}
    # RWKV, which sees padding, also mixes rows of one length up.
    texts_alone = [prompt.ids for prompt in prompts if prompt.shown is None]
    apart = len(texts_alone) > 1 and sees_padding(loaded, texts_alone[0])
    # `max_new_tokens` is one number for a batch, so that prompts with another room go into another.
    for number, prompt in enumerate(prompts):
        # From 1 on, so that no prompt of its own shares the batch of the others.
        place = number + 1 if apart or prompt.shown is not None else 0
        batches.setdefault((_room(loaded, prompt, sampling), place), []).append(number)
    written: dict[int, Completion] = {}
    for (room, _), numbers in batches.items():
        found = _generate(loaded, [prompts[number] for number in numbers], room, sampling)
        for number, (ids, stopped) in zip(numbers, found, strict=True):
            text = _continuation(loaded.tokenizer, prompts[number].context, ids)
            written[number] = Completion(text, len(ids), stopped)
    return [written[number] for number in range(len(prompts))]


def stream(loaded: Loaded, prompt: Prompt, sampling: Sampling, write: Callable[[str], object]) -> str:
    """The completion of one prompt, which `write` is given piece by piece as it comes."""
    pieces = _Pieces(loaded, prompt, write)
    room = _room(loaded, prompt, sampling)
    ids, _ = _generate(loaded, [prompt], room, sampling, pieces)[0]
    return _continuation(loaded.tokenizer, prompt.context, ids)


def _room(loaded: Loaded, prompt: Prompt, sampling: Sampling) -> int:
    """Most tokens of the completion."""
    # Before a target stands the token that it begins with.
    before = 1 if loaded.encoder_decoder else len(prompt.ids)
    free = math.inf if loaded.positions is None else loaded.positions - before
    return int(min(free, sampling.max_new_tokens))


def sees_padding(loaded: Loaded, ids: list[int]) -> bool:
    """Whether padding beside a prompt changes what the model writes, as in RWKV, which knows no attention mask.

    Found by trying, once for a model: its signature does not tell, as it may take a mask and ignore it.
    """
    import torch

    if loaded.model not in _FOUND_TO_SEE_PADDING:
        row, found = ids[:PROBED], []
        for width in (len(row), len(row) + PROBED):
            inputs = _filled(loaded, [row], width)
            with _told(loaded):
                out = loaded.model.generate(
                    **inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
                )
            found.append(out.logits[0].float())
        alone, padded = found
        # In 16 bits, sums of other lengths are rounded otherwise.
        rounding = 1e-3 if loaded.model.dtype == torch.float32 else 5e-2
        is_alike = bool((alone - padded).norm() <= rounding * alone.norm())
        _FOUND_TO_SEE_PADDING[loaded.model] = not is_alike
    return _FOUND_TO_SEE_PADDING[loaded.model]


def _filled(loaded: Loaded, rows: list[list[int]], width: int) -> dict[str, Any]:
    """What `generate` takes for rows that are filled up to `width` tokens."""
    import torch

    from toolkit.data.tokenizer import pad_id

    padding, device = pad_id(loaded.tokenizer), loaded.model.device
    ids, mask = torch.full((len(rows), width), padding), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        # On the left: generation goes on at the right end of every row. A source begins at the first position.
        place = slice(0, len(row)) if loaded.encoder_decoder else slice(width - len(row), width)
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": padding}


def _generate(
    loaded: Loaded, prompts: list[Prompt], room: int, sampling: Sampling, streamer: _Pieces | None = None
) -> list[tuple[list[int], bool]]:
    """At most `room` tokens for each prompt, up to the first that ends a text and without it, and whether there is one.

    A prompt with images is one of its own.
    """
    rows, shown = [prompt.ids for prompt in prompts], prompts[0].shown
    width = max(map(len, rows))
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        from toolkit.generation.draws import drawing, seed_of

        seeds = [seed_of(sampling.seed, prompt.row, prompt.k) for prompt in prompts]
        drawn["logits_processor"] = drawing(sampling, seeds, loaded.model.device)
    with _told(loaded):
        found = loaded.model.generate(
            **_filled(loaded, rows, width),
            **({} if shown is None else {name: _given(loaded, tensor) for name, tensor in shown().items()}),
            max_new_tokens=room,
            eos_token_id=sorted(loaded.stops) or None,
            streamer=streamer,
            synced_gpus=loaded.collective,
            do_sample=False,
            **drawn,
        )
    # Rows that end early are filled up with padding.
    return [_until(row, loaded.stops) for row in found[:, 1 if loaded.encoder_decoder else width :].tolist()]


def _given(loaded: Loaded, tensor: torch.Tensor) -> torch.Tensor:
    """On the model's device, and pixels in its type."""
    return tensor.to(loaded.model.device, loaded.model.dtype if tensor.is_floating_point() else tensor.dtype)


def _until(ids: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens before the first stop, and whether there is one."""
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end], end < len(ids)


@contextmanager
def _told(loaded: Loaded) -> Iterator[None]:
    """Says what can be done about too little memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ToolkitError(f"the GPU has too little memory; {loaded.if_too_large}") from error


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _continuation(tokenizer: PreTrainedTokenizerBase, context: list[int], ids: list[int]) -> str:
    """The text of `ids` behind `context`: decoders take the space from the beginning of a text."""
    head, whole = _decode(tokenizer, context), _decode(tokenizer, [*context, *ids])
    return whole[len(head) :] if whole.startswith(head) else _decode(tokenizer, ids)


class _Pieces:
    """A streamer for transformers' `generate`: passes text on when its characters are whole."""

    MAX_TOKENS = 64
    """Tokens that are decoded anew at each step."""

    def __init__(self, loaded: Loaded, prompt: Prompt, write: Callable[[str], object]) -> None:
        self._tokenizer = loaded.tokenizer
        self._stops = loaded.stops
        self._write = write
        self._ids = list(prompt.context)
        self._shown = _decode(self._tokenizer, self._ids)
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """Takes the prompt first, then token after token."""
        if not self._is_prompt:
            self._ids += _until(tokens.flatten().tolist(), self._stops)[0]
            self._show(is_last=False)
        self._is_prompt = False

    def end(self) -> None:
        self._show(is_last=True)

    def _show(self, is_last: bool) -> None:
        text = _decode(self._tokenizer, self._ids)
        # A token may end inside a character's bytes; the next one completes it.
        if text.endswith(HALF_CHARACTER) and not is_last:
            return
        if len(text) > len(self._shown):
            self._write(text[len(self._shown) :])
        # Otherwise the work of decoding grows with the square of the answer.
        if len(self._ids) > self.MAX_TOKENS:
            self._ids = self._ids[-CONTEXT:]
            text = _decode(self._tokenizer, self._ids)
        self._shown = text
