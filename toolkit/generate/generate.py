"""What `toolkit generate` does: a model's answers to a prompt, in a conversation, to a file, and how many are right.

torch and transformers are imported once the options are known to be right.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import track

from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.places import require_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

Message = dict[str, Any]

MODES = ("--prompt", "--chat", "--file", "--eval")

BELONGS_TO = {
    "--output": ("--file",),
    "--batch-size": ("--file", "--eval"),
    "--strict": ("--eval",),
    "--json": ("--eval",),
}
"""Option -> the modes that it has a meaning in; others have one in all."""

CONTRADICTIONS = {
    ("--raw", "--chat"): "a conversation needs the chat template",
    ("--raw", "--system"): "a system text needs the chat template",
    ("--temperature", "--eval"): "an evaluation takes the most likely token",
    ("--top-p", "--eval"): "an evaluation takes the most likely token",
    ("--seed", "--eval"): "an evaluation takes the most likely token",
}
"""Options that exclude each other -> why. The first is the one to leave out."""

CHOICES = {"--dtype": ("auto", "float32", "bfloat16", "float16"), "--device": ("auto", "cpu", "cuda")}

COLUMNS = ("prompt", "messages", "question")
"""Where a row's prompt may be; the first that it has."""

BATCH_SIZE = 8
"""Prompts of a file that are completed at a time, unless the options say otherwise."""

PROBLEMS_SHOWN = 10
"""Bad rows that an error names."""

MISMATCHES_SHOWN = 5
"""Wrong answers that are printed."""

LENGTH_SHOWN = 80
"""What is printed of an answer (characters)."""

CONTEXT = 8
"""Tokens before a continuation that are decoded with it, so that its first space shows."""

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


# ---- options ----


@dataclass(frozen=True)
class Options:
    """The command's options; None: not given.

    Raises:
        BadInputError: where they contradict each other or one is out of range; all problems together.
    """

    source: str
    prompt: str | None = None
    chat: bool = False
    file: Path | None = None
    evaluation: Path | None = None
    output: Path | None = None
    raw: bool = False
    system: str | None = None
    strict: bool = False
    as_json: bool = False
    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    batch_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        given = self._given()
        problems = [*_mode_problems(given), *_contradictions(given), *self._range_problems()]
        if problems:
            raise BadInputError("\n".join(problems))

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, with the defaults of what is not given."""
        if self.evaluation is not None:
            return Sampling(self.max_new_tokens, 0.0)
        default = Sampling()
        return Sampling(
            self.max_new_tokens,
            default.temperature if self.temperature is None else self.temperature,
            default.top_p if self.top_p is None else self.top_p,
        )

    def _given(self) -> set[str]:
        values = {
            "--prompt": self.prompt,
            "--chat": self.chat or None,
            "--file": self.file,
            "--eval": self.evaluation,
            "--output": self.output,
            "--raw": self.raw or None,
            "--system": self.system,
            "--strict": self.strict or None,
            "--json": self.as_json or None,
            "--temperature": self.temperature,
            "--top-p": self.top_p,
            "--seed": self.seed,
            "--batch-size": self.batch_size,
        }
        return {option for option, value in values.items() if value is not None}

    def _range_problems(self) -> Iterator[str]:
        temperature, top_p, seed = self.temperature, self.top_p, self.seed
        for option, count in (("--max-new-tokens", self.max_new_tokens), ("--batch-size", self.batch_size)):
            if count is not None and count < 1:
                yield f"{option}: {count} is too small; allowed: 1 or more"
        if temperature is not None and not 0 <= temperature < math.inf:
            yield f"--temperature: {temperature} is out of range; allowed: 0 (always the most likely token) or more"
        if top_p is not None and not 0 < top_p <= 1:
            yield f"--top-p: {top_p} is out of range; allowed: more than 0, at most 1 (all tokens)"
        if seed is not None and not 0 <= seed < 2**63:
            yield f"--seed: {seed} is out of range; allowed: 0 to 2**63 - 1"
        for option, found in (("--dtype", self.dtype), ("--device", self.device)):
            if found not in CHOICES[option]:
                yield f"{option}: unknown {found!r}; allowed: {', '.join(CHOICES[option])}"
        for option, text in (("--prompt", self.prompt), ("--system", self.system)):
            yield from _text_problems(option, text)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: most tokens of one completion; fewer where the model's positions end.
        temperature: 0: always the most likely token.
        top_p: drawn from the most likely tokens that together have this probability.
    """

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.95


def _mode_problems(given: set[str]) -> Iterator[str]:
    modes = [mode for mode in MODES if mode in given]
    if not modes:
        yield f"nothing to do: give one of {', '.join(MODES)}"
    if len(modes) > 1:
        yield f"{' and '.join(modes)} contradict each other; give one of them"
    for option, homes in BELONGS_TO.items():
        if option in given and len(modes) == 1 and modes[0] not in homes:
            yield f"{option} and {modes[0]} contradict each other: {option} belongs to {' and '.join(homes)}"


def _contradictions(given: set[str]) -> Iterator[str]:
    for (option, other), reason in CONTRADICTIONS.items():
        if option in given and other in given:
            yield f"{option} and {other} contradict each other: {reason}; leave {option} out"


def _text_problems(option: str, text: str | None) -> Iterator[str]:
    if text is None:
        return
    if not text.strip():
        yield f"{option}: is empty; give it some text"
    if text != _encodable(text):
        yield f"{option}: is no text in UTF-8"


def _encodable(text: str) -> str:
    """The text with a question mark for each byte or half character that is no text."""
    return text.encode("utf-8", "replace").decode("utf-8")


# ---- the model ----


@dataclass(frozen=True)
class Place:
    """Where a model is.

    Attributes:
        name: a folder, or a hub name.
        is_adapter: the folder holds an adapter, which names its base.
        on_hub: it may be downloaded.
    """

    name: str
    is_adapter: bool = False
    on_hub: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model that generates text, with what belongs to it.

    Attributes:
        name: for people.
        model: of transformers, or of peft; in evaluation mode, without generation settings of its own.
        stops: tokens that end a text.
        positions: most tokens of prompt and completion; None: any number.
    """

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    positions: int | None


def find_model(source: str) -> Place:
    """The model that is meant by a run's folder, an exported or an adapter's folder, or a hub name.

    Raises:
        BadInputError: where the folder does not exist or holds no model.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        _require_hub_name(source, folder)
        return Place(source, on_hub=True)
    found = _in_folder(folder) or _in_folder(folder / "export")
    if found is not None:
        return found
    if any((folder / name).exists() for name in ("recipe.yaml", "checkpoints", "metrics.jsonl")):
        raise BadInputError(
            f"{source!r}: the run has no export; make one of its last checkpoint: "
            f"toolkit export {source} --to {folder / 'export'}"
        )
    raise BadInputError(
        f"{source!r} holds neither a model (config.json), nor an adapter (adapter_config.json), nor a run "
        "(recipe.yaml, export/); name a folder that does"
    )


def _require_hub_name(source: str, folder: Path) -> None:
    require_folder(source, "SOURCE")
    parent = source.rpartition("/")[0]
    if not source.strip() or source.endswith("/") or (parent and folder.parent.is_dir()):
        raise BadInputError(f"SOURCE: the folder {source!r} does not exist; name a model's folder or a hub name")


def _in_folder(folder: Path) -> Place | None:
    if (folder / "adapter_config.json").is_file():
        return Place(str(folder), is_adapter=True)
    return Place(str(folder)) if (folder / "config.json").is_file() else None


def load_model(source: str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """The model and its tokenizer.

    Args:
        source: as `find_model` takes it. Only a hub name is ever downloaded.
        dtype: of the weights while they are in use; auto: as they are saved.
        device: auto: a GPU if there is one.

    Raises:
        BadInputError: where it cannot be loaded or generates no text.
    """
    place = find_model(source)
    import torch
    from transformers import GenerationConfig

    if device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("--device: cuda is not available on this machine; allowed here: auto, cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    base = _adapter_base(place) if place.is_adapter else place
    model = _whole_model(base, dtype)
    tokenizer = _tokenizer(place, base)
    stops = stop_tokens(model, tokenizer)
    model.generation_config = GenerationConfig()  # the options say it all
    if place.is_adapter:
        model = _with_adapter(model, tokenizer, place)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    has_end = isinstance(positions, int) and positions > 0
    return Loaded(source, model.to(device).eval(), tokenizer, stops, positions if has_end else None)


def _whole_model(place: Place, dtype: str) -> Any:
    """A causal language model whose every weight is in its files. Raises BadInputError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where = {"trust_remote_code": False, "local_files_only": not place.on_hub}
    try:
        config = AutoConfig.from_pretrained(place.name, **where)
        _require_generative(config, place)
        model, info = AutoModelForCausalLM.from_pretrained(
            place.name, config=config, dtype=dtype, output_loading_info=True, **where
        )
    except ToolkitError:
        raise
    except Exception as error:  # the libraries that read models raise a great many kinds
        where_not = " (there is no such folder, so it was looked for on the hub)" if place.on_hub else ""
        raise BadInputError(f"{place.name!r}: no model can be loaded{where_not}: {first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise BadInputError(f"{place.name!r}: its files lack {len(missing)} of the weights, for example {missing[0]}")
    return model


def _require_generative(config: Any, place: Place) -> None:
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("Classification"):
        raise BadInputError(f"{place.name!r} classifies texts ({architecture}) and generates none; name another model")


def _tokenizer(place: Place, base: Place) -> PreTrainedTokenizerBase:
    """The adapter's own where it has one. Raises BadInputError."""
    own = any((Path(place.name) / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    chosen = place if own or not place.is_adapter else base
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            chosen.name, trust_remote_code=False, local_files_only=not chosen.on_hub, padding_side="left"
        )
    except Exception as error:  # as above
        raise BadInputError(f"{chosen.name!r}: no tokenizer can be loaded: {first_line(error)}") from error


def _adapter_base(place: Place) -> Place:
    """The base that an adapter names, as a folder. Raises BadInputError where it is not on this machine."""
    config = _adapter_config(place)
    name = config.get("base_model_name_or_path")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise BadInputError(f"{place.name!r}: the adapter's task is {task} and generates no text; name another one")
    if not isinstance(name, str) or not name:
        raise BadInputError(f"{place.name!r}: adapter_config.json names no base_model_name_or_path; add it")
    for folder in (Path(name).expanduser(), Path(place.name) / name):
        if (folder / "config.json").is_file():
            return Place(str(folder))
    return Place(_cached(name, config.get("revision"), place))


def _adapter_config(place: Place) -> dict[str, Any]:
    folder = Path(place.name)
    if not any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise BadInputError(f"{place.name!r}: adapter_config.json without adapter_model.safetensors; save it again")
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInputError(f"{place.name!r}: adapter_config.json is not JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise BadInputError(f"{place.name!r}: adapter_config.json is no object; save the adapter again")
    return config


def _cached(name: str, revision: str | None, place: Place) -> str:
    """The folder of a hub model that has been downloaded before."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:  # a path is no hub name, and there are several ways of not being there
        raise BadInputError(
            f"{place.name!r}: the adapter's base {name!r} is not on this machine; put the folder there, fetch a hub "
            f"model with `hf download {name}`, or change base_model_name_or_path in its adapter_config.json"
        ) from error


def _with_adapter(model: Any, tokenizer: PreTrainedTokenizerBase, place: Place) -> Any:
    from peft import PeftModel

    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    try:
        adapted = PeftModel.from_pretrained(model, place.name)
    except Exception as error:  # of peft, safetensors, torch
        raise BadInputError(f"{place.name!r}: the adapter does not fit its base: {first_line(error)}") from error
    _require_whole(adapted, Path(place.name) / "adapter_model.safetensors")
    return adapted


def _require_whole(adapted: Any, file: Path) -> None:
    """Raises BadInputError where the file's weights are not those of the adapter: peft loads what it finds."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    if not file.is_file():
        return
    with safe_open(file, framework="pt") as opened:
        stored = set(opened.keys())
    needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    odd = (needed - stored) | {name for name in stored - needed if ".lora_" in name}
    if odd:
        raise BadInputError(
            f"{str(file)!r} lacks weights of its modules, or has others: {min(odd)}; it belongs to another base or "
            "another adapter_config.json"
        )


def stop_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text: of the generation settings, of the tokenizer, and of an assistant's turn."""
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None) | turn_ends(tokenizer)


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens that the chat template puts behind an assistant's words; none without a template."""
    if tokenizer.chat_template is None:
        return frozenset()
    from toolkit.data.chat import special_ids

    words = "Seven"
    messages = [{"role": "user", "content": "What is three plus four?"}, {"role": "assistant", "content": words}]
    with suppress(Exception):  # a template is a program, and may refuse a conversation in any way
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        behind = tokenizer(text.rpartition(words)[2], add_special_tokens=False)["input_ids"]
        return frozenset(behind) & special_ids(tokenizer)
    return frozenset()


# ---- prompts ----


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    Attributes:
        context: its last tokens, where the completion goes on in the same text.
    """

    ids: list[int]
    context: list[int]


def encode_prompt(
    loaded: Loaded,
    prompt: str | list[Message],
    system: str | None = None,
    raw: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> Prompt:
    """The tokens that a completion follows, as training has them.

    A text is a user's turn, unless there is no chat template or it is `raw`; then it is plain text, behind the
    begin-of-text token if there is one.

    Args:
        system: put before messages that have no system text of their own.

    Raises:
        BadInputError: where it needs a chat template and there is none, the template refuses it, or it is too long.
    """
    if raw or loaded.tokenizer.chat_template is None:
        if system is not None or not isinstance(prompt, str):
            what = "messages" if system is None else "a system text"
            cause = "--raw leaves it out" if raw else f"the tokenizer of {loaded.name!r} has none"
            raise BadInputError(f"{what} need{'s' if system else ''} a chat template, and {cause}; give plain text")
        ids = _plain(loaded.tokenizer, prompt)
        return Prompt(_fitting(loaded, ids), ids[-CONTEXT:])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Prompt(_fitting(loaded, _templated(loaded.tokenizer, messages, tools)), [])


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None
) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and may refuse a conversation in any way
        raise BadInputError(f"the chat template refuses it: {first_line(error)}") from error
    # The template writes the begin-of-text token itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _fitting(loaded: Loaded, ids: list[int]) -> list[int]:
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


# ---- completions ----


def complete(loaded: Loaded, prompts: list[Prompt], sampling: Sampling) -> list[str]:
    """A completion of each prompt, in one batch; those that come near the model's last position in others."""
    batches: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        batches.setdefault(_room(loaded, prompt, sampling), []).append(number)
    texts = [""] * len(prompts)
    for room, numbers in batches.items():
        completions = _generate(loaded, [prompts[number].ids for number in numbers], room, sampling)
        for number, ids in zip(numbers, completions, strict=True):
            texts[number] = _continuation(loaded.tokenizer, prompts[number].context, ids)
    return texts


def stream(loaded: Loaded, prompt: Prompt, sampling: Sampling, write: Callable[[str], object]) -> str:
    """The completion of one prompt, which `write` is given piece by piece as it comes."""
    pieces = _Pieces(loaded, prompt, write)
    room = _room(loaded, prompt, sampling)
    ids = _generate(loaded, [prompt.ids], room, sampling, pieces)[0]
    return _continuation(loaded.tokenizer, prompt.context, ids)


def _room(loaded: Loaded, prompt: Prompt, sampling: Sampling) -> int:
    """Most tokens of the completion."""
    free = math.inf if loaded.positions is None else loaded.positions - len(prompt.ids)
    return int(min(free, sampling.max_new_tokens))


def _generate(
    loaded: Loaded, rows: list[list[int]], room: int, sampling: Sampling, streamer: _Pieces | None = None
) -> list[list[int]]:
    """At most `room` tokens for each row, up to the first that ends a text and without it."""
    import torch

    from toolkit.data.tokenizer import pad_id

    padding = pad_id(loaded.tokenizer)
    width = max(map(len, rows))
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    device = loaded.model.device
    with _told():
        found = loaded.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=room,
            eos_token_id=sorted(loaded.stops) or None,
            pad_token_id=padding,
            streamer=streamer,
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )
    return [_until(row, loaded.stops) for row in found[:, width:].tolist()]


def _until(ids: list[int], stops: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


@contextmanager
def _told() -> Iterator[None]:
    """Says what can be done about a failure of generation."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ToolkitError(
            "the GPU has too little memory; lower --batch-size or --max-new-tokens, or try --dtype bfloat16"
        ) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ToolkitError("the model's outputs are no finite numbers; try --dtype float32") from error


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
            self._ids += _until(tokens.flatten().tolist(), self._stops)
            self._show(is_last=False)
        self._is_prompt = False

    def end(self) -> None:
        self._show(is_last=True)

    def _show(self, is_last: bool) -> None:
        text = _decode(self._tokenizer, self._ids)
        if text.endswith(HALF_CHARACTER) and not is_last:
            return
        if len(text) > len(self._shown):
            self._write(text[len(self._shown) :])
        if len(self._ids) > self.MAX_TOKENS:
            self._ids = self._ids[-CONTEXT:]
            text = _decode(self._tokenizer, self._ids)
        self._shown = text


# ---- rows of files ----


@dataclass(frozen=True)
class Row:
    """A prompt of a file.

    Attributes:
        place: file:line, for people.
        given: the prompt as the file has it.
        prompt: a text, or checked messages.
        tools: that the messages' assistant may call.
        answers: those that are right; none where it is not to be evaluated.
    """

    place: str
    given: Any
    prompt: str | list[Message]
    tools: list[dict[str, Any]] | None = None
    answers: tuple[str, ...] = ()


def read_rows(path: Path, option: str) -> list[Row]:
    """The rows of a file of prompts (`--file`: .txt or .jsonl), or of prompts with answers (`--eval`: .jsonl).

    Raises:
        BadInputError: where it cannot be read, holds no row, or one that is wrong; each is named by its line.
    """
    kinds = (".jsonl",) if option == "--eval" else (".txt", ".jsonl")
    if path.suffix not in kinds:
        raise BadInputError(f"{option}: {str(path)!r} is of an unknown kind; allowed: {', '.join(kinds)}")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInputError(f"{option}: {str(path)!r} cannot be read: {error.strerror}; name a file") from error

    named = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not named:
        raise BadInputError(f"{option}: {str(path)!r} holds no prompt")
    make = _plain_row if path.suffix == ".txt" else partial(_json_row, with_answers=option == "--eval")
    return _all_right(option, [(place, partial(make, place, line)) for place, line in named])


def _all_right(option: str, attempts: Iterable[tuple[str, Callable[[], T]]]) -> list[T]:
    """What comes of the attempts, each with its row's place. Raises BadInputError that names the bad rows."""
    good, problems = [], []
    for place, attempt in attempts:
        try:
            good.append(attempt())
        except BadInputError as problem:
            problems.append(f"  {place}: {problem}")
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        shown = [*problems[:PROBLEMS_SHOWN], *([f"  and {more} more"] if more > 0 else [])]
        raise BadInputError("\n".join([f"{option}: rows that cannot be used: {len(problems)}", *shown]))
    return good


def _plain_row(place: str, line: bytes) -> Row:
    text = _decoded(line)
    return Row(place, text, text)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError("not UTF-8") from None


def _json_row(place: str, line: bytes, with_answers: bool) -> Row:
    try:
        fields = json.loads(_decoded(line))
    except (ValueError, RecursionError):
        raise BadInputError("not JSON") from None
    if not isinstance(fields, dict):
        raise BadInputError("no object, as {} is")
    column = next((name for name in COLUMNS if name in fields), None)
    if column is None:
        has = f"it has {', '.join(map(repr, fields))}" if fields else "it is empty"
        raise BadInputError(f"no prompt; {has}; needed: one of {', '.join(COLUMNS)}")
    prompt, tools = _asked(column, fields[column], fields.get("tools"))
    answers = _answers(fields.get("answer")) if with_answers else ()
    return Row(place, fields[column], prompt, tools, answers)


def _asked(column: str, value: Any, tools: Any) -> tuple[str | list[Message], list[dict[str, Any]] | None]:
    """A text or messages, checked as training's rows are, and the messages' tools. Raises BadInputError."""
    from toolkit.data.layouts import Conversation, Layout
    from toolkit.data.problem import RowProblem

    layout = Layout("prompt and completion", {"prompt": column, "completion": "completion", "tools": "tools"})
    completion = "any" if isinstance(value, str) else [{"role": "assistant", "content": "any"}]
    try:
        example = layout.example({column: value, "completion": completion, "tools": tools})
    except RowProblem as problem:
        raise BadInputError(str(problem)) from None
    if not isinstance(example, Conversation):
        return str(value), None
    asked = example.messages[:-1]
    if asked[-1]["role"] not in ("user", "tool"):
        raise BadInputError(f"nothing is asked: the last message is the {asked[-1]['role']}'s, and not the user's")
    return asked, example.tools


def _answers(value: Any) -> tuple[str, ...]:
    answers = value if isinstance(value, list) else [value]
    if value is None or not answers:
        raise BadInputError("answer is missing; needed: a text, or a list of texts that are right")
    for answer in answers:
        if not isinstance(answer, str):
            raise BadInputError(f"answer: {json.dumps(answer)[:LENGTH_SHOWN]} is no text; write it in quotes")
        if not answer.strip():
            raise BadInputError("answer is empty; needed: a text, or a list of texts that are right")
    return tuple(answers)


def encode_rows(loaded: Loaded, rows: list[Row], option: str, system: str | None, raw: bool) -> list[Prompt]:
    """The rows' tokens. Raises BadInputError that names the rows that `encode_prompt` refuses."""
    attempts = [(row.place, partial(encode_prompt, loaded, row.prompt, system, raw, row.tools)) for row in rows]
    return _all_right(option, attempts)


def completions(loaded: Loaded, prompts: list[Prompt], sampling: Sampling, batch_size: int) -> Iterator[str]:
    """A completion of each prompt, in their order."""
    for start in range(0, len(prompts), batch_size):
        yield from complete(loaded, prompts[start : start + batch_size], sampling)


# ---- evaluation ----


@dataclass(frozen=True)
class Mismatch:
    """A row whose completion is none of its answers."""

    row: Row
    completion: str


@dataclass(frozen=True)
class Evaluation:
    """How many completions are exactly an answer of their row."""

    num_rows: int
    mismatches: list[Mismatch]

    @property
    def exact(self) -> int:
        return self.num_rows - len(self.mismatches)

    @property
    def accuracy(self) -> float:
        """Share of the rows, 0 to 1."""
        return self.exact / self.num_rows

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        mismatches = [
            {"row": wrong.row.place, "prompt": wrong.row.given, "completion": wrong.completion}
            | {"answers": list(wrong.row.answers)}
            for wrong in self.mismatches
        ]
        return {"accuracy": self.accuracy, "exact": self.exact, "rows": self.num_rows, "mismatches": mismatches}


def evaluate(rows: list[Row], texts: Iterable[str], strict: bool = False) -> Evaluation:
    """Compares each row's completion with its answers.

    Args:
        texts: completions in the order of the rows.
        strict: as they are; else without regard to case, and to whitespace but between words.
    """
    same = str if strict else normalised
    wrong = [
        Mismatch(row, text)
        for row, text in zip(rows, texts, strict=True)
        if same(text) not in [same(answer) for answer in row.answers]
    ]
    return Evaluation(len(rows), wrong)


def normalised(text: str) -> str:
    """Without case, and with one space for whitespace between words."""
    return " ".join(text.casefold().split())


# ---- the command ----


def run(options: Options) -> None:
    """Does what the options ask for, and prints it.

    Raises:
        BadInputError: a model, a prompt or a file that cannot be used.
        ToolkitError: where the model fails.
    """
    place = find_model(options.source)
    path = options.file or options.evaluation
    rows = [] if path is None else read_rows(path, _mode(options))
    if place.on_hub:
        _tell(f"{place.name}: a hub model, which is downloaded the first time")
    with _quiet(), _lines_to(options.output, options.file) as write:
        loaded = _load(options)
        if options.prompt is not None:
            _answer_prompt(loaded, options, options.prompt)
        elif options.chat:
            _chat(loaded, options)
        elif options.file is not None:
            _answer_rows(loaded, options, rows, write)
        else:
            _evaluate_rows(loaded, options, rows, write)


def _mode(options: Options) -> str:
    return "--file" if options.file is not None else "--eval"


def _load(options: Options) -> Loaded:
    loaded = load_model(options.source, options.dtype, options.device)
    if not options.raw and loaded.tokenizer.chat_template is not None and not turn_ends(loaded.tokenizer):
        _tell("the chat template closes no turn with a special token: answers may go on up to --max-new-tokens")
    import torch

    torch.manual_seed(options.seed or 0)
    return loaded


def _answer_prompt(loaded: Loaded, options: Options, text: str) -> None:
    try:
        prompt = encode_prompt(loaded, text, options.system, options.raw)
    except BadInputError as problem:
        raise BadInputError(f"--prompt: {problem}") from None
    stream(loaded, prompt, options.sampling, _show)
    print()


def _answer_rows(loaded: Loaded, options: Options, rows: list[Row], write: Callable[[str], None]) -> None:
    for row, text in zip(rows, _completions(loaded, options, rows), strict=True):
        write(json.dumps({"prompt": row.given, "completion": text}, ensure_ascii=False))


def _evaluate_rows(loaded: Loaded, options: Options, rows: list[Row], write: Callable[[str], None]) -> None:
    found = evaluate(rows, _completions(loaded, options, rows), options.strict)
    write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if options.as_json else summary(found))


def summary(found: Evaluation) -> str:
    """The accuracy and the first wrong answers, as lines."""
    lines = [f"accuracy: {found.accuracy:.1%} ({found.exact} of {found.num_rows} rows exact)"]
    for wrong in found.mismatches[:MISMATCHES_SHOWN]:
        expected = " or ".join(_shortened(answer) for answer in wrong.row.answers)
        lines.append(f"  {wrong.row.place}: {_shortened(wrong.completion)} instead of {expected}")
    more = len(found.mismatches) - MISMATCHES_SHOWN
    return "\n".join([*lines, *([f"  and {more} more; --json has them all"] if more > 0 else [])])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= LENGTH_SHOWN else f"{text[:LENGTH_SHOWN]}...")


def _completions(loaded: Loaded, options: Options, rows: list[Row]) -> Iterable[str]:
    """Of the rows, with a bar on the terminal where nothing else is written to it."""
    prompts = encode_rows(loaded, rows, _mode(options), options.system, options.raw)
    size = options.batch_size or BATCH_SIZE
    busy = options.file is not None and options.output is None
    return track(
        completions(loaded, prompts, options.sampling, size),
        "generating",
        total=len(prompts),
        console=Console(stderr=True),
        transient=True,
        disable=busy or not sys.stderr.isatty(),
    )


def _chat(loaded: Loaded, options: Options) -> None:
    if loaded.tokenizer.chat_template is None:
        raise BadInputError(
            f"--chat: the tokenizer of {loaded.name!r} has no chat template; use --prompt, or train with "
            "data.chat_template"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines)
    _tell("/reset: forget the conversation; /quit: end")
    try:
        converse(loaded, options.sampling, options.system, _read_line, _show)
    except KeyboardInterrupt:
        print()


def converse(
    loaded: Loaded,
    sampling: Sampling,
    system: str | None,
    read: Callable[[], str | None],
    write: Callable[[str], object],
) -> None:
    """A conversation, up to `/quit` or the end of what `read` gives line by line (None)."""
    messages: list[Message] = []
    while (line := read()) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            messages.clear()
            _tell("the conversation is forgotten")
        elif line.strip():
            messages += _turns(loaded, sampling, system, [*messages, {"role": "user", "content": line}], write)


def _turns(
    loaded: Loaded, sampling: Sampling, system: str | None, messages: list[Message], write: Callable[[str], object]
) -> list[Message]:
    """What a conversation grows by: its last message and the answer; nothing where it cannot be answered."""
    try:
        prompt = encode_prompt(loaded, messages, system)
    except BadInputError as problem:
        _tell(f"{problem}; /reset forgets the conversation")
        return []
    answer = stream(loaded, prompt, sampling, write)
    write("\n")
    return [messages[-1], {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return _encodable(input("> " if is_terminal else ""))
    except EOFError:
        print("\n" if is_terminal else "", end="")
        return None


def _show(text: str) -> None:
    """Writes to stdout at once, with a question mark for what its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _lines_to(output: Path | None, source: Path | None) -> Iterator[Callable[[str], None]]:
    """Writes lines to stdout, or to a file that is there when it is whole.

    Raises:
        BadInputError: where the file cannot be written, or is the one that is read.
    """
    if output is None:
        yield partial(print, flush=True)
        return
    if source is not None and output.exists() and output.samefile(source):
        raise BadInputError(f"--output: {str(output)!r} is the file of --file; name another one")
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        if output.exists() and not output.is_file():
            raise OSError(errno.EEXIST, "it exists and is no file")
        output.parent.mkdir(parents=True, exist_ok=True)
        file = unfinished.open("w", encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"--output: {str(output)!r} cannot be written: {error.strerror}; name another file"
        ) from error
    try:
        with file:
            yield partial(print, file=file)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps bars and warnings of the libraries from the terminal."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
