"""Rows with pictures: tokens and labels as in transformers, files found, nothing of a picture learned or cut."""

import base64
import json

import numpy as np
import pytest
import vision

from tune.collators import IGNORE, collate
from tune.datasets import load
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

PART = {"type": "image", "image": "a.png"}
TEXT = {"type": "text", "text": "What is in this image?"}
QUESTION = {"role": "user", "content": [PART, TEXT]}
URL = {"type": "image_url", "image_url": {"url": "DATA"}}
ANSWER = {"role": "assistant", "content": "It is a red square"}
MORE = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "blue."}]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that gives the folder of a family."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            folders[name] = vision.save(name, tmp_path_factory.mktemp("vision") / name)
        return folders[name]

    return folder_of


@pytest.fixture
def data(tmp_path, folder_of):
    """A function that loads rows with the pictures a.png and b.png beside them."""
    vision.picture(1).save(tmp_path / "a.png")
    vision.picture(2, width=100).save(tmp_path / "b.png")

    def data(*rows, name="qwen2_5_vl", max_seq_len=512, **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = Tokenizer(folder_of(name))
        return load(
            tokenizer, str(file), max_seq_len=max_seq_len, workers=1, cache_dir=str(tmp_path / "cache"), **options
        )

    return data


def samples_of(dataset):
    return [document for index in range(len(dataset)) for document in _list(dataset.row(index))]


def _list(row):
    return row if isinstance(row, list) else [row]


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", *[pytest.param(name, marks=pytest.mark.slow) for name in vision.FAMILIES if name != "qwen2_5_vl"]],
)
def test_tokens_and_labels_are_those_of_transformers(name, data, folder_of):
    """Of the processor's own rendering, with the mask of `{% generation %}` blocks."""
    shown = [{"type": "image", "image": vision.picture(1)}, {"type": "image", "image": vision.picture(2, width=100)}]
    text = {"type": "text", "text": "What and where?"}
    messages = [
        {"role": "user", "content": [*shown, text]},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]},
        *({**each, "content": [{"type": "text", "text": each["content"]}]} for each in MORE),
    ]
    found = vision.processor_of(name).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="np"
    )
    parts = [{"type": "image", "image": each} for each in ("a.png", "b.png")]
    (sample,) = samples_of(data({"messages": [{"role": "user", "content": [*parts, text]}, ANSWER, *MORE]}, name=name))
    assert sample.tokens.tolist() == found["input_ids"][0].tolist()
    mask = np.array(found["assistant_masks"][0], bool)
    assert sample.labels[:-1].tolist() == np.where(mask, found["input_ids"][0], IGNORE)[1:].tolist()
    pixels = collate([sample], pictures=Tokenizer(folder_of(name)).pictures).pictures
    assert pixels.count == 2
    for key, values in pixels.values.items():
        # Idefics3 arranges the tiles of a document in rows, which the model joins.
        assert np.array_equal(values.numpy().reshape(found[key].shape), found[key]), key


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>What is in this image?"}, ANSWER], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": "What is in this image?"}, ANSWER], "image": "a.png"},
        {"messages": [{"role": "user", "content": [{"type": "image"}, TEXT]}, ANSWER], "images": ["a.png"]},
        {
            "conversations": [
                {"from": "human", "value": "<image>What is in this image?"},
                {"from": "gpt", "value": ANSWER["content"]},
            ],
            "images": ["a.png"],
        },
        {"messages": [{"role": "user", "content": [URL, TEXT]}, ANSWER]},
        {"prompt": [QUESTION], "completion": [ANSWER]},
    ],
)  # fmt: skip
def test_all_spellings_of_a_picture_give_the_same_sample(data, tmp_path, row):
    vision.picture(1).save(tmp_path / "a.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    (expected,) = samples_of(data({"messages": [QUESTION, ANSWER]}))
    (sample,) = samples_of(data(json.loads(json.dumps(row).replace("DATA", url))))
    assert sample.tokens.tolist() == expected.tokens.tolist() and sample.labels.tolist() == expected.labels.tolist()
    assert [(each.digest, each.start) for each in sample.pictures] == [
        (each.digest, each.start) for each in expected.pictures
    ]


def test_equal_texts_with_other_pictures_are_other_samples(data, tmp_path):
    other = {**QUESTION, "content": [{"type": "image", "image": "c.png"}, TEXT]}
    vision.picture(3).save(tmp_path / "c.png")
    both = data({"messages": [QUESTION, ANSWER]}, {"messages": [other, ANSWER]}, {"messages": [QUESTION, ANSWER]})
    first, second, third = both.digests.tolist()
    assert first == third != second and both.copies == 1
    assert data({"messages": [QUESTION, ANSWER]}).fingerprint != data({"messages": [other, ANSWER]}).fingerprint


@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_no_part_of_a_picture_is_learned(data, train_on):
    (sample,) = samples_of(data({"messages": [QUESTION, ANSWER]}, name="idefics3", train_on=train_on))
    (picture,) = sample.pictures
    targets = sample.labels[picture.start - 1 : picture.start + picture.length - 1]
    assert picture.length > 20 and (targets == IGNORE).all() and (sample.labels != IGNORE).any()


@pytest.mark.parametrize("max_seq_len", range(20, 80, 7))
def test_a_picture_is_cut_off_as_a_whole(data, folder_of, max_seq_len):
    row = {"messages": [QUESTION, ANSWER, {**QUESTION, "content": [PART, PART]}, ANSWER, *MORE]}
    try:
        (sample,) = samples_of(data(row, max_seq_len=max_seq_len))
    except TuneError as error:
        assert "max_seq_len" in str(error)
        return
    assert len(sample.tokens) <= max_seq_len
    placeholder = Tokenizer(folder_of("qwen2_5_vl"))._tokenizer.token_to_id("<|image_pad|>")
    inside = [
        sample.tokens[each.start : each.start + each.length].tolist().count(placeholder) for each in sample.pictures
    ]
    assert sum(inside) == sample.tokens.tolist().count(placeholder) and all(count == 4 for count in inside)


def test_packed_rows_have_the_pictures_of_their_documents_in_order(data):
    row = {"messages": [{"role": "user", "content": [{**PART, "image": "b.png"}]}, ANSWER]}
    dataset = data({"messages": [QUESTION, ANSWER]}, row, {"messages": MORE}, packed=True)
    (documents,) = [dataset.row(index) for index in range(len(dataset))]
    batch = collate([documents], columns=dataset.columns, pictures=dataset.pictures)
    assert batch.pictures.count == 2
    alone = [collate([each], pictures=dataset.pictures).pictures.values for each in documents if each.pictures]
    for name, values in batch.pictures.values.items():
        assert np.array_equal(values.numpy(), np.concatenate([each[name].numpy() for each in alone]))


def test_labelled_answers_keep_the_pictures_of_their_prompts(data):
    """Also the mismatched ones, which are made of a prompt and of another row's answer."""
    rows = []
    for name, label in (("a.png", True), ("b.png", False)):
        prompt = [{"role": "user", "content": [{"type": "image", "image": name}]}]
        rows.append({"prompt": prompt, "completion": [ANSWER if label else MORE[1]], "label": label})
    dataset = data(*rows, kind="labelled")
    digests = [[picture.digest for picture in sample.pictures] for sample in samples_of(dataset)]
    assert digests[0] == digests[1] != digests[2] == digests[3] and len(digests) == 4


@pytest.mark.parametrize(
    ("content", "images", "part"),
    [
        ("What?", ["a.png", "b.png"], ""),  # both stand before the question
        ([PART], ["a.png"], "0 places for pictures, and images has 1"),
        ("<image><image>", ["a.png"], "2 places"),
        ([{"type": "image"}], None, "1 places"),
        ([{**PART, "image": "none.png"}], None, "none.png cannot be read"),
        ([{**PART, "image": "rows.jsonl"}], None, "rows.jsonl cannot be read"),
        ([{**PART, "image": "/dev/zero"}], None, "/dev/zero cannot be read"),
        ([{**PART, "image": "a\0.png"}], None, "cannot be read"),
        ([{**PART, "image": "http://a/b.png"}], None, "is a URL"),
        ([{"type": "video", "video": "a.mp4"}], None, '"video"'),
        ([PART, {"type": "text", "text": "<|image_pad|>"}], None, "2 pictures"),
        ([{**PART, "image": 4}], None, "is 4"),
    ],
)
def test_bad_pictures_are_bad_rows(data, content, images, part):
    row = {"messages": [{"role": "user", "content": content}, ANSWER], "images": images}
    if not part:
        assert [len(sample.pictures) for sample in samples_of(data(row))] == [2]
        return
    with pytest.raises(TuneError, match=r"rows\.jsonl:1") as error:
        data(row)
    assert part in str(error.value)


def test_changed_file_is_an_error(data, tmp_path):
    dataset = data({"messages": [QUESTION, ANSWER]})
    vision.picture(5).save(tmp_path / "a.png")
    with pytest.raises(TuneError, match=r"a\.png has changed"):
        collate([dataset.row(0)], pictures=dataset.pictures)


def test_text_model_refuses_pictures(tmp_path, checkpoint):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    with pytest.raises(TuneError, match=r"rows\.jsonl:1.*image"):
        load(Tokenizer(checkpoint), str(tmp_path / "rows.jsonl"), max_seq_len=64, workers=1)


def test_collating_without_pixels_is_an_error(data):
    with pytest.raises(TuneError, match=r"rows\.jsonl:1 has pictures"):
        collate([data({"messages": [QUESTION, ANSWER]}).row(0)])
