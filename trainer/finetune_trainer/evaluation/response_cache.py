"""Response cache: stores each response of the model, so that a resumed evaluation repeats no request.

It replaces lm-eval's CachingLM, which stores pickles under keys without the model (lm-evaluation-harness issues
2715 and 4063). Here a cache file belongs to one model and contains JSON Lines.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.utils import get_rolling_token_windows

from finetune_trainer.evaluation.batch_size import BatchSize
from finetune_trainer.runtime.artifacts import canonical_json

OnProgress = Callable[[int, int, int], None]
"""Called with the number of requests done, the total, and the number that was already in the cache."""


class ResponseCache:
    """The responses of one model, written to disk immediately; without a file they are kept in memory only."""

    def __init__(self, file: Path | None = None) -> None:
        self._responses: dict[str, Any] = {}
        self._file = None
        if file is None:
            return
        self._responses.update(_read_entries(file))
        # Unbuffered, so that a response is on disk as soon as it is known.
        self._file = file.open("ab", buffering=0)
        # End a line that a kill may have left incomplete.
        if self._file.tell():
            self._file.write(b"\n")

    def get(self, kind: str, arguments: Sequence[Any]) -> Any | None:
        """Return the cached response, or None if there is none or if the request samples at random."""
        # The same request would get another response.
        if _is_sampled(arguments):
            return None
        return self._responses.get(_key(kind, arguments))

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
    """Yield keys and responses; skip incomplete lines. JSON has turned tuples into lists; turn them back."""
    if not file.exists():
        return
    for line in file.read_bytes().splitlines():
        try:
            key, response = json.loads(line)
        except (ValueError, TypeError):
            continue
        if isinstance(response, list):
            response = tuple(response)
        yield key, response


class CachingLM:
    """An lm-eval model that sends only requests without a cached response, and reports progress."""

    def __init__(
        self,
        model: Any,
        cache: ResponseCache,
        on_progress: OnProgress,
        batch_size: BatchSize | None = None,
    ) -> None:
        """Wrap a model; `batch_size` chooses the batch size for each kind of requests, None keeps the model's own."""
        self._model = model
        self._cache = cache
        self._on_progress = on_progress
        self._batch_size = batch_size
        self._done = self._total = self._cached = 0
        model.set_cache_hook(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the natural log probability of each (context, continuation), and whether it is the greedy choice."""
        return self._run("loglikelihood", requests, lambda missing: [missing])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return for each (text,) its natural log probability."""
        # lm-eval adds these responses to the cache only at the end of a call, so send them in small parts.
        return self._run("loglikelihood_rolling", requests, self._parts_of_full_batches)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return for each (context, generation arguments) the generated text."""
        return self._run("generate_until", requests, lambda missing: [missing])

    def add_partial(self, kind: str, arguments: Iterable[Any], response: Any) -> None:
        """Store a response as soon as it is known. This is lm-eval's cache hook, so lm-eval calls it."""
        self._cache.put(kind, tuple(arguments), response)
        self._done += 1
        self._on_progress(self._done, self._total, self._cached)

    def _run(
        self,
        kind: str,
        requests: Sequence[Any],
        split: Callable[[list[Any]], Iterable[list[Any]]],
    ) -> list[Any]:
        responses = [self._cache.get(kind, request.args) for request in requests]
        pairs = zip(requests, responses, strict=True)
        missing = [request for request, response in pairs if response is None]
        self._total += len(requests)
        self._cached += len(requests) - len(missing)
        self._done += len(requests) - len(missing)
        self._on_progress(self._done, self._total, self._cached)
        if missing and self._batch_size:
            # All requests count, not only the missing ones, so that a resumed run chooses the same batch size.
            self._model.batch_size_per_gpu = self._batch_size(
                self._model, kind, requests
            )
        answer = getattr(self._model, kind)
        computed: list[Any] = []
        for part in split(missing):
            if part:
                computed += answer(part, disable_tqdm=True)
        # The new responses fill the gaps in their order.
        remaining = iter(computed)
        return [
            next(remaining) if response is None else response for response in responses
        ]

    def _parts_of_full_batches(self, requests: list[Any]) -> Iterator[list[Any]]:
        """Yield the texts in parts that end with a full batch of windows, so that lm-eval forms the same batches.

        lm-eval cuts a text that is longer than the model's context into several windows.
        """
        part = []
        windows = 0
        for request in requests:
            part.append(request)
            windows += self._count_windows(request.args[0])
            if windows % self._model.batch_size == 0:
                yield part
                part = []
        yield part

    def _count_windows(self, text: str) -> int:
        tokens = self._model.tok_encode(text)
        windows = get_rolling_token_windows(
            tokens, self._model.prefix_token_id, self._model.max_length, 1
        )
        return sum(1 for _ in windows)
