"""Encodes prompts and completes them with a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from toolkit.data.rows.examples import Message
from toolkit.errors import BadInputError, ToolkitError, in_words
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.options import Sampling

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import LogitsProcessor, PreTrainedTokenizerBase

    from toolkit.data.images.images import Images

CONTEXT = 8
"""Number of tokens before a continuation that are decoded with it, to keep its first space."""

PROBED = 4
"""Tokens of the prompt and of the padding in the trial of `sees_padding`."""

_FOUND_TO_SEE_PADDING: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Completion:
    """A completion that a model wrote.

    Attributes:
        num_tokens: number of tokens, without the one that ends the text.
        stopped: whether a token ended the text; otherwise it was cut at the limit of tokens.
    """

    text: str
    num_tokens: int
    stopped: bool


@dataclass(frozen=True)
class Shown:
    """The images of a prompt, which are decoded for each forward and not kept.

    Attributes:
        reader: makes the model's tensors of them.
        decode: returns them.
    """

    reader: Images
    decode: Callable[[], Sequence[Image]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
        context: its last tokens, if the completion continues the same text.
        shown: its images; None without images.
        row, k: numbers of the row in its file and of the completion of the row, from 0. With the seed they decide
            about the draws.
    """

    ids: list[int]
    context: list[int]
    shown: Shown | None = None
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
    """Encodes a prompt as training does.

    A text is a user's turn. Without a chat template or with `raw` it is plain text, after the begin-of-text token if
    the tokenizer adds one.

    Args:
        system: put before messages that have no system text of their own.
        arguments: arguments of the chat template, such as `enable_thinking`.

    Raises:
        BadInputError: if the prompt needs a chat template and the tokenizer has none, the template refuses it, or it
            is too long.
    """
    from toolkit.data.templates.prompts import prompt_ids
    from toolkit.data.tokens.tokenizer import bos_of

    text, is_plain = _prompt_text(loaded, prompt, system, raw, tools, arguments or {})
    if is_plain and loaded.encoder_decoder:  # the target is a text of its own
        return Prompt(fitting(loaded, loaded.tokenizer(text, verbose=False)["input_ids"]), [])
    # Plain text gets the begin-of-text token, which a template writes itself.
    ids = prompt_ids(loaded.tokenizer, text, bos_of(loaded.tokenizer, None) if is_plain else None)
    return Prompt(fitting(loaded, ids), ids[-CONTEXT:] if is_plain else [])


def _prompt_text(
    loaded: Loaded,
    prompt: str | list[Message],
    system: str | None,
    raw: bool,
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> tuple[str, bool]:
    """Returns the prompt's text, and whether it is plain, that is without a chat template."""
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
    """Puts the system text before the messages, if it is given and they have none."""
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> str:
    """Renders the chat template up to the beginning of the answer.

    Raises:
        BadInputError: if the template refuses the messages.
    """
    from toolkit.data.rows.values import RowProblem
    from toolkit.data.templates.prompts import prompt_of

    try:
        return prompt_of(tokenizer, messages, tools, arguments)
    except RowProblem as problem:
        raise BadInputError(str(problem)) from problem


def fitting(loaded: Loaded, ids: list[int]) -> list[int]:
    """Returns the tokens if the model can read them.

    Raises:
        BadInputError: if they are none or too many, or the model lacks one.
    """
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
    """Completes the prompts in one batch, or in several: of text, with images, and near the model's last position."""
    batches: dict[tuple[int, int], list[int]] = {}
    # RWKV attends to padding, and mixes up rows even of equal length.
    apart = len(prompts) > 1 and sees_padding(loaded, prompts[0])
    # `max_new_tokens` is one number for a batch, so that prompts with another room go into another.
    for number, prompt in enumerate(prompts):
        # From 2 on, so that no prompt of its own shares a batch of others.
        place = number + 2 if apart else int(prompt.shown is not None)
        batches.setdefault((room_of(loaded, prompt, sampling), place), []).append(number)
    written: dict[int, tuple[list[int], bool]] = {}
    for (room, _), numbers in batches.items():
        found = _generate(loaded, [prompts[number] for number in numbers], room, sampling)
        written.update(zip(numbers, found, strict=True))
    return [
        Completion(_continuation(loaded, prompt.context, ids), len(ids), stopped)
        for prompt, (ids, stopped) in ((prompt, written[number]) for number, prompt in enumerate(prompts))
    ]


def stream(loaded: Loaded, prompt: Prompt, sampling: Sampling, write: Callable[[str], object]) -> str:
    """Completes one prompt; calls `write` with each piece of the text as soon as it is known."""
    pieces = _TextStreamer(loaded, prompt, write)
    room = room_of(loaded, prompt, sampling)
    ids, _ = _generate(loaded, [prompt], room, sampling, pieces)[0]
    return _continuation(loaded, prompt.context, ids)


def room_of(loaded: Loaded, prompt: Prompt, sampling: Sampling) -> int:
    """Returns the most tokens that the completion can have."""
    # Before a target comes the token that it begins with.
    before = 1 if loaded.encoder_decoder else len(prompt.ids)
    free = math.inf if loaded.positions is None else loaded.positions - before
    return int(min(free, sampling.max_new_tokens))


def sees_padding(loaded: Loaded, prompt: Prompt) -> bool:
    """Tells whether padding next to a prompt changes the completion, as in RWKV, which has no attention mask.

    It is tried once for each model. The signature does not tell: a model may take a mask and ignore it.
    """
    import torch

    if loaded.model not in _FOUND_TO_SEE_PADDING:
        places = frozenset() if prompt.shown is None else prompt.shown.reader.token_ids
        row, found = [token for token in prompt.ids if token not in places][:PROBED], []
        for width in (len(row), len(row) + PROBED):
            inputs = _padded_inputs(loaded, [row], width)
            with _explain_failures(loaded):
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


def _padded_inputs(loaded: Loaded, rows: list[list[int]], width: int) -> dict[str, Any]:
    """Returns the arguments of `generate` for rows that are padded to `width` tokens, each (rows, width)."""
    import torch

    from toolkit.data.tokens.tokenizer import pad_id

    padding, device = pad_id(loaded.tokenizer), loaded.model.device
    ids, mask = torch.full((len(rows), width), padding), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        # On the left: generation goes on at the right end of every row. A source begins at the first position.
        place = slice(0, len(row)) if loaded.encoder_decoder else slice(width - len(row), width)
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": padding}


def _generate(
    loaded: Loaded, prompts: list[Prompt], room: int, sampling: Sampling, streamer: _TextStreamer | None = None
) -> list[tuple[list[int], bool]]:
    """Generates at most `room` tokens for each prompt; returns those before the first stop, and if there is one."""
    found = generated(loaded, prompts, room, sampling, streamer)
    return [before_stop(row, loaded.stops) for row in found.tolist()]


def generated(
    loaded: Loaded,
    prompts: list[Prompt],
    room: int,
    sampling: Sampling,
    streamer: _TextStreamer | None = None,
    record: LogitsProcessor | None = None,
) -> torch.Tensor:
    """Returns at most `room` tokens for each prompt, (prompts, tokens); rows that end early are filled up with padding.

    Either all prompts have images or none has.

    Args:
        record: called with the logits from which each token is drawn.
    """
    rows = [prompt.ids for prompt in prompts]
    width = max(map(len, rows))
    inputs = _padded_inputs(loaded, rows, width)
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        from toolkit.generation.text.draws import drawing, seed_of

        seeds = [seed_of(sampling.seed, prompt.row, prompt.k) for prompt in prompts]
        drawn["logits_processor"] = drawing(sampling, seeds, loaded.model.device, record)
    with _explain_failures(loaded):
        found: torch.Tensor = loaded.model.generate(
            **inputs,
            **image_arguments(loaded.model, [prompt.shown for prompt in prompts], inputs["input_ids"]),
            max_new_tokens=room,
            eos_token_id=sorted(loaded.stops) or None,
            suppress_tokens=sorted(loaded.never_written) or None,
            streamer=streamer,
            synced_gpus=loaded.collective,
            do_sample=False,
            **drawn,
        )
    return found[:, 1 if loaded.encoder_decoder else width :]


def image_arguments(model: Any, shown: Sequence[Shown | None], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a model's arguments besides tokens for the images of rows of tokens; none without images.

    Args:
        ids: the tokens of the rows, (B, T), of which all show images or none.
    """
    seen = [each for each in shown if each is not None]
    if not seen:
        return {}
    import torch

    from toolkit.model.attention.image_inputs import Sight

    reader = seen[0].reader
    kinds = torch.isin(ids, torch.tensor(sorted(reader.token_ids), device=ids.device)).long()
    found = Sight(model).shown(reader.tensors([list(each.decode()) for each in seen]), kinds)
    return {name: _on_model_device(model, tensor) for name, tensor in found.items()}


def _on_model_device(model: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Moves a tensor to the model's device; pixels also get the model's dtype."""
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)


def before_stop(ids: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """Returns the tokens before the first stop, and whether there is one."""
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end], end < len(ids)


@contextmanager
def _explain_failures(loaded: Loaded) -> Iterator[None]:
    """Adds what helps to errors about too little memory, and of types that fail with a cache, as BART's decoder."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ToolkitError(f"the GPU has too little memory; {loaded.if_too_large}") from error
    except (IndexError, TypeError, ValueError) as error:
        raise BadInputError(f"{loaded.name!r}: generate fails ({in_words(error)}); name another model") from error


def _continuation(loaded: Loaded, context: list[int], ids: list[int]) -> str:
    """Decodes `ids` after `context`: decoders drop the space at the beginning of a text."""
    from toolkit.data.tokens.tokenizer import decode

    head, whole = decode(loaded.tokenizer, context), decode(loaded.tokenizer, [*context, *ids])
    if context and whole.startswith(head):
        return whole[len(head) :]
    return decode(loaded.tokenizer, ids, is_target=loaded.encoder_decoder)


class _TextStreamer:
    """A streamer for transformers' `generate` that passes text on when its characters are whole."""

    MAX_TOKENS = 64
    """Number of tokens that are decoded again at each step."""

    def __init__(self, loaded: Loaded, prompt: Prompt, write: Callable[[str], object]) -> None:
        from toolkit.data.tokens.tokenizer import decode

        self._decode = partial(decode, loaded.tokenizer, is_target=loaded.encoder_decoder)
        self._stops = loaded.stops
        self._write = write
        self._ids = list(prompt.context)
        self._shown = self._decode(self._ids)
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """Takes the prompt, (1, T), in the first call, and then one token, (1,), in each."""
        if not self._is_prompt:
            self._ids += before_stop(tokens.flatten().tolist(), self._stops)[0]
            self._show(is_last=False)
        self._is_prompt = False

    def end(self) -> None:
        self._show(is_last=True)

    def _show(self, is_last: bool) -> None:
        text = self._decode(self._ids)
        # A token may end inside a character's bytes; the next one completes it.
        if text.endswith(HALF_CHARACTER) and not is_last:
            return
        if len(text) > len(self._shown):
            self._write(text[len(self._shown) :])
        # Otherwise the work of decoding grows with the square of the answer.
        if len(self._ids) > self.MAX_TOKENS:
            self._ids = self._ids[-CONTEXT:]
            text = self._decode(self._ids)
        self._shown = text
