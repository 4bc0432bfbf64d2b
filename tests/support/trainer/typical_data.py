"""Files of data that people have, in small: each is valid as it is."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet
from support.trainer.tool_calls import ADD, record

QUESTION = {"role": "user", "content": "the file?"}
ANSWER = {"role": "assistant", "content": "a socket"}
SYSTEM = {"role": "system", "content": "Be old."}
CHAT = [QUESTION, ANSWER]
HUMAN = {"from": "human", "value": "the file?"}
GPT = {"from": "gpt", "value": "a socket"}
PAIR = {"prompt": "the file?", "completion": " a socket"}
ALPACA = {"instruction": "the file?", "input": "", "output": "a socket"}
OTHER = {"role": "assistant", "content": "one row"}


class DataFile(NamedTuple):
    """A file, and the fields of its data set."""

    name: str
    content: bytes
    fields: dict[str, Any] = {}  # noqa: RUF012  never written to
    has_calls: bool = False
    """Whether records call tools, which some chat templates cannot render."""
    has_system: bool = False
    """Whether records have a system message, which some chat templates refuse."""
    has_reasoning: bool = False
    """Whether records have reasoning, which some chat templates drop."""


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(entry)}\n" for entry in records).encode()


def table(separator: str, *rows: list[str]) -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=separator).writerows(rows)
    return file.getvalue().encode()


def columnar(*records: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(records)), file)
    return file.getvalue()


def openai_call(*, legacy: bool) -> dict[str, Any]:
    """Return a record of OpenAI with a call, in its present or its earlier form."""
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    if legacy:
        calling = {"role": "assistant", "content": None, "function_call": function}
        answer = {"role": "function", "name": "add", "content": "5"}
        return {
            "messages": [QUESTION, calling, answer, ANSWER],
            "functions": [ADD["function"]],
        }
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call00001", "content": "5"},
            ANSWER,
        ],
        "tools": [ADD],
        "parallel_tool_calls": False,
    }


SFT = {
    "messages": DataFile("a.jsonl", lines({"messages": CHAT}, {"messages": CHAT * 2})),
    "messages with system": DataFile(
        "a.jsonl", lines({"messages": [SYSTEM, *CHAT]}), has_system=True
    ),
    "messages and columns of a hub": DataFile(
        "a.jsonl",
        lines(
            {
                "messages": CHAT,
                "prompt_id": "f0e37e9f7800261167ce91143f98f511",
                "source": "ultrachat",
                "score": 4.5,
                "tokens": 12,
                "url": "https://example.com/a?b=c",
                "created": "2024-05-01 10:00:00",
            }
        ),
    ),
    "UltraChat": DataFile(
        "a.jsonl",
        lines({"prompt": "the file?", "prompt_id": "0a", "messages": CHAT}),
    ),
    "content in parts": DataFile(
        "a.jsonl",
        lines(
            {
                "messages": [
                    {**m, "content": [{"type": "text", "text": m["content"]}]}
                    for m in CHAT
                ]
            }
        ),
    ),
    "OpenAI's weights": DataFile(
        "a.jsonl",
        lines({"messages": [QUESTION, OTHER | {"weight": 0}, QUESTION, ANSWER]}),
    ),
    "OpenAI's calls": DataFile(
        "a.jsonl", lines(openai_call(legacy=False)), has_calls=True
    ),
    "OpenAI's functions": DataFile(
        "a.jsonl", lines(openai_call(legacy=True)), has_calls=True
    ),
    "calls with objects": DataFile("a.jsonl", lines(record()), has_calls=True),
    "tools as text": DataFile(
        "a.jsonl",
        lines({**record(), "tools": json.dumps([ADD])}),
        has_calls=True,
    ),
    "axolotl's train": DataFile(
        "a.jsonl",
        lines(
            {"messages": [QUESTION, OTHER | {"train": False}, QUESTION, ANSWER]},
        ),
    ),
    "reasoning in its key": DataFile(
        "a.jsonl",
        lines({"messages": [QUESTION, ANSWER | {"reasoning_content": "It is old."}]}),
        has_reasoning=True,
    ),
    "reasoning in the content": DataFile(
        "a.jsonl",
        lines(
            {
                "messages": [
                    QUESTION,
                    {**ANSWER, "content": "<think>\nIt is.\n</think>\n\na socket"},
                ]
            }
        ),
    ),
    "ShareGPT": DataFile(
        "a.jsonl", lines({"id": "x_1", "conversations": [HUMAN, GPT]})
    ),
    "ShareGPT with system": DataFile(
        "a.json",
        json.dumps(
            [{"system": "Be old.", "tools": "", "conversations": [HUMAN, GPT]}]
        ).encode(),
        has_system=True,
    ),
    "ShareGPT of LLaMA-Factory": DataFile(
        "a.json",
        json.dumps(
            [
                {
                    "conversations": [
                        HUMAN,
                        {
                            "from": "function_call",
                            "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}',
                        },
                        {"from": "observation", "value": "5"},
                        GPT,
                    ],
                    "tools": json.dumps([ADD["function"]]),
                }
            ],
            indent=2,
        ).encode(),
        has_calls=True,
    ),
    "conversation of roles": DataFile(
        "a.jsonl", lines({"conversation": CHAT, "language": "English"})
    ),
    "Alpaca": DataFile(
        "a.json",
        json.dumps(
            [ALPACA, {**ALPACA, "input": "some words of a reader"}], indent=2
        ).encode(),
    ),
    "Alpaca with history": DataFile(
        "a.jsonl", lines({**ALPACA, "history": [["or?", "no way"]]})
    ),
    "Dolly by columns": DataFile(
        "a.jsonl",
        lines(
            {
                "instruction": "the file?",
                "context": "",
                "response": "a socket",
                "category": "open_qa",
            },
            {
                "instruction": "the file?",
                "context": "some words",
                "response": "a socket",
                "category": "closed_qa",
            },
        ),
        {"columns": {"input": "context", "output": "response"}},
    ),
    "question and answer by columns": DataFile(
        "a.jsonl",
        lines({"question": "the file?", "answer": "a socket"}),
        {"columns": {"instruction": "question", "output": "answer"}},
    ),
    "Alpaca by a template": DataFile(
        "a.jsonl",
        lines({"instruction": "the file?", "input": "some words", "output": " so"}),
        {
            "columns": {
                "prompt": "{{ instruction }}\n{{ input }}\n",
                "completion": "output",
            }
        },
    ),
    "prompt and completion": DataFile("a.jsonl", lines(PAIR, PAIR)),
    "TRL's messages": DataFile(
        "a.jsonl", lines({"prompt": [QUESTION], "completion": [ANSWER]})
    ),
    "KTO": DataFile("a.jsonl", lines({**PAIR, "label": True})),
    "KTO of messages": DataFile(
        "a.jsonl",
        lines({"prompt": [QUESTION], "completion": [ANSWER], "label": True}),
    ),
    "KTO of LLaMA-Factory": DataFile(
        "a.json", json.dumps([{"messages": CHAT, "label": True}]).encode()
    ),
    "text": DataFile("a.jsonl", lines({"text": "The parser opens the file."})),
    "text of a crawl": DataFile(
        "a.jsonl",
        lines(
            {
                "text": "The parser opens the file. " * 3,
                "id": "<urn:uuid:2bd4>",
                "dump": "CC-MAIN-2013-20",
                "url": "http://example.com/a",
                "date": "2013-05-18T06:43:00Z",
                "file_path": "s3://commoncrawl/a.warc.gz",
                "language": "en",
                "language_score": 0.97,
                "token_count": 12,
                "meta": {"pile_set_name": "Wikipedia"},
            }
        ),
    ),
    "indented objects": DataFile(
        "a.json", "\n".join(json.dumps(PAIR, indent=2) for _ in range(2)).encode()
    ),
    "list in an object": DataFile("a.json", json.dumps({"data": [PAIR]}).encode()),
    "byte order mark": DataFile("a.jsonl", b"\xef\xbb\xbf" + lines(PAIR)),
    "Windows' ends of lines": DataFile(
        "a.jsonl", lines(PAIR, PAIR).replace(b"\n", b"\r\n")
    ),
    "CSV": DataFile(
        "a.csv",
        table(",", ["prompt", "completion"], ["a, b?", ' so "it" is\nold']),
    ),
    "CSV with semicolons": DataFile(
        "a.csv", table(";", ["prompt", "completion"], ["the file?", " so"])
    ),
    "TSV": DataFile(
        "a.tsv", table("\t", ["instruction", "output"], ["the file?", "a socket"])
    ),
    "compressed": DataFile("a.jsonl.gz", gzip.compress(lines({"messages": CHAT}))),
    "Parquet": DataFile("a.parquet", columnar({"messages": CHAT})),
    "Parquet with nulls": DataFile(
        "a.parquet",
        columnar(
            {"messages": CHAT, "tools": None, "images": []},
            {"messages": CHAT, "tools": None, "images": []},
        ),
    ),
    "Parquet of calls": DataFile(
        "a.parquet", columnar(openai_call(legacy=False)), has_calls=True
    ),
}
"""Files for the objective SFT, by their forms."""

CHOSEN = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}
SIDES = {"chosen": [ANSWER], "rejected": [OTHER]}
DPO = {
    "whole conversations": DataFile("a.jsonl", lines(CHOSEN)),
    "UltraFeedback": DataFile(
        "a.jsonl",
        lines(
            {
                **CHOSEN,
                "prompt": "the file?",
                "prompt_id": "0a",
                "score_chosen": 8.0,
                "score_rejected": 3.5,
            }
        ),
    ),
    "texts": DataFile(
        "a.jsonl", lines({"prompt": "the file?", "chosen": " a", "rejected": " b"})
    ),
    "TRL's messages": DataFile("a.jsonl", lines({"prompt": [QUESTION], **SIDES})),
    "ShareGPT": DataFile(
        "a.json",
        json.dumps(
            [
                {
                    "conversations": [HUMAN],
                    "chosen": GPT,
                    "rejected": {"from": "gpt", "value": "one row"},
                }
            ]
        ).encode(),
    ),
    "Alpaca": DataFile(
        "a.json",
        json.dumps(
            [{"instruction": "the file?", "input": "", "chosen": "a", "rejected": "b"}]
        ).encode(),
    ),
    "OpenAI": DataFile(
        "a.jsonl",
        lines(
            {
                "input": {"messages": [QUESTION], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [ANSWER],
                "non_preferred_output": [OTHER],
            }
        ),
    ),
    "Parquet": DataFile("a.parquet", columnar(CHOSEN)),
}  # fmt: skip
"""Files for the objective DPO, by their forms."""


def write(folder: Path, files: dict[str, DataFile]) -> list[dict[str, Any]]:
    """Write each file into a folder of its own; return the data sets of a manifest."""
    datasets = []
    for number, file in enumerate(files.values()):
        path = folder / str(number) / file.name
        path.parent.mkdir(parents=True)
        path.write_bytes(file.content)
        datasets.append({"uri": f"{number}/{file.name}", **file.fields})
    return datasets
