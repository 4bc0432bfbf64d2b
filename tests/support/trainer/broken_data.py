"""The mistakes that new users make with their data."""

import json
from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """A file, fields of the config, and what the message says."""

    name: str
    content: bytes
    message: str
    changes: dict[str, Any] = {}  # noqa: RUF012  never written to
    check: str = ""
    """What `finetune validate --check` says, if it sees the mistake without reading a record."""


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


USER = {"role": "user", "content": "the file?"}
GPT = {"role": "assistant", "content": "a socket"}
DPO = {"objective": "DPO"}

MISTAKES = {
    "ShareGPT with an unknown role": Mistake(
        "data.jsonl",
        lines({"conversations": [{"from": "narrator", "value": "a"}]}),
        "data.jsonl:1: conversations[0].from is narrator: write human, gpt, system, ",
    ),
    "Alpaca whose input no column reads": Mistake(
        "data.jsonl",
        lines({"instruction": "a", "input": "some words", "output": "b"}),
        'data.jsonl:1: column input: its text is not used: write columns: {prompt: "{{ instruction }}',
        {"columns": {"prompt": "instruction", "completion": "output"}},
    ),
    "plain text": Mistake(
        "data.txt",
        b"the file\n",
        'data.txt: .txt is plain text: write {"text": "…"}',
        check="spec.datasets[0].uri: .txt is plain text: write",
    ),
    "plain text named .jsonl": Mistake(
        "data.jsonl",
        b"the file\n",
        'data.jsonl:1: not JSON: Expecting value at column 1: for plain text write {"text": "…"}',
    ),
    "a folder": Mistake(
        "folder/data.jsonl", b"", "folder is a folder: name a file in it", {}
    ),
    "two lists in an object": Mistake(
        "data.json",
        json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}).encode(),
        "data.json:1: the file has test beside its list of records: write this list alone",
    ),
    "a misspelt column in the manifest": Mistake(
        "data.jsonl",
        lines({"question": "a", "answer": "b"}),
        "data.jsonl:1: has no column anwser for completion; its columns are question, answer; did you mean answer?",
        {"columns": {"prompt": "question", "completion": "anwser"}},
    ),
    "a misspelt column in the file": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "completions": "b"}),
        "data.jsonl:1: completion is missing: write columns: {completion: completions}",
    ),
    "a column in upper case": Mistake(
        "data.csv",
        b"Prompt,Completion\na,b\n",
        "data.csv:1: the first line must name the columns: it needs messages, prompt and completion, or text; "
        "it has Completion, Prompt: write columns: {prompt: Prompt, completion: Completion}",
    ),
    "null completions": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}),
        "data.jsonl:2: completion is null: write a text, or remove the record",
    ),
    "empty completions": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "completion": " "}),
        "data.jsonl:1: completion is empty: there is nothing to learn",
    ),
    "Latin-1": Mistake(
        "data.jsonl",
        '{"text": "café"}\n'.encode("latin-1"),
        "data.jsonl:1: byte 0xe9 at position 14 is not UTF-8: save the file as UTF-8",
    ),
    "UTF-16": Mistake(
        "data.jsonl",
        '{"text": "a b"}\n'.encode("utf-16"),
        "data.jsonl: the file is UTF-16 or binary: save it as UTF-8",
        check="spec.datasets[0].uri: the file is UTF-16 or binary: save it as UTF-8",
    ),
    "DPO on prompt and completion": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "completion": "b"}),
        "data.jsonl:1: needs chosen and rejected, with or without prompt; it has completion, prompt: "
        "set train.objective to SFT, or add chosen and rejected",
        DPO,
    ),
    "SFT on pairs": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "chosen": "b", "rejected": "c"}),
        "data.jsonl:1: has chosen and rejected, but no completion: set train.objective to DPO",
    ),
    "SFT on KTO's answers": Mistake(
        "data.jsonl",
        lines({"prompt": "a", "completion": "b", "label": False}),
        "data.jsonl:1: label is false, so the answer is to be avoided, and SFT would learn it: remove the record",
    ),
    "several forms in a record": Mistake(
        "data.jsonl",
        lines({"text": "a", "messages": [USER, GPT]}),
        "data.jsonl:1: has messages and also text: choose with columns: {messages: messages} or columns: {text: text}",
    ),
    "other names of columns": Mistake(
        "data.csv",
        b"question;answer\na;b\n",
        "it has answer, question: write columns: {instruction: question, output: answer} in the data set",
    ),
    "messages as prompt, text as completion": Mistake(
        "data.jsonl",
        lines({"prompt": [USER], "completion": "b"}),
        'data.jsonl:1: prompt is a list of messages and completion is a string: write completion as [{"role"',
    ),
    "an image": Mistake(
        "data.jsonl",
        lines(
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GPT]}
        ),
        "data.jsonl:1: messages[0].content[0] is a part image_url: only text is trained on; remove the record",
    ),
    "no answer": Mistake(
        "data.jsonl",
        lines({"messages": [USER]}),
        "data.jsonl:1: no message has the role assistant (roles: user)",
    ),
    "a cut line": Mistake(
        "data.jsonl",
        lines({"text": "a b"}) + b'{"text": "a',
        "data.jsonl:2: not JSON: Unterminated string",
    ),
    "a row with too many cells": Mistake(
        "data.csv",
        b"prompt,completion\na,b,c\n",
        "data.csv:2: 3 cells, but the header names 2: quote cells that hold the separator",
    ),
    "a pointer of Git LFS": Mistake(
        "data.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "data.jsonl: the file is a pointer of Git LFS: run git lfs pull",
        check="spec.datasets[0].uri: the file is a pointer of Git LFS: run git lfs pull",
    ),
    "an empty file": Mistake(
        "data.jsonl",
        b"",
        "data.jsonl has no records; add records or correct datasets[0].uri",
        check="data.jsonl is empty",
    ),
}
