"""Response cache: stores each response of the model, so that a resumed evaluation repeats no request.

It replaces lm-eval's CachingLM, which stores pickles under keys without the model (lm-evaluation-harness issues
2715 and 4063). Here a cache file belongs to one model and contains JSON Lines.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune_trainer.runtime.artifacts import canonical_json

OnProgress = Callable[[int, int, int], None]
"""Called with the number of requests done, the total, and the number that was already in the cache."""


class ResponseCache:
    """The responses of one model, written to disk immediately; without a file they are kept in memory only."""

    def __init__(self, file: Path | None = None) -> None:
        self._responses: dict[str, Any] = dict(_read_entries(file)) if file else {}
        self._file = file.open("ab", buffering=0) if file else None
        if self._file and self._file.tell():
            self._file.write(b"\n")  # end a line that a kill may have left incomplete

    def get(self, kind: str, arguments: Sequence[Any]) -> Any | None:
        """Return the cached response, or None if there is none or if the request samples at random."""
        return None if _is_sampled(arguments) else self._responses.get(_key(kind, arguments))

    def put(self, kind: str, arguments: Sequence[Any], response: Any) -> None:
        """Store a response; write its line in one call, so that a kill damages at most the last line."""
        key = _key(kind, arguments)
        if self._file and not _is_sampled(arguments) and key not in self._responses:
            self._file.write(json.dumps([key, response]).encode() + b"\n")
        self._responses[key] = response


def _key(kind: str, arguments: Sequence[Any]) -> str:
    return hashlib.sha256(canonical_json([kind, *arguments])).hexdigest()[:32]


def _is_sampled(arguments: Sequence[Any]) -> bool:
    return isinstance(arguments[-1], dict) and bool(arguments[-1].get("do_sample"))


def _read_entries(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield keys and responses; skip incomplete lines. JSON turned tuples into lists, so turn them back."""
    if not file.exists():
        return
    for line in file.read_bytes().splitlines():
        try:
            key, response = json.loads(line)
        except (ValueError, TypeError):
            continue
        yield key, tuple(response) if isinstance(response, list) else response


class CachingLM:
    """An lm-eval model that sends only requests without a cached response, and reports progress."""

    def __init__(self, model: Any, cache: ResponseCache, on_progress: OnProgress) -> None:
        self._model = model
        self._cache = cache
        self._on_progress = on_progress
        self._done = self._total = self._cached = 0
        model.set_cache_hook(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its natural log probability, and whether it is the greedy one."""
        return self._run("loglikelihood", requests, len(requests))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return for each (text,) its natural log probability."""
        # lm-eval adds these responses to the cache only at the end of a call, so send them in small batches.
        return self._run("loglikelihood_rolling", requests, self._model.batch_size)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return for each (context, generation arguments) the generated text."""
        return self._run("generate_until", requests, len(requests))

    def add_partial(self, kind: str, arguments: Iterable[Any], response: Any) -> None:
        """Store a response as soon as it is known. This is lm-eval's cache hook, so lm-eval calls it."""
        self._cache.put(kind, tuple(arguments), response)
        self._done += 1
        self._on_progress(self._done, self._total, self._cached)

    def _run(self, kind: str, requests: Sequence[Any], batch: int) -> list[Any]:
        responses = [self._cache.get(kind, request.args) for request in requests]
        missing = [request for request, response in zip(requests, responses, strict=True) if response is None]
        self._total += len(requests)
        self._cached += len(requests) - len(missing)
        self._done += len(requests) - len(missing)
        self._on_progress(self._done, self._total, self._cached)
        computed: list[Any] = []
        for start in range(0, len(missing), max(1, batch)):
            computed += getattr(self._model, kind)(missing[start : start + batch], disable_tqdm=True)
        remaining = iter(computed)
        return [next(remaining) if response is None else response for response in responses]
