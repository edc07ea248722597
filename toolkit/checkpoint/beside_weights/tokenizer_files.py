"""Writes the files of a tokenizer: those of its base, with what the recipe changed set in them.

A recipe changes the chat template (`data.chat_template`, `data.template_arguments`) and adds tokens
(`model.add_tokens`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.tokens.tokenizer import added_tokens
from toolkit.errors import first_line
from toolkit.model.beside_weights.base_files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZERS,
    BaseFiles,
    as_written,
)

Templates = dict[str, str]

OLDER_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names of classes that transformers 4 knows, by that of transformers 5, which knows both."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, files: BaseFiles, has_config: bool = True) -> None:
    """Writes a tokenizer.

    Args:
        tokenizer: the tokenizer.
        folder: the folder of the export.
        files: the files that it was loaded from; without any, it is written as transformers 4 and 5 read it.
        has_config: whether the folder has the config.json that these files were next to. transformers 5 finds the class
            by it, also where the files name another one.

    Raises:
        OSError: if a file cannot be written.
    """
    own = files.matching(TOKENIZERS)
    kept = own.without(_replaced_templates(tokenizer, own)).contents
    contents = _new_files(tokenizer, folder) if not own.contents else {**kept}
    if own.contents:
        contents |= _with_template(tokenizer, own)
        contents |= _with_tokens(tokenizer, BaseFiles(contents))
        if not has_config:
            contents |= _with_class(tokenizer, BaseFiles(contents))
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _new_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, bytes]:
    """Writes a tokenizer by transformers. Returns the file that needs older names, for transformers 4."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(first_line(error)) from error  # of tokenizers, which has no other kind
    return in_older_names(BaseFiles.read(folder, [TOKENIZER_CONFIG])).contents


def in_older_names(files: BaseFiles) -> BaseFiles:
    """Returns a tokenizer's files with settings that transformers 4 reads, too, if transformers 5 wrote them."""
    fields = files.fields(TOKENIZER_CONFIG)
    if fields is None:
        return files
    if (ran := fields.get("tokenizer_class")) in OLDER_CLASS:
        fields["tokenizer_class"] = OLDER_CLASS[ran]
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only", "backend"):
        fields.pop(name, None)
    return files | BaseFiles({TOKENIZER_CONFIG: as_written(files.contents[TOKENIZER_CONFIG], fields)})


def templates_in(files: BaseFiles) -> Templates:
    """Returns the chat templates that transformers reads from files, by name; a single one is `default`."""
    named = {Path(name).stem: str(files.text(name)) for name in files.contents if name.startswith(f"{TEMPLATES}/")}
    if (text := files.text(CHAT_TEMPLATE)) is not None:
        named["default"] = text
    if named:
        return named
    fields = files.fields(TOKENIZER_CONFIG) or {}
    return _by_name(fields.get("chat_template"))


def templates_of(tokenizer: PreTrainedTokenizerBase) -> Templates:
    """Returns the chat templates of a tokenizer, by name; a single one is `default`."""
    return _by_name(getattr(tokenizer, "chat_template", None))


def _replaced_templates(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> list[str]:
    """Returns the files of further templates that a recipe's only one has replaced."""
    now = templates_of(tokenizer)
    return [name for name in files.contents if name.startswith(f"{TEMPLATES}/") and Path(name).stem not in now]


def _by_name(template: Any) -> Templates:
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template if isinstance(template, dict) else {} if template is None else {"default": template}


def _with_template(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the files that change with the chat template, wherever the base has one."""
    now = templates_of(tokenizer)
    if now == templates_in(files) or not now:
        return {}
    found = {f"{TEMPLATES}/{name}.jinja": text.encode() for name, text in now.items() if name != "default"}
    found = {name: text for name, text in found.items() if name in files.contents}
    default = now.get("default")
    if CHAT_TEMPLATE in files.contents and default is not None:
        found[CHAT_TEMPLATE] = default.encode()
    if (fields := files.fields(PROCESSOR_TEMPLATE)) is not None:
        found[PROCESSOR_TEMPLATE] = as_written(files.contents[PROCESSOR_TEMPLATE], fields | {"chat_template": default})
    fields = files.fields(TOKENIZER_CONFIG) or {}
    if "chat_template" in fields or CHAT_TEMPLATE not in found:
        several = [{"name": name, "template": text} for name, text in now.items()]
        fields["chat_template"] = default if now.keys() == {"default"} else several
        found[TOKENIZER_CONFIG] = as_written(files.contents.get(TOKENIZER_CONFIG), fields)
    return found


def _with_tokens(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the files that change with `model.add_tokens`: each that lists added or special tokens."""
    names = added_tokens(tokenizer)
    if not names:
        return {}
    added: dict[int, dict[str, Any]] = {}
    for name in names:
        number = int(tokenizer.convert_tokens_to_ids(name))
        token = tokenizer.added_tokens_decoder[number]
        added[number] = {
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
    changed: dict[str, dict[str, Any]] = {TOKENIZER_CONFIG: files.fields(TOKENIZER_CONFIG) or {}}
    for name in (TOKENIZER, SPECIAL_TOKENS, ADDED_TOKENS):
        if (fields := files.fields(name)) is not None:
            changed[name] = fields
    if TOKENIZER in changed:
        kept = [each for each in changed[TOKENIZER].get("added_tokens") or [] if each["id"] not in added]
        new = [{"id": number, **token} for number, token in added.items()]
        changed[TOKENIZER]["added_tokens"] = sorted(kept + new, key=lambda each: int(each["id"]))
    settings = changed[TOKENIZER_CONFIG]
    # transformers 5 lists added tokens in tokenizer.json alone, and adds no others where this key names some.
    inside = {str(each["id"]): each for each in changed.get(TOKENIZER, {}).get("added_tokens") or []}
    own = settings.get("added_tokens_decoder") or inside
    decoder = {**own, **{str(number): added[number] for number in added}}
    decoder = {number: {key: value for key, value in each.items() if key != "id"} for number, each in decoder.items()}
    settings["added_tokens_decoder"] = dict(sorted(decoder.items(), key=lambda item: int(item[0])))
    special = [token["content"] for token in added.values() if token["special"]]
    if special:
        _list_special(settings, special)
    if special and SPECIAL_TOKENS in changed:
        _list_special(changed[SPECIAL_TOKENS], special)
    if ADDED_TOKENS in changed:
        changed[ADDED_TOKENS] |= {token["content"]: number for number, token in added.items()}
    return {name: as_written(files.contents.get(name), fields) for name, fields in changed.items()}


def _with_class(tokenizer: PreTrainedTokenizerBase, files: BaseFiles) -> dict[str, bytes]:
    """Returns the file that names the tokenizer's class, if it does not name that of the run."""
    fields, ran = files.fields(TOKENIZER_CONFIG) or {}, type(tokenizer).__name__
    ran = OLDER_CLASS.get(ran, ran)
    if str(fields.get("tokenizer_class")).removesuffix("Fast") == ran.removesuffix("Fast"):
        return {}
    fields["tokenizer_class"] = ran
    return {TOKENIZER_CONFIG: as_written(files.contents.get(TOKENIZER_CONFIG), fields)}


def _list_special(fields: dict[str, Any], names: list[str]) -> None:
    """Adds tokens to the list of additional special tokens, which transformers 5 calls extra."""
    key = (
        "extra_special_tokens" if isinstance(fields.get("extra_special_tokens"), list) else "additional_special_tokens"
    )
    listed = fields.get(key) or []
    shown = {each["content"] if isinstance(each, dict) else each for each in listed}
    fields[key] = [*listed, *(name for name in names if name not in shown)]
