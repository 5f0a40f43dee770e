"""A draft that brings a tokenizer must bring its target's, however the file is written."""

import json

import pytest

from draft_service.check import resolve
from draft_service.tokenizers import differences
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama
from tests.tokenizer_files import write_harmony_tokenizer, write_tokenizer


@pytest.fixture
def file(tmp_path):
    write_tokenizer(tmp_path)
    return json.loads((tmp_path / "tokenizer.json").read_text())


def written(file, **options):
    return json.dumps(file, **options).encode()


def test_formatting_is_no_difference(file):
    other = dict(reversed(file.items()))
    other["model"] = dict(reversed(file["model"].items()))
    other["model"]["vocab"] = dict(reversed(file["model"]["vocab"].items()))
    other["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in file["model"]["merges"]]
    other["truncation"] = {"max_length": 512}
    assert other["model"]["merges"] != file["model"]["merges"]
    assert differences(written(file), written(other, indent=3, ensure_ascii=False)) == []


def renumber(file):
    vocabulary = file["model"]["vocab"]
    vocabulary["the"], vocabulary["and"] = vocabulary["and"], vocabulary["the"]


def test_every_part_that_differs_is_named(file):
    changes = {
        "tokens": renumber,
        "merges": lambda file: file["model"]["merges"].reverse(),
        "added tokens": lambda file: file["added_tokens"].pop(),
    }
    for part, change in changes.items():
        other = json.loads(written(file))
        change(other)
        [line] = differences(written(other), written(file))
        assert f"{part} differ: " in line, line
    assert line == "1 added tokens differ: '<|system|>' is absent here and 4 there"


def test_a_vocabulary_of_scores(file):
    """As unigram models write it: the place is the id."""
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    swapped = {"model": {"type": "Unigram", "vocab": [["b", -1.0], ["a", -2.0]]}}
    assert not differences(written(unigram), written(unigram))
    assert "'a' is 1 here and 0 there" in differences(written(swapped), written(unigram))[0]


def test_check_compares_what_there_is(tmp_path):
    target = write_tiny_llama(tmp_path / "target")
    draft = write_tiny_draft(tmp_path / "draft")
    assert resolve(draft, target)["tokenizer"].startswith("the draft brings none")
    content = json.loads((target / "tokenizer.json").read_text())
    (draft / "tokenizer.json").write_text(json.dumps(content))
    assert resolve(draft, target)["tokenizer"].startswith("the target's: ")
    write_harmony_tokenizer(draft)
    with pytest.raises(ValueError, match="3 faults") as refused:
        resolve(draft, target)
    for part in ("tokens differ: ", "merges differ: ", "added tokens differ: "):
        assert part in str(refused.value)
    (draft / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not target's tokenizer: unreadable"):
        resolve(draft, target)
    (target / "tokenizer.json").unlink()
    assert resolve(draft, target)["tokenizer"].startswith("the target has none")


def test_vocabularies_of_different_sizes_do_not_pair(tmp_path):
    target = write_tiny_llama(tmp_path / "target")
    for size in (319, 321):
        draft = write_tiny_draft(tmp_path / "draft", vocab_size=size, embed=True)
        with pytest.raises(ValueError, match=f"1 fault\n.*vocab_size: .* {size} token ids, target has 320"):
            resolve(draft, target)
