"""A conformance case as a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcut_sglang.conform.cases import GENERATE, OPENAI, PROMPTS, ROTATION


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: "group: case", unique.
        route: path of the endpoint.
        body: the request's JSON, complete but for the model's name on OpenAI routes.
    """

    name: str
    route: str
    body: Mapping[str, Any]

    @property
    def group(self) -> str:
        return self.name.partition(": ")[0]


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the tables above."""
    cases: list[Case] = []
    for group, (shared, named) in GENERATE.items():
        for name, own in named.items():
            body = {**shared, **own}
            body["sampling_params"] = {
                **{"temperature": 0, "max_new_tokens": 24},
                **shared.get("sampling_params", {}),
                **own.get("sampling_params", {}),
            }
            prompt = body.pop("prompt", ROTATION[len(cases) % len(ROTATION)])
            if not body.keys() & {"text", "input_ids"}:
                body["text"] = PROMPTS[prompt]
            cases.append(Case(f"{group}: {name}", "/generate", body))
    for group, (route, shared, named) in OPENAI.items():
        for name, own in named.items():
            body = {"temperature": 0, "max_tokens": 24, **shared, **own}
            cases.append(Case(f"{group}: {name}", route, body))
    return tuple(cases)
