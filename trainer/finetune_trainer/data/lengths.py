"""Counts the tokens of texts: `python -m finetune_trainer.data.lengths`. It imports neither torch nor transformers.

Reads {"tokenizer": PATH, "texts": [...]} as JSON from stdin. Writes {"tokens": N} a line to stdout for each text.
"""

import json
import sys

from tokenizers import Tokenizer


def main() -> None:
    """Count the tokens of the texts of stdin."""
    request = json.load(sys.stdin)
    tokenizer = Tokenizer.from_file(request["tokenizer"])
    for encoding in tokenizer.encode_batch(request["texts"]):
        print(json.dumps({"tokens": len(encoding.ids)}))


if __name__ == "__main__":
    main()
