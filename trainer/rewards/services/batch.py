"""Services that score several completions in a call: DashScope's reranker, and a server of the user's own."""

from collections.abc import Sequence
from typing import Any

from trainer.errors import Refused
from trainer.rewards.services import replies
from trainer.rewards.services.budget import Budget
from trainer.rewards.services.http import Http
from trainer.rewards.services.judge import Row
from trainer.rewards.services.service import Scored

RERANK_PATH = "/api/v1/services/rerank/text-rerank/text-rerank"
RERANK_WINDOW = 4000
"""Tokens of a query and a document that DashScope's rerankers read; it cuts what is longer."""
RERANK_DOCUMENTS = 100
ITEMS = 16
"""Completions that a server of the user's own gets in a request."""
LOWEST, HIGHEST = -1000.0, 1000.0
"""What such a server may say; a larger number is an overflow or a mistake, and would drown the other rewards."""


class Rerank:
    """How relevant each completion is to its request, 0 to 1; one call for all completions of a request."""

    def __init__(self, http: Http, model: str, budget: Budget) -> None:
        self.http, self.model, self.budget = http, model, budget

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        together: dict[tuple[str, bool], list[int]] = {}
        for place, row in enumerate(rows):
            # An empty text is refused with all that it comes with.
            together.setdefault((row.request, row.completion.strip() == ""), []).append(place)
        return [part for places in together.values() for part in _split(places, RERANK_DOCUMENTS)]

    async def score(self, rows: Sequence[Row]) -> list[Scored]:
        fitted = [self.budget.fit({"query": row.request, "document": row.completion}, 0) for row in rows]
        body = {
            "model": self.model,
            # All have one query; the one that leaves room for the longest document is the query of all.
            "input": {
                "query": min((texts["query"] for texts, _ in fitted), key=len),
                "documents": [texts["document"] for texts, _ in fitted],
            },
            "parameters": {"top_n": len(rows), "return_documents": False},
        }
        told = replies.field(await self.http.post(RERANK_PATH, body), "output", "results")
        values = replies.by_id(told, list(range(len(rows))), "index", "relevance_score", 0, 1)
        return [Scored(value, cut) for value, (_, cut) in zip(values, fitted, strict=True)]

    async def prepare(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        if (need := prompt_tokens + new_tokens) > RERANK_WINDOW:
            raise Refused(
                f"{self.http.label}: {self.model} reads {RERANK_WINDOW} tokens of a request with a completion; the"
                f" longest prompt ({prompt_tokens}) and a completion ({new_tokens}) are {need}. Lower"
                " data.max_prompt_tokens or rollout.max_new_tokens, or take a judge."
            )
        self.budget.window = RERANK_WINDOW
        return []


class OwnServer:
    """A server of the user's: {"items": [{"id", "prompt", "completion", "reference", "columns"}]} by POST, and as the
    answer {"scores": [{"id", "score"}]}, in any order."""

    def __init__(self, http: Http, model: str) -> None:
        self.http, self.model = http, model

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        return _split(list(range(len(rows))), ITEMS)

    async def score(self, rows: Sequence[Row]) -> list[Scored]:
        ids = [str(place) for place in range(len(rows))]
        body: dict[str, Any] = {"items": [_item(name, row) for name, row in zip(ids, rows, strict=True)]}
        if self.model:
            body["model"] = self.model
        told = replies.field(await self.http.post("", body), "scores")
        return [Scored(value) for value in replies.by_id(told, ids, "id", "score", LOWEST, HIGHEST)]

    async def prepare(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        return []


def _item(name: str, row: Row) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": row.request,
        "completion": row.completion,
        "reference": row.reference,
        "columns": row.columns,
    }


def _split(places: list[int], most: int) -> list[list[int]]:
    return [places[start : start + most] for start in range(0, len(places), most)]
