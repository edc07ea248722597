"""`toolkit generate` with images: the answers of transformers' own processor and model."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sights import EYES, drawn_image, save_seeing
from support.texts import make_texts, write_rows
from support.tiny import save_llama
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoProcessor, AutoTokenizer

from toolkit import evaluate, generate
from toolkit.data import build
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.sampling.sampling import sample
from toolkit.generation.text.command import run
from toolkit.generation.text.options import Options
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection, ModelSection

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
        drawn_image(number).save(folder / f"{number}.png")
    return folder


def options(folder: Path, kind: str, *numbers: int, prompt: str = ASKED) -> Options:
    images = tuple(folder / f"{number}.png" for number in numbers)
    return Options(str(folder / kind), prompt=prompt, images=images, temperature=0.0, max_new_tokens=6)


def expected(folder: Path, kind: str, numbers: tuple[int, ...]) -> str:
    processor = AutoProcessor.from_pretrained(folder / kind)
    model = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).eval()
    written = EYES[kind]["written"] * len(numbers) + ASKED
    text = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
    images = [[drawn_image(number) for number in numbers]] if numbers else None
    inputs = processor(text=[text], images=images, return_tensors="pt")
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
    with pytest.raises(BadInputError, match=r"--image: an image that cannot be read: No such file.*9.png"):
        run(options(folder, "llava", 9))
    with pytest.raises(BadInputError, match=r"writes 2 places for 1 images; the prompt must not hold <image>"):
        run(options(folder, "llava", 0, prompt="see <image>"))
    with pytest.raises(BadInputError, match="--image and --chat contradict each other: --image belongs to --prompt"):
        Options("none", chat=True, images=(tmp_path,))
    with pytest.raises(BadInputError, match="images go where the chat template says; leave --raw out"):
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


ROWS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"prompt": ASKED, "images": ["0.png"], "answer": "?"}, (0,)),
    ({"prompt": ASKED, "answer": "?"}, ()),
    ({"question": f"<image><image>{ASKED}", "image": ["1.png", "2.png"], "answer": "?"}, (1, 2)),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "2.png"}, {"type": "text", "text": ASKED}]}
            ],
            "answer": "?",
        },
        (2,),
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_images_are_answered_as_by_transformers(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch with a row of words alone, evaluated, and from a script."""
    lines = [json.dumps(row) for row, _ in ROWS]
    file = folder / f"{kind}.jsonl"
    file.write_text("\n".join(lines))
    answers = [expected(folder, kind, numbers) for _, numbers in ROWS]
    assert len(set(answers)) > 2, "what is shown makes a difference"
    run(Options(str(folder / kind), file=file, output=folder / "out.jsonl", temperature=0.0, max_new_tokens=6))
    assert [json.loads(line)["completion"] for line in (folder / "out.jsonl").open()] == answers
    # All those with images in one batch, left-padded, and one by one.
    for size in (8, 1):
        again = Options(str(folder / kind), file=file, output=folder / f"{size}.jsonl", batch_size=size)
        run(dataclasses.replace(again, temperature=0.0, max_new_tokens=6))
        assert [json.loads(line)["completion"] for line in (folder / f"{size}.jsonl").open()] == answers
    file.write_text("\n".join(json.dumps(json.loads(line) | {"answer": answers[0]}) for line in lines))
    found = evaluate(folder / kind, file, max_new_tokens=6)
    assert found.exact == sum(answer == answers[0] for answer in answers)
    monkeypatch.chdir(folder)
    for image in ("1.png", (folder / "1.png").read_bytes()):
        shown = [{"type": "image", "image": image}, {"type": "text", "text": ASKED}]
        found_from_script = generate(kind, [[{"role": "user", "content": shown}]], temperature=0.0, max_new_tokens=6)
        assert found_from_script == [expected(folder, kind, (1,))]


def test_samples_of_prompts_with_images_are_rows_to_train_on(folder: Path, tmp_path: Path) -> None:
    file = folder / "sampled.jsonl"
    answer = expected(folder, "llava", (0,))
    rows = [{"prompt": ASKED, "images": [f"{n}.png"], "answer": answer} for n in range(2)]
    write_rows(file, rows)
    asked = SampleOptions(str(folder / "llava"), file, tmp_path / "to", samples=4, max_new_tokens=24, temperature=2.0)
    sample(asked)
    made = [json.loads(line) for line in (tmp_path / "to" / "labels.jsonl").open()]
    files = [(folder / f"{n}.png").read_bytes() for n in range(2)]
    assert made
    for row in made:
        shown, words = row["prompt"][0]["content"]
        assert (shown["type"], words) == ("image", {"type": "text", "text": ASKED})
        assert base64.b64decode(shown["base64"]) in files
    both = [{**row, "label": good} for row in made[:1] for good in (True, False)]
    write_rows(tmp_path / "both.jsonl", both)
    given = {"max_length": 128, "cache_dir": str(tmp_path / "cache"), "train": [str(tmp_path / "both.jsonl")]}
    data = DataSection.model_validate({**given, "packing": False})
    tokens = tokenizer.load(ModelSection(name_or_path=str(folder / "llava")), data)
    assert build.build(data, tokens, 0, ObjectiveSection(kind="kto")).train.has_images


def scored_model(folder: Path, name: str, of: str, pad: str) -> Path:
    """transformers' classifier of one score with a drawn head, on a model and beside its processor."""
    torch.manual_seed(2)
    judge: Any = AutoModelForSequenceClassification.from_pretrained(folder / of, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(judge.score.weight, std=0.5)
    shutil.copytree(folder / of, folder / name)
    tokens = AutoTokenizer.from_pretrained(folder / of)
    judge.config.get_text_config().sliding_window = 512  # otherwise the last token, whose score it is, sees no image
    judge.config.pad_token_id = judge.config.get_text_config().pad_token_id = tokens.convert_tokens_to_ids(pad)
    judge.save_pretrained(folder / name)
    return folder / name


def test_a_reward_model_scores_what_it_sees(folder: Path, tmp_path: Path) -> None:
    judge = scored_model(folder, "judge", "gemma3", "<|pad|>")
    shown = [["0.png", "1.png"], [], ["2.png"]]
    rows = [{"prompt": ASKED, **({"images": images} if images else {})} for images in shown]
    write_rows(folder / "judged.jsonl", rows)
    settings = {"samples": 3, "max_new_tokens": 5, "temperature": 2.0, "reward": str(judge)}
    sample(SampleOptions(str(folder / "gemma3"), folder / "judged.jsonl", tmp_path / "to", **settings))
    processor = AutoProcessor.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    samples = [json.loads(line) for line in (tmp_path / "to/samples.jsonl").open()]
    scores = [each["score"] for each in samples if each["completion"].strip()]
    assert len({round(score, 4) for score in scores}) > 5
    for each in samples:
        if not each["completion"].strip():
            continue
        images = [drawn_image(int(name[0])) for name in shown[each["row"]]]
        asked = EYES["gemma3"]["written"] * len(images) + ASKED
        text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{each['completion']}<|im_end|>\n"
        inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
        with torch.no_grad():
            assert each["score"] == pytest.approx(model(**inputs).logits.item(), abs=1e-5), each["row"]
            if images:
                others = {"pixel_values": inputs["pixel_values"].flip(0, -1)}
                assert abs(model(**{**inputs, **others}).logits.item() - each["score"]) > 1e-3, "it depends on them"


def test_a_reward_model_that_does_not_see_is_shown_no_images(folder: Path, tmp_path: Path) -> None:
    judge = scored_model(folder, "blind-judge", "blind", "<|endoftext|>")
    (folder / "seen.jsonl").write_text(json.dumps({"prompt": ASKED, "images": ["0.png"]}))
    options = SampleOptions(str(folder / "llava"), folder / "seen.jsonl", tmp_path / "to", samples=4, temperature=2.0)
    told = (
        "cannot be given a sample: .*an image.*, and the reward model's folder has no image processor; leave such rows"
    )
    with pytest.raises(BadInputError, match=told):
        sample(dataclasses.replace(options, reward=str(judge), max_new_tokens=5))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": ASKED, "images": ["9.png"]}, "an image that is missing"),
        ({"prompt": ASKED, "images": ["../0.png"]}, "leads out of the folder"),
        ({"prompt": f"<image><image>{ASKED}", "images": ["0.png"]}, "more places for images than the row has images"),
        ({"prompt": ASKED, "images": ["damaged.png"]}, "an image that is damaged or not one of"),
        ({"prompt": ASKED, "videos": ["a.mp4"]}, "video"),
    ],
)
def test_rows_whose_images_cannot_be_shown_are_named(folder: Path, row: dict[str, Any], told: str) -> None:
    (folder / "damaged.png").write_text("no image")
    file = folder / "bad.jsonl"
    file.write_text(json.dumps(row | {"answer": "a"}))
    with pytest.raises(BadInputError, match=f"(?s)rows that cannot be used: 1.*bad.jsonl:1: .*{told}"):
        run(Options(str(folder / "llava"), evaluation=file))


def test_a_model_that_does_not_see_is_given_no_images(folder: Path) -> None:
    (folder / "one.jsonl").write_text(json.dumps({"prompt": ASKED, "images": ["0.png"], "answer": "a"}))
    with pytest.raises(BadInputError, match="blind' has no processor of images"):
        run(Options(str(folder / "blind"), evaluation=folder / "one.jsonl"))
