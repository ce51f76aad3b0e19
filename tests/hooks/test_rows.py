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


def test_a_dataset_of_huggingface_and_its_stream_are_texts() -> None:
    datasets = pytest.importorskip("datasets")
    model, tokenizer = tiny_bert()
    path, moments = record(model, tokenizer, TEXTS, batch=2), record_corpus(model, tokenizer, TEXTS, batch=2)
    held = datasets.Dataset.from_dict({"label": [0, 1, 2], "text": TEXTS})
    for rows in (held, held.to_iterable_dataset()):  # the second as load_dataset(..., streaming=True) gives it
        assert torch.equal(record(model, tokenizer, rows, batch=2).x, path.x)
        assert torch.equal(record_corpus(model, tokenizer, rows, batch=2).mean, moments.mean)
