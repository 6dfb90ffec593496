"""Responses on disk: shards with features beside a run, and a compact file without them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcut_sglang.training.files import replace_atomically
from dcut_sglang.training.responses import Response

_PATTERN = "shard-*.safetensors"


class ResponseStore:
    """Shards of responses with float16 features, keyed by prompt index.

    A shard is complete or absent: it gets its name once all of it is on the disk. What a killed
    run had not written yet is missing from `indices` and is generated again.
    """

    def __init__(self, folder: Path, shard_size: int = 128) -> None:
        self._folder, self._shard_size = folder, shard_size
        self._pending: dict[int, Response] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def indices(self) -> set[int]:
        """Returns the prompts whose responses are on the disk."""
        found: set[int] = set()
        for path in self._folder.glob(_PATTERN):
            with safe_open(path, "pt") as shard:
                found.update(shard.get_tensor("index").tolist())
        return found

    def add(self, index: int, response: Response) -> None:
        """Keeps a response and writes a shard when enough have come together."""
        self._pending[index] = response
        if len(self._pending) >= self._shard_size:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending."""
        if not self._pending:
            return
        numbers = [int(p.stem.split("-")[1]) for p in self._folder.glob(_PATTERN)]
        path = self._folder / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
        responses = list(self._pending.values())
        tensors = {
            "index": torch.tensor(list(self._pending)),
            "length": torch.tensor([len(r.token_ids) for r in responses]),
            "num_prompt_tokens": torch.tensor([r.num_prompt_tokens for r in responses]),
            "ends": torch.tensor([r.ends for r in responses]),
            "token_ids": torch.cat([r.token_ids.int() for r in responses]),
            "features": torch.cat([r.features.half() for r in responses]),
        }
        replace_atomically(path, lambda temp: save_file(tensors, temp))
        self._pending = {}

    def load(
        self, indices: Collection[int] | None = None, columns: Tensor | None = None
    ) -> dict[int, Response]:
        """Returns responses by prompt index, in ascending order; all, or those asked for.

        columns: int64, which of the features' columns to keep; None: all.
        """
        found: dict[int, Response] = {}
        for path in sorted(self._folder.glob(_PATTERN)):
            shard = load_file(path)
            lengths = shard["length"].tolist()
            texts = shard["token_ids"].long().split(lengths)
            stored = shard["features"]
            features = (stored if columns is None else stored[:, columns]).split(lengths)
            for row, index in enumerate(shard["index"].tolist()):
                if indices is None or index in indices:
                    found[index] = Response(
                        token_ids=texts[row],
                        features=features[row],
                        num_prompt_tokens=int(shard["num_prompt_tokens"][row]),
                        ends=bool(shard["ends"][row]),
                    )
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Texts:
    """Responses without features, n of them: what it takes to compute the features again.

    token_ids: per response, prompt included; num_prompt_tokens, ends, kind, split: one each.
    """

    token_ids: list[list[int]]
    num_prompt_tokens: list[int]
    ends: list[bool]
    kind: list[str]
    split: list[str]

    def rows(self, chosen: Sequence[int]) -> Texts:
        """Returns some of the responses, in the given order."""
        return Texts(*([column[row] for row in chosen] for column in vars(self).values()))

    def save(self, path: Path) -> None:
        """Writes a compressed npz; two bytes per token where the vocabulary allows."""
        flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in self.token_ids])
        arrays = {
            "token_ids": flat.astype(np.uint16 if flat.max() < 2**16 else np.int32),
            "length": np.array([len(ids) for ids in self.token_ids], dtype=np.int32),
            "num_prompt_tokens": np.array(self.num_prompt_tokens, dtype=np.int32),
            "ends": np.array(self.ends),
            "kind": np.array(self.kind),
            "split": np.array(self.split),
        }

        def write(temp: Path) -> None:
            with temp.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

        replace_atomically(path, write)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Reads what `save` wrote."""
        with np.load(path) as data:
            ends = np.cumsum(data["length"])[:-1]
            return cls(
                token_ids=[part.tolist() for part in np.split(data["token_ids"], ends)],
                num_prompt_tokens=data["num_prompt_tokens"].tolist(),
                ends=data["ends"].tolist(),
                kind=data["kind"].tolist(),
                split=data["split"].tolist(),
            )


def texts_of(responses: Sequence[Response], kinds: Sequence[str], splits: Sequence[str]) -> Texts:
    """Drops the features."""
    return Texts(
        token_ids=[r.token_ids.tolist() for r in responses],
        num_prompt_tokens=[r.num_prompt_tokens for r in responses],
        ends=[r.ends for r in responses],
        kind=list(kinds),
        split=list(splits),
    )
