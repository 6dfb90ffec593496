"""Texts whose outcome is known at every anchor, so that pruning can feed back.

A text is what one request generates. At each of its positions (anchor) the bank knows the
drafter's confidences and how many drafts the target would accept, so a replay may cut a request
anywhere and go on from where it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcut_sglang.trace import Trace

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_DATA = Path(__file__).parents[1] / "data"
# What the drafter was trained for, and what it was not.
HELD_OUT_TEXTS = _DATA / "smollm2_code.npz"
OPEN_TEXTS = _DATA / "smollm2_chat.npz"


class NotReplayableError(ValueError):
    """A trace that shows no request's outcomes, because every one was cut."""


@dataclass(frozen=True, eq=False)
class AnchorBank:
    """Anchors of all texts, one text after another.

    Attributes:
        survival: float32 [N, D-1], prefix products of the confidences.
        accept: int64 [N], drafts that the target accepts, bonus not counted.
        remaining: int64 [N], tokens of the text after the anchor, at least 1. A step emits
            min(accepted drafts + 1, remaining): the host drops what follows the end.
        start: int64 [T + 1], first anchor of each text; the last entry is N.
        prompt_len: int64 [T], committed tokens before the first anchor.
        names: of the texts, as the requests were called; empty where they are not known.
    """

    survival: Float32Array
    accept: IntArray
    remaining: IntArray
    start: IntArray
    prompt_len: IntArray
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.accept)
        if self.survival.ndim != 2 or len(self.survival) != n or len(self.remaining) != n:
            raise ValueError("survival, accept and remaining must have one row per anchor")
        if not n or self.start[0] != 0 or self.start[-1] != n or (np.diff(self.start) < 1).any():
            raise ValueError("start must ascend from 0 to the number of anchors")
        if len(self.prompt_len) != self.num_texts:
            raise ValueError("prompt_len must have one entry per text")
        if self.names and len(self.names) != self.num_texts:
            raise ValueError("names must have one entry per text, or none")
        # A step must not leave its text, however many drafts are right.
        last = np.repeat(self.start[1:], np.diff(self.start))
        if (self.remaining < 1).any() or (np.arange(n) + self.remaining > last).any():
            raise ValueError("remaining must be 1.. and end inside the anchor's text")

    @property
    def block_size(self) -> int:
        return self.survival.shape[1] + 1

    @property
    def num_texts(self) -> int:
        return len(self.start) - 1

    @property
    def confidence(self) -> Float32Array:
        """float32 [N, D-1], the confidences whose prefix products ``survival`` holds."""
        before = np.maximum(self.survival[:, :-1], np.finfo(np.float32).tiny)
        return np.concatenate([self.survival[:, :1], self.survival[:, 1:] / before], axis=1)

    @property
    def text(self) -> IntArray:
        """int64 [N], the text of each anchor."""
        return np.repeat(np.arange(self.num_texts), np.diff(self.start))

    @property
    def offset(self) -> IntArray:
        """int64 [N], the place of each anchor in its text."""
        return np.arange(len(self.accept)) - self.start[self.text]

    def full_width_walk(self) -> IntArray:
        """Anchors int64 that a run meets which verifies every draft, each text from its start.

        After a rejection a drafter does worse than at a random place, so what is said about the
        anchors of a run must be asked of such anchors.
        """
        met, at = [], self.start[:-1]
        while len(at):
            met.append(at)
            ahead = at + np.minimum(self.accept[at] + 1, self.remaining[at])
            at = ahead[ahead < at + self.remaining[at]]
        return np.concatenate(met)

    def subset(self, texts: npt.ArrayLike) -> AnchorBank:
        """The bank of the given texts only."""
        chosen = np.asarray(texts, dtype=np.int64)
        rows = np.concatenate([np.arange(self.start[t], self.start[t + 1]) for t in chosen])
        start = np.concatenate([[0], np.cumsum(np.diff(self.start)[chosen])])
        return AnchorBank(
            self.survival[rows],
            self.accept[rows],
            self.remaining[rows],
            start,
            self.prompt_len[chosen],
            tuple(self.names[t] for t in chosen) if self.names else (),
        )

    def first_tokens(self, num_tokens: int) -> AnchorBank:
        """The bank of texts that end after ``num_tokens`` >= 1 tokens, if not before."""
        offset = self.offset
        rows = offset < num_tokens
        lengths = np.minimum(np.diff(self.start), num_tokens)
        remaining = np.repeat(lengths, lengths) - offset[rows]
        start = np.concatenate([[0], np.cumsum(lengths)])
        return replace(
            self,
            survival=self.survival[rows],
            accept=self.accept[rows],
            remaining=remaining,
            start=start,
        )

    @classmethod
    def load(cls, path: Path | str = HELD_OUT_TEXTS, prompt_len: int = 80) -> AnchorBank:
        """Read an every-anchor file (npz).

        Args:
            path: arrays request_id [N], offset [N], conf [N, D-1], accept [N] and valid [N]
                (drafts that lie inside the text); every offset of a request from 0 on.
            prompt_len: committed tokens before offset 0, where the file does not hold them.

        Raises:
            ValueError: arrays missing, or a request with gaps.
        """
        with np.load(path) as data:
            missing = {"request_id", "offset", "conf", "accept", "valid"} - set(data.files)
            if missing:
                raise ValueError(f"{path}: not an every-anchor file, lacks {sorted(missing)}")
            known_len = data["prompt_len"].astype(np.int64) if "prompt_len" in data else None
            names = tuple(data["name"].tolist() if "name" in data else ())
            order = np.lexsort((data["offset"], data["request_id"]))
            request = data["request_id"][order].astype(np.int64)
            offset = data["offset"][order].astype(np.int64)
            confidence = data["conf"][order].astype(np.float32)
            accept = data["accept"][order].astype(np.int64)
        first = np.flatnonzero(np.r_[True, request[1:] != request[:-1]])
        start = np.r_[first, len(request)]
        length = np.diff(start)
        if (offset != np.arange(len(request)) - np.repeat(first, length)).any():
            raise ValueError(f"{path}: a request's offsets must go 0, 1, 2, ...")
        remaining = np.repeat(start[1:], length) - np.arange(len(request))
        return cls(
            np.cumprod(np.clip(confidence, 0, 1), axis=1, dtype=np.float32),
            accept,
            remaining,
            start,
            np.full(len(first), prompt_len, dtype=np.int64) if known_len is None else known_len,
            names,
        )

    @classmethod
    def from_every_anchor(
        cls, trace: Trace, wanted: Callable[[str], bool] | None = None
    ) -> AnchorBank:
        """Anchors of a run that drafted whole blocks, with tokens, and verified none of them.

        Every step then moves by one token, so that each position of a text is an anchor once; what
        the target accepts of a block is how far it agrees with the anchors that follow.

        Args:
            wanted: which request ids to use; all by default.

        Raises:
            NotReplayableError: the trace has no tokens, or no request without gaps.
        """
        found: dict[int, dict[int, tuple[IntArray, Float32Array]]] = {}
        for step in trace.steps:
            if step.tokens is None or step.confidence is None:
                continue
            for i, request in enumerate(step.requests.tolist()):
                if step.verify_lens[i] == 1 and (wanted is None or wanted(trace.names[request])):
                    at = found.setdefault(request, {})
                    at[int(step.contexts[i])] = (step.tokens[i], step.confidence[i])
        survival, accept, remaining, start, prompt_len, names = [], [], [], [0], [], []
        for request, anchors in found.items():
            places = sorted(anchors)
            # The last anchor's successor was emitted, but never an anchor.
            length = len(places) - 1
            if length < 1 or places[-1] - places[0] != length:
                continue
            text = np.array([anchors[place][0][0] for place in places])
            for i, place in enumerate(places[:-1]):
                tokens, confidence = anchors[place]
                ahead = text[i + 1 : i + len(tokens)]
                agrees = tokens[1 : 1 + len(ahead)] == ahead
                accept.append(int(np.cumprod(agrees).sum()))
                survival.append(np.cumprod(np.clip(confidence, 0, 1), dtype=np.float32))
                remaining.append(length - i)
            start.append(start[-1] + length)
            prompt_len.append(places[0])
            names.append(trace.names[request])
        if not prompt_len:
            raise NotReplayableError(
                "no request of this trace drafted whole blocks at every anchor, with tokens"
            )
        return cls(
            np.stack(survival),
            np.array(accept, dtype=np.int64),
            np.array(remaining, dtype=np.int64),
            np.array(start, dtype=np.int64),
            np.array(prompt_len, dtype=np.int64),
            tuple(names),
        )

    def save(self, path: Path) -> None:
        """Write an every-anchor file that ``load`` reads; confidences as float16."""
        np.savez_compressed(
            path,
            request_id=self.text.astype(np.int32),
            offset=self.offset.astype(np.int32),
            conf=self.confidence.astype(np.float16),
            accept=self.accept.astype(np.int8),
            valid=np.minimum(self.remaining, self.block_size - 1).astype(np.int8),
            prompt_len=self.prompt_len.astype(np.int32),
            name=np.array(self.names, dtype=str),
        )

    @classmethod
    def from_trace(cls, trace: Trace) -> AnchorBank:
        """Anchors of a recorded run, as far as it shows them.

        A step tells a draft's fate only up to its cut, so a request is used from its first step
        on as long as every step verified its whole block and none is missing: record the trace
        with the keep ratio forced to 1. Between two recorded anchors the outcome is exact (what
        remains of the accepted run), while the confidences are those of the same tokens in the
        earlier block and 0 beyond it, so a policy that cuts often sees fewer drafts than it would
        have had.

        Raises:
            NotReplayableError: no request of the trace is usable.
        """
        depth = trace.block_size - 1
        runs: dict[int, list[tuple[int, int, Float32Array]]] = {}
        closed: set[int] = set()
        for step in trace.steps:
            for i, request in enumerate(step.requests.tolist()):
                if request in closed:
                    continue
                context, right = int(step.contexts[i]), int(step.accepted[i])
                run = runs.get(request)
                is_next = run is None or context == run[-1][0] + run[-1][1] + 1
                if (
                    step.confidence is None
                    or step.verify_lens[i] != trace.block_size
                    or not is_next
                ):
                    closed.add(request)
                    continue
                runs.setdefault(request, []).append((context, right, step.confidence[i]))
        survival: list[Float32Array] = []
        accept: list[int] = []
        remaining: list[int] = []
        start, prompt_len = [0], []
        for steps in runs.values():
            prompt_len.append(steps[0][0])
            num_tokens = sum(right + 1 for _, right, _ in steps)
            done = 0
            for _, right, confidence in steps:
                for skipped in range(right + 1):
                    rest = np.zeros(depth, dtype=np.float32)
                    rest[: depth - skipped] = confidence[skipped:]
                    survival.append(np.cumprod(rest, dtype=np.float32))
                    accept.append(right - skipped)
                    remaining.append(num_tokens - done)
                    done += 1
            start.append(start[-1] + num_tokens)
        if not prompt_len:
            raise NotReplayableError(
                "no request of this trace was verified at full width from its first step on; "
                "record one with the keep ratio forced to 1"
            )
        return cls(
            np.stack(survival),
            np.array(accept, dtype=np.int64),
            np.array(remaining, dtype=np.int64),
            np.array(start, dtype=np.int64),
            np.array(prompt_len, dtype=np.int64),
        )
