"""`toolkit generate --image`: the answer of transformers' own processor and model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.sights import EYES, picture, save_seeing
from support.texts import make_texts
from support.tiny import save_llama
from transformers import AutoModelForImageTextToText, AutoProcessor

from toolkit.errors import BadInputError
from toolkit.generation.command import run
from toolkit.generation.options import Options

KINDS = ("llava", "gemma3", "idefics3")
TEXTS = make_texts(12, seed=4)
ASKED = "what is it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictured")
    for kind in KINDS:
        save_seeing(kind, folder / kind, TEXTS)
    save_llama(folder / "blind", TEXTS, tied=True)
    for number in range(3):
        picture(number).save(folder / f"{number}.png")
    return folder


def options(folder: Path, kind: str, *numbers: int, prompt: str = ASKED) -> Options:
    images = tuple(folder / f"{number}.png" for number in numbers)
    return Options(str(folder / kind), prompt=prompt, images=images, temperature=0.0, max_new_tokens=6)


def expected(folder: Path, kind: str, numbers: tuple[int, ...]) -> str:
    processor = AutoProcessor.from_pretrained(folder / kind)
    model = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).eval()
    written = EYES[kind]["written"] * len(numbers) + ASKED
    text = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[text], images=[[picture(number) for number in numbers]], return_tensors="pt")
    before = inputs["input_ids"].shape[1]
    found = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)[0, before:]
    ends = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", processor.tokenizer.eos_token or "<|im_end|>"])
    ids = found.tolist()
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return str(processor.tokenizer.decode(ids[:stop], skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_of_transformers(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for numbers in ((0,), (1,), (0, 2)):
        run(options(folder, kind, *numbers))
        answers.append(capsys.readouterr().out.rstrip("\n"))
        assert answers[-1] == expected(folder, kind, numbers)
    assert kind == "gemma3" or len(set(answers)) > 1, "what is shown makes a difference"


def test_what_cannot_be_shown_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="blind' has no processor of images"):
        run(options(folder, "blind", 0))
    with pytest.raises(BadInputError, match=r"--image: '.*9.png': an image that cannot be read: No such file"):
        run(options(folder, "llava", 9))
    with pytest.raises(BadInputError, match=r"writes 2 places for 1 images; the prompt must not hold <image>"):
        run(options(folder, "llava", 0, prompt="see <image>"))
    with pytest.raises(BadInputError, match="--image and --chat contradict each other: --image belongs to --prompt"):
        Options("none", chat=True, images=(tmp_path,))
    with pytest.raises(BadInputError, match="an image stands where the chat template says; leave --raw out"):
        Options("none", prompt="a", raw=True, images=(tmp_path,))
    bomb = tmp_path / "text.png"
    bomb.write_text("no image")
    with pytest.raises(BadInputError, match="an image that is damaged or not one of"):
        run(Options(str(folder / "llava"), prompt="a", images=(bomb,)))


def test_a_template_that_refuses_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llava", tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text("{{ raise_exception('no system text') }}")
    images = (folder / "0.png",)
    with pytest.raises(BadInputError, match="--image: the chat template rejects it: no system text"):
        run(Options(str(tmp_path / "strict"), prompt="a", images=images, system="be brief"))
