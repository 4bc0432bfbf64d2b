"""The data sets and the tokenizer of the benchmark of the prepare stage."""

import csv
import json
import random
import statistics
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetWriter
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STARTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "st",
    "tr",
    "pl",
    "ch",
    "sh",
    "th",
    "br",
]
VOWELS = ["a", "e", "i", "o", "u", "ea", "ou", "ai"]
ENDS = ("", "n", "r", "s", "l", "t", "ng", "ck")
VERBS = ("opens", "closes", "returns", "ignores")
_BEGIN = "{{- '<|im_start|>' + message.role + '\n' -}}"
_CONTENT = "{{- message.content + '<|im_end|>' -}}"
_PROMPT = (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TEMPLATES = {
    "chatml": f"{{%- for message in messages -%}}{_BEGIN}{_CONTENT}{{{{- '\n' -}}}}{{%- endfor -%}}{_PROMPT}",
    "marks": (
        f"{{%- for message in messages -%}}{_BEGIN}{{%- if message.role == 'assistant' -%}}"
        f"{{% generation %}}{_CONTENT}{{% endgeneration %}}{{%- else -%}}{_CONTENT}{{%- endif -%}}"
        f"{{{{- '\n' -}}}}{{%- endfor -%}}{_PROMPT}"
    ),
}
"""Chat templates that render the same text: without and with marks around what is learned."""


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """Return a record of plain text."""
    return {"text": row["prompt"] + row["completion"]}


def as_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Return an Alpaca record without an input."""
    output = row["completion"].strip()
    return {"instruction": row["prompt"], "input": "", "output": output}


SHAPES = {"text": as_text, "alpaca": as_alpaca}
"""Other shapes of a prompt and its completion."""


def with_labels(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield records with three further columns, which hold no text to learn."""
    for number, row in enumerate(rows):
        url = f"https://example.org/page/{number}"
        yield {"id": number, **row, "source": "web-2024", "url": url}


def records() -> Iterator[dict[str, str]]:
    """Yield records of different lengths, without end."""
    number = 0
    while True:
        verb = VERBS[number % 4]
        padding = "long " * (number % 23)
        yield {
            "prompt": f"Reader {number} {verb} a {padding}file {number * 7919 % 100_003}.\nVerb:",
            "completion": f" {verb}",
        }
        number += 1


class Corpus:
    """Sentences of invented words, of which some are frequent and most are rare."""

    def __init__(self) -> None:
        draw = random.Random(1)  # noqa: S311  text, no secret
        syllables = [
            start + vowel + end for start in STARTS for vowel in VOWELS for end in ENDS
        ]
        words = [
            "".join(draw.choices(syllables, k=draw.choice((1, 1, 2, 2, 3))))
            for _ in range(6000)
        ]
        weights = [1 / (rank + 3) for rank in range(len(words))]
        self.sentences = [
            " ".join(draw.choices(words, weights, k=draw.randint(6, 22))).capitalize()
            + draw.choice((".", "?", ":\n"))
            for _ in range(8000)
        ]

    def records(
        self, tokens: int, tokenizer: Any, *, chat: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield records of about so many tokens, without end: a prompt and its completion, or five exchanges."""
        draw = random.Random(2)  # noqa: S311  text, no secret
        lengths = tokenizer(
            self.sentences, add_special_tokens=False, return_attention_mask=False
        ).input_ids
        mean = statistics.fmean(map(len, lengths))
        while True:
            count = max(
                10 if chat else 2, round(tokens / mean * draw.uniform(0.6, 1.4))
            )
            chosen = draw.choices(self.sentences, k=count)
            if chat:
                parts = [" ".join(chosen[turn::10]) for turn in range(10)]
                roles = ("user", "assistant")
                yield {
                    "messages": [
                        {"role": roles[at % 2], "content": part}
                        for at, part in enumerate(parts)
                    ]
                }
            else:
                prompt = " ".join(chosen[: count * 3 // 4])
                yield {
                    "prompt": prompt,
                    "completion": " " + " ".join(chosen[count * 3 // 4 :]),
                }


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write a data set in the format of the file's extension."""
    rows = iter(rows)
    if path.suffix == ".parquet":
        schema = pa.schema({"prompt": pa.string(), "completion": pa.string()})
        with ParquetWriter(path, schema) as writer:
            while batch := list(islice(rows, 10_000)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
        return
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, ["prompt", "completion"])
            table.writeheader()
            table.writerows(rows)
        elif path.suffix == ".json":
            file.write("[" + json.dumps(next(rows)))
            file.writelines(",\n" + json.dumps(row) for row in rows)
            file.write("]")
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def make_tokenizer(
    folder: Path, texts: Iterable[str], template: str | None = None
) -> None:
    """Train a byte-level BPE tokenizer and save it with a model of a few weights."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        vocab_size=4096,
        show_progress=False,
        special_tokens=["<pad>", "<bos>", "<eos>"],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001  tokenizers offers no public conversion
        pad_token="<pad>",  # noqa: S106  a token of text
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=131072,
    )
    # Prepare refuses a model without weights.
    LlamaForCausalLM(config).save_pretrained(folder)
