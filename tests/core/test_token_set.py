"""Token sets as text."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_sglang.token_set import decode_tokens, encode_tokens


@given(st.integers(1, 200), st.data())
def test_a_set_comes_back(vocab_size: int, data: st.DataObject) -> None:
    ids = data.draw(st.sets(st.integers(0, vocab_size - 1), min_size=1))
    assert decode_tokens(encode_tokens(ids, vocab_size), vocab_size).tolist() == sorted(ids)


def test_it_is_short() -> None:
    ids = range(0, 49_152, 7)
    assert len(encode_tokens(ids, 49_152)) < 8_200


@pytest.mark.parametrize("ids", [[], [-1], [10], [3, 10]])
def test_ids_outside_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"0\.\.9"):
        encode_tokens(ids, 10)


def encoded(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "text of a token set"),
        ("no base64!", "text of a token set"),
        (base64.b64encode(b"not compressed").decode(), "text of a token set"),
        (encoded(b"\x00\x00"), "another vocabulary"),  # none
        (encoded(b"\xff\xff"), "another vocabulary"),  # bits behind the end
        (encoded(b"\xff"), "another vocabulary"),
        (encoded(b"\xff\xc0\x00"), "another vocabulary"),
    ],
)
def test_other_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode_tokens(text, 10)


def test_not_even_text() -> None:
    with pytest.raises(ValueError, match="text of a token set"):
        decode_tokens([1, 2], 10)  # type: ignore[arg-type]
