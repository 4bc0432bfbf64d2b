"""Send the card of a run to MLflow and W&B: `python -m finetune_trainer.tracking`, with a CardRequest on stdin.

It prints a CardAnswer as JSON in its last line.
"""

import os
import sys
from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.run_card import CardAnswer, CardRequest
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.tracking.port import PageTracker, ReportEnd, TrackedRun
from finetune_trainer.tracking.registry import page_trackers


def main() -> None:
    """Answer the request on stdin."""
    request = CardRequest.model_validate_json(sys.stdin.read())
    answer = send(request)
    print(answer.model_dump_json(by_alias=True), flush=True)
    # Without waiting for threads of libraries, which may still ask a server that is down.
    os._exit(0)


def send(request: CardRequest) -> CardAnswer:
    """Send the card to each tracker that takes one; a problem of one tracker does not keep it from the next."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = TrackedRun(
        identity=request.identity,
        name=request.tracking.run_name or request.identity,
        # The stages have sent them.
        params={},
        stage="card",
        folder=folder,
        train_folder=folder,
    )
    end = ReportEnd.FINISHED if request.succeeded else ReportEnd.FAILED
    places = []
    problems = []
    try:
        trackers = page_trackers(request.tracking, run, Environment(folder))
    except ConfigInvalid as error:
        return CardAnswer(problems=(str(error),))
    for tracker in trackers:
        try:
            places.append(_send(tracker, request.page, end))
        except Exception as error:  # noqa: BLE001  a tracker's library raises anything
            kind = type(error).__name__
            problems.append(f"tracking.{tracker.name}: {kind}: {error}")
    return CardAnswer(places=tuple(places), problems=tuple(problems))


def _send(tracker: PageTracker, page: str, end: ReportEnd) -> str:
    place = tracker.log_page(page)
    tracker.close(end)
    return place


if __name__ == "__main__":
    main()
