"""Loads the tokenizer from the hub or a folder, or trains it on the recipe's own text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from toolkit import ranks
from toolkit.data.images.images import set_source
from toolkit.data.images.pixel_limits import PixelLimits
from toolkit.data.kinds.recognise import recognise
from toolkit.data.layouts.template_arguments import set_date, set_defaults
from toolkit.data.rows.cache import cache_folder, digest, kept
from toolkit.data.rows.hub_refusals import hub_error
from toolkit.data.rows.readers import read
from toolkit.data.rows.sources import identify_rows, map_of, open_source
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens.hub_code import require_no_stored_hub_code
from toolkit.errors import BadInputError, in_words
from toolkit.paths import require_folder
from toolkit.recipe.schema import DataSection, ModelSection, NewToken
from toolkit.terminal import LongAction, Terminal

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
_NEW = "rows_of_new_tokens"
_ADDED = "added_by_recipe"


def load(model: ModelSection, data: DataSection, objective: str = "causal_lm") -> PreTrainedTokenizerBase:
    """Returns the recipe's tokenizer with its chat template; a new one is trained once and cached by content.

    Args:
        objective: `objective.kind` of the recipe, which says what the rows hold.

    Raises:
        BadInputError: if there is none at the name or path.
    """
    tokenizer = _load(model, data, objective)
    use_template(tokenizer, data.chat_template)
    set_defaults(tokenizer, data.template_arguments)
    set_date(tokenizer, data.template_date)
    set_source(tokenizer, model.name_or_path or model.tokenizer, model.revision, PixelLimits.of(data))
    if model.add_tokens is not None:
        _add_tokens(tokenizer, model.add_tokens)
    return tokenizer


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[str | NewToken]) -> None:
    """Adds tokens, and stores them on the tokenizer, for `added_tokens` and `new_ids`.

    What the tokenizer lists as an added token already stays as it is, unless it is asked to be special.
    """
    asked = {each.content: each.special for each in (NewToken.of(token) for token in tokens)}
    known, listed = tokenizer.get_vocab(), {token.content for token in tokenizer.added_tokens_decoder.values()}
    for token, special in asked.items():
        if special:  # False keeps the tokenizer's own additional tokens, which would be replaced otherwise
            tokenizer.add_special_tokens({"additional_special_tokens": [token]}, False)
        elif token not in listed:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    setattr(tokenizer, _ADDED, list(asked))
    setattr(tokenizer, _NEW, [tokenizer.convert_tokens_to_ids(token) for token in asked if token not in known])


def added_tokens(tokenizer: object) -> list[str]:
    """Returns the tokens of `model.add_tokens`."""
    found: list[str] = getattr(tokenizer, _ADDED, [])
    return found


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Collection[int] = (), is_target: bool = False
) -> str:
    """Returns the text of what a model wrote, up to the first of the tokens that end it.

    Padding around it, the begin-of-text token before it and a special token that begins a target (mBART's language) are
    left out, and nothing else: marks of thoughts, channels and calls belong to an answer, and may be special tokens.
    """
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    first = tokenizer.added_tokens_decoder.get(ids[0]) if is_target and end else None
    begin, pad = int(first is not None and first.special), tokenizer.pad_token_id
    # Not inside, where a word may stand that some tokenizers pad with.
    begin = next((place for place in range(begin, end) if ids[place] not in (pad, tokenizer.bos_token_id)), end)
    end = next((place for place in range(end, begin, -1) if ids[place - 1] != pad), begin)
    text: str = tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False)
    return text


def new_ids(tokenizer: object) -> list[int]:
    """Returns the numbers of the tokens that `model.add_tokens` has added; empty if the tokenizer had them all."""
    found: list[int] = getattr(tokenizer, _NEW, [])
    return found


def _load(model: ModelSection, data: DataSection, objective: str) -> PreTrainedTokenizerBase:
    if model.train_tokenizer_vocab_size is not None:
        folder = train(data, model.train_tokenizer_vocab_size, objective)
        return PreTrainedTokenizerFast.from_pretrained(folder)
    name = model.tokenizer or model.name_or_path
    assert name is not None
    field = "model.tokenizer" if model.tokenizer else "model.name_or_path"
    require_folder(name, field)
    # model.revision belongs to the model's own repository; a tokenizer from another one has none.
    revision = None if model.tokenizer else model.revision
    require_no_stored_hub_code(name, revision, field)  # transformers may read it to find the tokenizer's class
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise a great many kinds about a broken file
        kind = "tokenizer" if model.tokenizer else "model"
        raise hub_error(error, field, name, kind, revision) or BadInputError(
            f"{field}: no tokenizer can be loaded from {name!r}: {in_words(error)}. Correct its tokenizer.json, "
            "tokenizer_config.json or config.json, download them again, or name another one"
        ) from error


def train(data: DataSection, vocab_size: int, objective: str = "causal_lm") -> Path:
    """Trains a byte-level byte-pair tokenizer on the training rows, and returns its folder.

    Reference: Sennrich et al., arXiv 1508.07909; byte level as in GPT-2.
    """
    markers = MARKERS.get(data.chat_template or "", [])

    def write(folder: Path) -> None:
        with LongAction(Terminal(quiet=ranks.rank() != 0), "training the tokenizer"):
            _train_byte_pairs(_texts_of_rows(data, objective), vocab_size, markers).save_pretrained(folder)

    def make() -> Path:
        key = digest("tokenizer", identify_rows(data), vocab_size, markers, objective)
        return kept(cache_folder(data) / f"tokenizer-{key}", write)

    return ranks.on_each_host(make)


def _texts_of_rows(data: DataSection, objective: str) -> Iterator[str]:
    """Yields the texts of every usable row of `data.train`."""
    through = map_of(data)
    for section in data.train:
        source = open_source(section, "data.train", through=through)
        layout = recognise(source, data.columns, objective)
        for row in (row for shard in source.shards for row in read(shard)):
            try:
                yield from layout.example(row).texts()
            # Counted and named later, when the rows are tokenised.
            except RowProblem:
                continue


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest that is equal for tokenizers that encode every text, and conversations on one day, alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # tokenizer.json or the last call may have set these; the next call sets both again.
        backend.no_truncation()
        backend.no_padding()
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name.startswith("do_")}
    own = [list(getattr(tokenizer, "bpe_ranks", ())), settings]
    if backend is None and any(own):  # a tokenizer in Python, whose vocabulary does not say how it splits
        rules += json.dumps(own, sort_keys=True)
    template = getattr(tokenizer, "chat_template", None) or ""
    # A template may write any special token.
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ways = [tokenizer.truncation_side, getattr(tokenizer, "split_special_tokens", False)]
    content = json.dumps([rules, template, special, ways], sort_keys=True)
    return f"{hashlib.sha256(content.encode()).hexdigest()}:{tokenizer.bos_token_id}:{tokenizer.eos_token_id}"


def bos_of(tokenizer: PreTrainedTokenizerBase, wanted: bool | None) -> int | None:
    """Returns the token that is added before plain text, or None if none is.

    Args:
        wanted: `data.add_bos`; if it is None, the tokenizer decides as when it encodes a text.

    Raises:
        BadInputError: if a token is wanted, and the tokenizer has none.
    """
    bos = tokenizer.bos_token_id
    if wanted and bos is None:
        raise BadInputError("data.add_bos: the tokenizer has no begin-of-text token; set it to null or false")
    # Found by encoding a text: a post-processor can add the token, and no setting shows that.
    adds_it = tokenizer("a", verbose=False)["input_ids"][:1] == [bos] if wanted is None else wanted
    return int(bos) if adds_it and bos is not None else None


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token of padding; it is never a target, so any token works without a padding token."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _train_byte_pairs(texts: Iterator[str], vocab_size: int, markers: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING, *markers],
        # All 256 bytes, so that no text has unknown tokens, whatever the training rows hold.
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = markers[-1] if markers else END_OF_TEXT  # generation stops at the token that ends a turn
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=PADDING)
