"""Texts become tokens, and tab-separated files become batches: reading, cutting, padding, splitting and errors."""

import functools
from dataclasses import replace
from pathlib import Path

import modules
import numpy as np
import pytest
import torch
from modules import on_rank

from deeplightning.config.schema import Target
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.text import TextData, Texts, read_tsv
from deeplightning.run.inputs import inputs_of
from deeplightning.text_spec import SPECIAL, TextError, TextSpec, from_lines, vocabulary, words_of

FILMS = [("a fine film", 1), ("dull", 0), ("a dull , bleak film", 0), ("fine , fresh and funny", 1)]


data_config = functools.partial(modules.data_config, batch_size=2)


def tsv(path, rows, header="sentence\tlabel\n"):
    path.write_text(header + "".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- texts


def test_words_are_what_the_page_says():
    """Texts become lower case and NFC, apostrophes stay inside words, other signs are tokens, and blanks are not."""
    assert words_of("It's  n't ``GOOD''\t-- 1,000 re\u0301sume\u0301s\u00a0!") == (
        ["it's", "n't", "`", "`", "good", "'", "'", "-", "-", "1", ",", "000", "r\u00e9sum\u00e9s", "!"]
    )
    assert words_of("It's", lower=False) == ["It's"]


def test_a_vocabulary_is_the_same_for_the_same_texts_in_any_order():
    """Frequent words come first, ties are alphabetical, and rare words and those above the size are omitted."""
    texts = ["b a c", "a b", "a d"]
    assert vocabulary(texts) == vocabulary(texts[::-1]) == "\n".join([*SPECIAL, "a", "b", "c", "d"]) + "\n"
    assert vocabulary(texts, min_count=2) == "\n".join([*SPECIAL, "a", "b"]) + "\n"
    assert vocabulary(texts, max_size=4) == "\n".join([*SPECIAL, "a"]) + "\n"


def test_tokens_are_numbers_of_words_and_an_end():
    """An unknown word is 1, each text ends with 2, and words such as `<end>` in a text are not special tokens."""
    spec = TextSpec("words", vocabulary(["a b"]))
    assert spec.size == 5
    assert spec.encode(["b A x", "", "<end>"]) == [[4, 3, 1, 2], [2], [1, 1, 1, 2]]
    assert spec.encode(["a b a b"], max_length=3) == [[3, 4, 2]]
    assert TextSpec("words", vocabulary(["a b"]), max_length=2).encode(["b b b"]) == [[4, 2]]
    assert spec.stack([[3, 2], [2]]).tolist() == [[3, 2], [2, 0]]


def test_a_spec_travels_as_plain_types():
    """Its dictionary and content restore the same spec; an unsuitable dictionary is refused."""
    options = {"lower": False, "max_length": 9, "limit": 12, "column": "review", "encoding": "cp1252"}
    spec = TextSpec("words", vocabulary(["a b"]), **options)
    assert TextSpec.from_dict(spec.to_dict(), spec.content) == spec
    older = {key: value for key, value in spec.to_dict().items() if key not in ("column", "encoding")}
    assert TextSpec.from_dict(older, spec.content) == replace(spec, column=None, encoding="utf-8")
    with pytest.raises(ValueError, match="size is 5, not 6"):
        TextSpec.from_dict(spec.to_dict() | {"size": 6}, spec.content)
    with pytest.raises(ValueError, match="look at lower"):
        TextSpec.from_dict({key: value for key, value in spec.to_dict().items() if key != "lower"}, spec.content)
    with pytest.raises(ValueError, match="tokenizer must be one of words, hugging_face"):
        TextSpec("letters", spec.content)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [(b"\x89PNG\r\n", 415, "UTF-8"), (b" \n", 400, "empty"), ("a a a", 413, "4 tokens, and the network takes at most")],
)
def test_a_text_that_cannot_be_used_is_told(text, status, words):
    """Bytes that are not text, an empty text and one that is too long for the network are refused."""
    with pytest.raises(TextError, match=words) as caught:
        TextSpec("words", vocabulary(["a b"]), limit=3).prepare(text)
    assert caught.value.status == status


# ---- files


def test_quotes_are_plain_characters(tmp_path):
    """An unclosed quote has no effect, unlike in a CSV reader; the same holds for files to predict."""
    rows = [('" a fine film', 1), ("dull", 0), ('"a" "b"', 1)]
    path = tsv(tmp_path / "train", rows)
    found = read_tsv(path)
    assert found.texts == [text for text, _ in rows]
    assert found.labels.tolist() == [1, 0, 1]
    spec = TextSpec("words", vocabulary(found.texts))
    path = tsv(tmp_path / "asked.tsv", [('"all of it"', 1), ('""', 0)])
    assert [text for _, text in inputs_of(path, "text", spec)] == read_tsv(path).texts == ['"all of it"', '""']
    path = tsv(tmp_path / "asked.tsv", [("a", 1, 2)])
    with pytest.raises(ValueError, match="row 1 has a different number of columns than the header"):
        list(inputs_of(path, "text", spec))


@pytest.mark.parametrize(
    ("content", "texts", "labels"),
    [
        ("a film \t1\nb\t0\n", ["a film", "b"], [1, 0]),
        ("\ufeffsentence\tlabel\r\na\t1\r\n\r\n", ["a"], [1]),
        ("index\tsentence\n0\ta\n1\tb\n", ["a", "b"], None),
        ("label\tsentence\n3\té \u2028 \u6620\u753b \U0001f600\n", ["é \u2028 \u6620\u753b \U0001f600"], [3]),
        ("only a text\nanother", ["only a text", "another"], None),
    ],
    ids=["no header", "BOM and CRLF", "without labels", "any letters", "one column"],
)
def test_columns_are_named_by_the_first_line_or_the_usual_ones(tmp_path, content, texts, labels):
    """A file may lack names, labels and the last newline, and may have a byte order mark and any letters."""
    path = tmp_path / "file"
    path.write_bytes(content.encode())
    found = read_tsv(path)
    assert found.texts == texts
    assert (None if found.labels is None else found.labels.tolist()) == labels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"sentence\tlabel\na\t1\nb\tc\t0\n", "line 3: 3 columns; there must be sentence, label"),
        (b"a\t1\n\nb\t1\n", "line 2: 1 columns; there must be"),
        (b"a\t1\nb\tgood\n", "line 2: the label 'good' is not a whole number of at least 0"),
        (b"sentence\tlabel\na\t1\n \t0\n", "line 3: there is no text in the column sentence"),
        (b"sentence\tlabel\na\t1\nb\xff\t0\n", "cannot be read: 'utf-8' codec can't decode"),
        (b"", "has no texts in it"),
    ],
)
def test_a_damaged_file_is_told_with_its_line(tmp_path, content, words):
    """The error has the file, the line number and the expected content."""
    path = tmp_path / "a file.tsv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_tsv(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_label_outside_the_classes_is_told_with_its_line(tmp_path):
    """The classes are those of `class_names`, or else the labels of the training file."""
    tsv(tmp_path / "train", FILMS)
    tsv(tmp_path / "dev", [*FILMS, ("what", 2)])
    with pytest.raises(DataError, match=r"dev, line 6: the label 2 is outside the 2 classes, 0 to 1 \(0, 1\)"):
        TextData(data_config(tmp_path), "train", "dev").setup()
    with pytest.raises(DataError, match="train, line 2: the label 1 is outside the 1 classes"):
        TextData(data_config(tmp_path), "train", class_names=["good"]).setup()
    tsv(tmp_path / "ids", [*FILMS, ("what", 999_999_999)])
    with pytest.raises(DataError, match="ids, line 6: the label 999999999 is outside the 1000001 classes"):
        TextData(data_config(tmp_path), "ids").setup()


def test_what_is_missing_is_named(tmp_path):
    """A missing training file, vocabulary file or column of labels is an error."""
    tsv(tmp_path / "train", FILMS)
    tsv(tmp_path / "bare", [(0, "a"), (1, "b")], "index\tsentence\n")
    for params, words in (
        ({"train": "none"}, "none is missing. Set data.root"),
        ({"train": "train", "vocabulary": "words.txt"}, "words.txt is missing"),
        ({"train": "bare"}, "bare has no labels"),
        ({"train": "train", "validation": "bare"}, "bare has no labels"),
    ):
        with pytest.raises(DataError, match=words):
            TextData(data_config(tmp_path), **params).setup()
    with pytest.raises(DataError, match=r"bare has no labels to test with; stages=\[predict\] predicts"):
        on_rank(TextData(data_config(tmp_path), "train", test="bare")).test_dataloader()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"train": None}, "must name the training file"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, not 0"),
        ({"min_count": None}, "min_count must be a whole number"),
        ({"cut_always": True}, "cut_always needs max_length"),
        ({"class_names": ["no", False]}, "a number or a word such as no needs quotes"),
        ({"vocabulary": "a", "tokenizer": "b"}, "vocabulary cannot be combined with tokenizer"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, params, words):
    """The config error comes before any file is read."""
    with pytest.raises(DataConfigError, match=words) as caught:
        TextData(data_config(tmp_path), **{"train": "train"} | params)
    assert caught.value.exit_code == 2


# ---- batches


def test_a_batch_is_padded_to_its_longest_text(tmp_path):
    """A row has the tokens of its text and then padding, in any order of texts; a row that fills up has index -1."""
    tsv(tmp_path / "train", FILMS)
    data = on_rank(TextData(data_config(tmp_path), "train", min_count=1))
    found, rows = data.dataset("train"), data.text_spec.encode([text for text, _ in FILMS])
    batch = found[[3, 1]]
    assert batch["tokens"].tolist() == [rows[3], rows[1] + [0] * (len(rows[3]) - len(rows[1]))]
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert batch["label"].tolist() == [1, 0]
    assert batch["index"].tolist() == [3, 1]
    assert found[[1]]["tokens"].shape == (1, 2)
    assert found[[-1]]["index"].tolist() == [-1]
    assert found[[-1]]["tokens"].tolist() == [rows[3]]


def test_training_texts_are_cut_and_keep_their_end(tmp_path):
    """`max_length` cuts no text in evaluation, unless `cut_always` is set."""
    for name in ("train", "dev"):
        tsv(tmp_path / name, FILMS)
    data = on_rank(TextData(data_config(tmp_path), "train", "dev", max_length=3))
    assert data.dataset("train").lengths.tolist() == [3, 2, 3, 3]
    assert [data.dataset("train")[[n]]["tokens"][0, -1].item() for n in range(4)] == [2] * 4
    assert data.dataset("val").lengths.tolist() == [4, 2, 6, 6]
    assert data.text_spec.max_length is None
    always = on_rank(TextData(data_config(tmp_path), "train", "dev", max_length=3, cut_always=True))
    assert always.dataset("val").lengths.tolist() == [3, 2, 3, 3]
    assert always.text_spec.max_length == 3


def test_validation_has_a_file_of_its_own_is_a_fold_or_is_not(tmp_path):
    """Without a file and folds there is no loader. The vocabulary is built from the remaining training texts."""
    tsv(tmp_path / "train", [(f"word{n}", n % 2) for n in range(20)])
    tsv(tmp_path / "dev", FILMS)
    none = on_rank(TextData(data_config(tmp_path), "train"))
    assert none.val_dataloader() == []
    assert len(none.example_texts(16)) == 16
    assert len(on_rank(TextData(data_config(tmp_path), "train", "dev")).dataset("val")) == 4
    folds = [
        on_rank(TextData(data_config(tmp_path, num_splits=4, fold=fold), "train", min_count=1)) for fold in range(4)
    ]
    held_out = [set(data.example_texts(20)) for data in folds]
    assert set().union(*held_out) == {f"word{n}" for n in range(20)}
    assert sum(map(len, held_out)) == 20
    assert [len(data.dataset("train")) for data in folds] == [15] * 4
    assert not set(folds[0].text_spec.content.split()) & held_out[0]


def test_fewer_samples_are_a_choice_by_the_seed(tmp_path):
    """`limit` selects this many training and test samples; the seed decides which."""
    tsv(tmp_path / "train", [(f"word{n}", n % 2) for n in range(50)])
    tsv(tmp_path / "test", [(f"word{n}", n % 2) for n in range(30)])

    def chosen(seed):
        data = on_rank(TextData(data_config(tmp_path, seed=seed), "train", test="test", limit=10))
        return [data._samples[name].texts for name in ("train", "test")]

    assert [len(texts) for texts in chosen(1)] == [10, 10]
    assert chosen(1) == chosen(1) != chosen(2)


def test_a_vocabulary_may_be_a_file(tmp_path):
    """Its lines are the tokens from number 3; the special tokens may come first, as in the vocabulary.txt of a bundle.
    An empty or duplicate line is an error."""
    tsv(tmp_path / "train", FILMS)
    (tmp_path / "words.txt").write_text("film\ndull\n")
    data = on_rank(TextData(data_config(tmp_path), "train", vocabulary="words.txt"))
    assert data.text_spec.encode(["a dull film"]) == [[1, 4, 3, 2]]
    assert from_lines("b\r\na\r\n") == from_lines("\n".join([*SPECIAL, "b", "a"])) == "\n".join([*SPECIAL, "b", "a\n"])
    (tmp_path / "again.txt").write_text(data.text_spec.content)
    assert on_rank(TextData(data_config(tmp_path), "train", vocabulary="again.txt")).text_spec == data.text_spec
    for lines, words in (("film\nfilm\n", "word 2 is empty or a duplicate: 'film'"), ("b\n\na\n", "word 2 is")):
        (tmp_path / "bad.txt").write_text(lines)
        with pytest.raises(DataError, match=rf"bad\.txt: {words}"):
            TextData(data_config(tmp_path), "train", vocabulary="bad.txt").setup()


def test_texts_of_like_length_can_come_together(tmp_path):
    """The bucketed sampler sorts by `lengths`; with one length per bucket, no text is padded."""
    rows = [("a " * (1 + n % 4), n % 2) for n in range(64)]
    tsv(tmp_path / "train", rows)
    bucketed = Target(
        type="deeplightning.data.samplers.BucketedDistributedSampler",
        params={"buckets": 4, "sort_key": "lengths", "min_samples_per_bucket": 1},
    )
    shares = []
    for sampler in (None, bucketed):
        data = on_rank(TextData(data_config(tmp_path, batch_size=8, sampler=sampler), "train"))
        tokens = torch.cat([batch["tokens"].flatten() for batch in data.train_dataloader()])
        shares.append((tokens == 0).float().mean().item())
    assert shares[0] > 0.2
    assert shares[1] == 0


def test_a_made_up_batch_is_like_a_real_one(tmp_path):
    """`check --dry-run` uses it: it has the shapes, types and highest label of real batches."""
    batch = TextData(data_config(tmp_path), "train", class_names=["a", "b", "c"]).example_batch(4)
    assert {name: (values.dtype, values.shape[0]) for name, values in batch.items()} == dict.fromkeys(
        ("tokens", "label", "index"), (torch.int64, 4)
    )
    assert batch["label"].tolist()[-1] == 2
    assert (batch["tokens"][:, 0] == 1).all()
    assert np.array_equal(batch["index"], range(4))


def test_texts_of_a_subclass_are_split(tmp_path):
    """`read` may return all texts together."""

    class Own(TextData):
        def read(self):
            return {"all": Texts(["a film"] * 20, np.arange(20) % 2, np.arange(20) + 1, Path("made up"))}

    data = on_rank(Own(data_config(tmp_path)))
    assert [len(data._samples[name]) for name in ("train", "test")] == [18, 2]


def test_examples_are_texts_that_were_not_cut(tmp_path):
    """Without a validation set they are the shortest training texts, which the network accepts uncut."""
    tsv(tmp_path / "train", [("word " * 30, 0), *((f"word{n}", n % 2) for n in range(20))])
    data = on_rank(TextData(data_config(tmp_path), "train", max_length=8))
    assert max(map(len, data.text_spec.encode(data.example_texts(16)))) <= 8


def test_blanks_around_a_text_are_no_tokens():
    """Training files are read without them, and clients send line ends."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "dull": 1, "Ċ": 2, "Ġ": 3}, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec = TextSpec("hugging_face", made.to_str())
    assert [spec.prepare(text).tolist() for text in ("dull", "dull ", b" dull\n")] == [[1]] * 3


def test_a_vocabulary_file_may_have_separate_accents():
    """Words of a file are in Unicode's form NFC, as those of a text are."""
    spec = TextSpec("words", from_lines("re\u0301sume\u0301\n"))
    assert spec.encode(["r\u00e9sum\u00e9"]) == spec.encode(["re\u0301sume\u0301"]) == [[3, 2]]
    assert from_lines("e\u0301\n\u00e9\n").endswith("\ne\u0301\n\u00e9\n")  # both rows stay
