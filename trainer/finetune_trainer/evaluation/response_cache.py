"""What the model answered, kept request by request, so that a killed evaluation asks nothing twice.

lm-eval's own cache would do it, but it keeps pickles and its keys do not name the model
(lm-evaluation-harness issues 2715 and 4063); here the file belongs to one model and holds JSON lines.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune_trainer.runtime.artifacts import canonical_json

OnProgress = Callable[[int, int, int], None]
"""Told how many requests are answered, how many there are, and how many of them an earlier process had answered."""


class ResponseCache:
    """The answers of one model, on the disk as soon as they are given; in memory only where there is no file."""

    def __init__(self, file: Path | None = None) -> None:
        self._known: dict[str, Any] = dict(_lines(file)) if file else {}
        self._file = file.open("ab", buffering=0) if file else None
        if self._file and self._file.tell():
            self._file.write(b"\n")  # ends a line that a kill may have torn

    def get(self, kind: str, arguments: Sequence[Any]) -> Any | None:
        """Give what was answered, or None where nothing was or where the answer is left to chance."""
        return None if _sampled(arguments) else self._known.get(_key(kind, arguments))

    def put(self, kind: str, arguments: Sequence[Any], answer: Any) -> None:
        """Write one line in one call: a kill tears at most the last one."""
        key = _key(kind, arguments)
        if self._file and not _sampled(arguments) and key not in self._known:
            self._file.write(json.dumps([key, answer]).encode() + b"\n")
        self._known[key] = answer


def _key(kind: str, arguments: Sequence[Any]) -> str:
    return hashlib.sha256(canonical_json([kind, *arguments])).hexdigest()[:32]


def _sampled(arguments: Sequence[Any]) -> bool:
    return isinstance(arguments[-1], dict) and bool(arguments[-1].get("do_sample"))


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    if not file.exists():
        return
    for line in file.read_bytes().splitlines():
        try:
            key, answer = json.loads(line)
        except (ValueError, TypeError):
            continue
        yield key, tuple(answer) if isinstance(answer, list) else answer


class CachingLM:
    """An lm-eval model that asks only what has no answer yet and tells how far it is."""

    def __init__(self, model: Any, answers: ResponseCache, tell: OnProgress) -> None:
        self._model = model
        self._cache = answers
        self._tell = tell
        self._done = self._total = self._known = 0
        model.set_cache_hook(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Give for each (context, continuation) its log-probability in nats and whether it is the greedy one."""
        return self._ask("loglikelihood", requests, len(requests))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Give for each (text,) its log-probability in nats."""
        # lm-eval hands these answers over only when all that it was asked at once are there.
        return self._ask("loglikelihood_rolling", requests, self._model.batch_size)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Give for each (context, arguments of the generation) the text that follows."""
        return self._ask("generate_until", requests, len(requests))

    def add_partial(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        """Take an answer at the moment it is given; lm-eval calls this."""
        self._cache.put(kind, tuple(arguments), answer)
        self._done += 1
        self._tell(self._done, self._total, self._known)

    def _ask(self, kind: str, requests: Sequence[Any], at_once: int) -> list[Any]:
        found = [self._cache.get(kind, request.args) for request in requests]
        missing = [request for request, answer in zip(requests, found, strict=True) if answer is None]
        self._total += len(requests)
        self._known += len(requests) - len(missing)
        self._done += len(requests) - len(missing)
        self._tell(self._done, self._total, self._known)
        fresh: list[Any] = []
        for start in range(0, len(missing), max(1, at_once)):
            fresh += getattr(self._model, kind)(missing[start : start + at_once], disable_tqdm=True)
        given = iter(fresh)
        return [next(given) if answer is None else answer for answer in found]
