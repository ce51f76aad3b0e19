"""Texts as people hold them: a column of pandas, rows of a dataset, a stream that ends when it is read."""

from collections.abc import Iterator

import pytest
import torch

from attn_flow.hooks import record
from attn_flow.hooks.corpus import record_corpus
from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe.run import inquire

TEXTS = ["a b c", "d e", "f g h i"]


class Rows:
    """Iterates as a datasets.Dataset does: rows are dictionaries."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return ({"label": i, "text": text} for i, text in enumerate(TEXTS))


def test_rows_streams_and_iterators_are_texts() -> None:
    model, tokenizer = tiny_bert()
    path, moments = record(model, tokenizer, TEXTS, batch=2), record_corpus(model, tokenizer, TEXTS, batch=2)
    for make in (Rows, lambda: iter(Rows()), lambda: (text for text in TEXTS), lambda: tuple(TEXTS)):
        assert torch.equal(record(model, tokenizer, make(), batch=2).x, path.x)
        found = record_corpus(model, tokenizer, make(), batch=2)
        assert found.n == moments.n
        assert torch.equal(found.mean, moments.mean)


def test_a_column_of_pandas_is_texts() -> None:
    pandas = pytest.importorskip("pandas")
    model, tokenizer = tiny_bert()
    column = pandas.DataFrame({"text": TEXTS}, index=[7, 3, 3])["text"]  # an index of its own
    assert torch.equal(record(model, tokenizer, column).x, record(model, tokenizer, TEXTS).x)
    assert torch.equal(record_corpus(model, tokenizer, column).mean, record_corpus(model, tokenizer, TEXTS).mean)


def test_the_probe_takes_rows_and_streams() -> None:
    """The same recorded content, by its digest, for a list, rows and a stream that is read once."""
    model, tokenizer = tiny_bert()
    texts = [" ".join("abcdefghij"[(i * j) % 10] for j in range(1, 29)) for i in (1, 3)]
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    keys = {inquire(model, tokenizer, given, max_length=30).clouds.content for given in (texts, rows, iter(rows))}
    assert len(keys) == 1
    assert inquire(model, tokenizer, texts[:1], max_length=30).clouds.content not in keys


def test_rows_without_a_text_are_refused() -> None:
    model, tokenizer = tiny_bert()
    with pytest.raises(ValueError, match=r"texts\[0\] has no 'text' \(found body\).*row\['body'\] for row in rows"):
        record(model, tokenizer, [{"body": "a b"}])
    with pytest.raises(ValueError, match="one string, expected a list"):
        record(model, tokenizer, "a b")
    with pytest.raises(ValueError, match="texts is a int, expected strings, or rows with 'text'"):
        record(model, tokenizer, 3)  # type: ignore[arg-type]


def test_a_table_is_not_read_by_the_names_of_its_columns() -> None:
    """Whose words a tokenizer may well know; NaN, as pandas has for nothing, is no text either."""
    pandas = pytest.importorskip("pandas")
    model, tokenizer = tiny_bert()
    words = r"of columns \(a, text\), expected strings: pass one column, such as rows\['text'\]"
    for table in ({"a": [0, 1], "text": TEXTS[:2]}, pandas.DataFrame({"a": [0, 1], "text": TEXTS[:2]})):
        for read in (record, record_corpus):
            with pytest.raises(ValueError, match=words):
                read(model, tokenizer, table)
    for column in (pandas.Series(["a b", None]), pandas.Series(["a b", float("nan")])):
        with pytest.raises(ValueError, match=r"texts\[1\] is a (float|NoneType), expected str"):
            record(model, tokenizer, column)


def test_wrong_sizes_and_ids_are_named() -> None:
    model, tokenizer = tiny_bert()
    with pytest.raises(ValueError, match="batch = a, expected at least one text at a time"):
        record(model, tokenizer, TEXTS, batch="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_length = a, expected at least 3"):
        record(model, tokenizer, TEXTS, max_length="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"input_ids have dtype torch.float32, expected whole numbers"):
        record(model, {"input_ids": torch.rand(1, 4)})


def test_a_dataset_of_huggingface_and_its_stream_are_texts() -> None:
    datasets = pytest.importorskip("datasets")
    model, tokenizer = tiny_bert()
    path, moments = record(model, tokenizer, TEXTS, batch=2), record_corpus(model, tokenizer, TEXTS, batch=2)
    held = datasets.Dataset.from_dict({"label": [0, 1, 2], "text": TEXTS})
    for rows in (held, held.to_iterable_dataset()):  # the second as load_dataset(..., streaming=True) gives it
        assert torch.equal(record(model, tokenizer, rows, batch=2).x, path.x)
        assert torch.equal(record_corpus(model, tokenizer, rows, batch=2).mean, moments.mean)
