"""A process that tokenizes: reads batches of records from stdin, and writes them tokenized to stdout, in order.

It imports neither torch nor the model code of transformers: that would take seconds and half a gigabyte.
"""

import os
import sys
import traceback
from typing import IO

from finetune_trainer.data.tokenizing.messages import (
    batch_message,
    read_records,
    read_settings,
    receive,
    send,
)
from finetune_trainer.data.tokenizing.record_tokenizer import (
    LoadedTokenizer,
    RecordTokenizer,
)

READY = b"ready"
FAILED = b"failed"
"""The answer if tokenizing a batch raised an error: the parent tokenizes it again, and reports the error."""


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every batch, until the parent closes its end."""
    first = receive(requests)
    if first is None:
        return
    settings, recipe, objective = read_settings(first)
    tokenizer = RecordTokenizer(LoadedTokenizer(settings), recipe, objective)
    send(answers, READY)
    while True:
        message = receive(requests)
        if message is None:
            return
        send(answers, _answer(tokenizer, message))


def _answer(tokenizer: RecordTokenizer, message: bytes) -> bytes:
    try:
        records, shape = read_records(message)
        return batch_message(tokenizer.tokenize(records, shape))
    except Exception:  # noqa: BLE001  whatever it is, the parent will raise it
        traceback.print_exc()
        return FAILED


def main() -> None:
    """Serve on stdin and stdout; the output of libraries goes to stderr."""
    # A library that printed to stdout would tear the messages.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        # The parent has ended. Without _exit, Python would fail again when it flushes stdout.
        os._exit(1)


if __name__ == "__main__":
    main()
