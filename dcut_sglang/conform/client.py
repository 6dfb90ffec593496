"""HTTP to one server: send a case, and read the answer as plain comparable parts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from dcut_sglang.conform.case import Case

# Time for one answer, in seconds; also what a hanging server costs.
TIMEOUT_S = 120.0
_LOGPROB_FIELDS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
)


class ConformError(RuntimeError):
    """A server cannot be compared: it does not answer, or is no DCUT server."""


@dataclass(frozen=True)
class Output:
    """One of a request's outputs.

    Attributes:
        ids: token ids; None where the endpoint does not give them.
        text: what was generated.
        finish: why it ended, as the server says it.
        counts: prompt and completion tokens; empty where they are not given per output.
        logprobs: field name -> one entry per position: [(log-probability or None, token), ...],
            the token as an id or as text.
    """

    ids: list[int] | None
    text: str
    finish: Any
    counts: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, list[list[tuple[float | None, Any]]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """``outputs`` with status 200, otherwise ``message``; ``broken`` says what is wrong with
    the form of the answer itself."""

    status: int
    outputs: list[Output] = field(default_factory=list)
    message: str = ""
    broken: str = ""


class Client:
    """One server.

    Args:
        url: its address, without a path.
        connections: requests that may be under way at once.
    """

    def __init__(self, url: str, connections: int = 32) -> None:
        self.url = url.rstrip("/")
        self.session = requests.Session()
        # A server closes idle connections after a few seconds; a request sent into one that is just
        # being closed gets no answer.
        self.session.headers["Connection"] = "close"
        self.session.mount(self.url, HTTPAdapter(pool_maxsize=connections))
        self._model: str | None = None

    def send(self, case: Case) -> Answer:
        """The answer to a case, whatever its status.

        Raises:
            ConformError: no answer at all.
        """
        body = dict(case.body)
        openai = case.route != "/generate"
        if openai:
            body["model"] = self.model()
        try:
            reply = self.session.post(
                self.url + case.route, json=body, timeout=TIMEOUT_S, stream=bool(body.get("stream"))
            )
            if reply.status_code != 200:
                return Answer(reply.status_code, message=_error_text(reply))
            if body.get("stream"):
                events = list(_events(reply))
                return _openai_stream(events) if openai else _generate_stream(events)
            data = reply.json()
        except requests.RequestException as error:
            raise ConformError(f"{self.url}{case.route}, {case.name}: {error}") from error
        if openai:
            return Answer(200, [_choice(choice) for choice in data["choices"]])
        return Answer(200, [_output(item) for item in (data if isinstance(data, list) else [data])])

    def model(self) -> str:
        """The name that the server's OpenAI routes expect."""
        if self._model is None:
            self._model = self._get("/v1/models")["data"][0]["id"]
        return self._model

    def server_info(self) -> dict[str, Any]:
        """``/server_info``."""
        return self._get("/server_info")

    def dcut(self) -> dict[str, Any]:
        """The ``dcut`` object of ``/server_info``.

        Raises:
            ConformError: the server does not run DCUT.
        """
        states = self.server_info().get("internal_states") or [{}]
        if "dcut" not in states[0]:
            raise ConformError(
                f"{self.url} does not run DCUT (its /server_info has no `dcut`): start it with "
                "--speculative-algorithm DCUT, or exchange --url and --against"
            )
        return states[0]["dcut"]

    def force(self, knobs: Mapping[str, float]) -> None:
        """Set run-time knobs of a DCUT server (``dcut_sglang/force.py``).

        Raises:
            ConformError: the server rejected them.
        """
        try:
            reply = self.session.post(
                f"{self.url}/set_internal_state", json={"server_args": dict(knobs)}, timeout=60
            )
        except requests.RequestException as error:
            raise ConformError(f"{self.url}: {error}") from error
        if reply.status_code != 200 or reply.json() != [True]:
            raise ConformError(f"{self.url} rejected {dict(knobs)}: {_error_text(reply)}")

    def abort(self, rid: str) -> None:
        """Ask the server to stop a request, wherever it is."""
        self.session.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=60)

    def free_slots(self, timeout_s: float = 60) -> dict[str, int]:
        """Free KV and request slots of an idle DCUT server, its prefix cache flushed.

        Raises:
            ConformError: the server is still busy after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self.session.post(f"{self.url}/flush_cache", timeout=60).status_code != 200:
            if time.monotonic() > deadline:
                raise ConformError(f"{self.url} is still busy {timeout_s:.0f} s after the last one")
            time.sleep(0.2)
        state = self.dcut()
        return {name: state[name] for name in ("kv_slots_free", "request_slots_free")}

    def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = self.session.get(self.url + path, timeout=60)
            reply.raise_for_status()
            return reply.json()
        except requests.RequestException as error:
            raise ConformError(f"no server to compare at {self.url}: {error}") from error


def _error_text(reply: requests.Response) -> str:
    try:
        data = reply.json()
    except ValueError:
        return reply.text.strip()
    error = data.get("error", data) if isinstance(data, dict) else data
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _events(reply: requests.Response) -> Iterator[dict[str, Any]]:
    """The data of each server-sent event up to [DONE]."""
    for line in reply.iter_lines():
        if line.startswith(b"data:"):
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise requests.exceptions.ChunkedEncodingError("the stream ended without [DONE]")


def _output(item: dict[str, Any]) -> Output:
    # A request that was aborted before it began has no counts.
    meta = item["meta_info"]
    names = ("prompt_tokens", "completion_tokens")
    return Output(
        ids=item.get("output_ids"),
        text=item.get("text") or "",
        finish=meta["finish_reason"],
        counts={name: meta[name] for name in names if name in meta},
        logprobs={name: _positions(meta[name]) for name in _LOGPROB_FIELDS if meta.get(name)},
    )


def _positions(entries: list[Any]) -> list[list[tuple[float | None, Any]]]:
    """SGLang gives [logprob, id, text] per position, or a list of these, or None."""
    positions = []
    for entry in entries:
        alternatives = entry if entry and isinstance(entry[0], list) else [entry]
        positions.append([(a[0], a[1]) for a in alternatives if a])
    return positions


def _generate_stream(events: list[dict[str, Any]]) -> Answer:
    """The last event, which is cumulative; every event must extend the one before."""
    if events and "error" in events[-1]:
        error = events[-1]["error"]
        return Answer(int(error.get("code") or 400), message=str(error.get("message", error)))
    by_index: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        by_index.setdefault(event.get("index", 0), []).append(event)
    broken = "" if events else "no event at all"
    for chunks in by_index.values():
        for before, after in zip(chunks, chunks[1:], strict=False):
            if after["text"][: len(before["text"].rstrip("\ufffd"))] != before["text"].rstrip(
                "\ufffd"
            ):
                broken = f"a chunk takes back text: {before['text']!r}, then {after['text']!r}"
    return Answer(200, [_output(chunks[-1]) for _, chunks in sorted(by_index.items())], "", broken)


def _choice(choice: dict[str, Any]) -> Output:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Output(
        ids=None,
        text=text or "",
        finish=[choice["finish_reason"], choice.get("matched_stop")],
        logprobs=_openai_logprobs(choice.get("logprobs") or {}),
    )


def _openai_logprobs(data: dict[str, Any]) -> dict[str, list[list[tuple[float | None, Any]]]]:
    """Both forms: parallel lists (completions) and a list of objects (chat)."""
    found: dict[str, list[list[tuple[float | None, Any]]]] = {}
    if data.get("content"):
        found["tokens"] = [[(item["logprob"], item["token"])] for item in data["content"]]
        found["top"] = [
            [(top["logprob"], top["token"]) for top in item["top_logprobs"]]
            for item in data["content"]
        ]
    elif data.get("tokens"):
        pairs = zip(data["token_logprobs"], data["tokens"], strict=True)
        found["tokens"] = [[pair] for pair in pairs]
        found["top"] = [
            [(value, token) for token, value in (top or {}).items()]
            for top in data.get("top_logprobs") or []
        ]
    return found


def _openai_stream(events: list[dict[str, Any]]) -> Answer:
    """Deltas joined; the finish reason comes once, in the last chunk of each choice."""
    texts: dict[int, str] = {}
    finish: dict[int, Any] = {}
    logprobs: dict[int, dict[str, list[list[tuple[float | None, Any]]]]] = {}
    for event in events:
        if "error" in event:
            return Answer(int(event["error"].get("code") or 400), message=str(event["error"]))
        for choice in event["choices"]:
            index = choice["index"]
            delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + (delta or "")
            if choice["finish_reason"] is not None:
                finish[index] = [choice["finish_reason"], choice.get("matched_stop")]
            for name, values in _openai_logprobs(choice.get("logprobs") or {}).items():
                logprobs.setdefault(index, {}).setdefault(name, []).extend(values)
    broken = "" if finish.keys() == texts.keys() else "a choice without a finish reason"
    outputs = [
        Output(None, text, finish.get(index), logprobs=logprobs.get(index, {}))
        for index, text in sorted(texts.items())
    ]
    return Answer(200, outputs, "", broken)
