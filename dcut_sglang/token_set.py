"""A set of token ids as text, short enough for a checkpoint's config.json.

A drafter's checkpoint may name the tokens that it was trained to draft
(``dflash_config.draft_vocabulary``): the head then computes these only, a part of the work where
a vocabulary holds many tokens that never occur. One bit per token of the vocabulary, compressed,
in base64.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def encode_tokens(token_ids: Iterable[int], vocab_size: int) -> str:
    """The text of a set of ids in 0..vocab_size-1.

    Raises:
        ValueError: an id outside of the vocabulary, or no ids.
    """
    ids = np.unique(np.fromiter(token_ids, dtype=np.int64))
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {ids[:1]}..{ids[-1:]}")
    bits = np.zeros(vocab_size, dtype=bool)
    bits[ids] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode("ascii")


def decode_tokens(text: str, vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids, int64 [n], ascending, n >= 1.

    Raises:
        ValueError: not what ``encode_tokens`` makes for this vocabulary.
    """
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        raise ValueError(
            f"draft_vocabulary must be the text of a token set, got {text!r:.40}"
        ) from error
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8))
    if len(packed) != (vocab_size + 7) // 8 or bits[vocab_size:].any() or not bits.any():
        raise ValueError(
            f"draft_vocabulary was made for another vocabulary than this one of {vocab_size}"
        )
    return np.flatnonzero(bits).astype(np.int64)
