"""Recognise the form of a record by its columns, and convert it to the fields of one of the trainer's shapes.

Forms are tried by the names of columns with a value. A record that has several forms is refused: only the user knows
which of them is meant.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from finetune_trainer.contract import Objective
from finetune_trainer.data.records.labels import check_avoided, check_label
from finetune_trainer.data.records.message_forms import (
    are_usual,
    parsed_json,
    read_messages,
)
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    check_not_blank,
    kind_of,
    text_of,
)

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
"""Names of the column that holds a conversation."""
# A blank line, as in the prompts of Alpaca and of LLaMA-Factory.
INPUT_SEPARATOR = "\n\n"
KTO_TAG = "kto_tag"
"""LLaMA-Factory's column for the label of KTO."""


@dataclass(frozen=True)
class Form:
    """A form of records: the columns that it reads, and how they become fields."""

    words: str
    """Its name in messages."""
    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Fields], Fields]
    """Returns the fields of a shape; raises InvalidRecord."""
    is_foreign: bool = False
    """Whether the log names it, because its columns are not the trainer's."""

    @property
    def reads(self) -> frozenset[str]:
        """The names of all columns that it reads."""
        return frozenset(self.required + self.optional)

    @property
    def choice(self) -> str:
        """The line of the manifest that chooses this form of a record that has several."""
        names = list(self.required)
        if names[0] in CONVERSATION_COLUMNS:
            return f"columns: {{messages: {names[0]}}}"
        return f"columns: {{{', '.join(f'{name}: {name}' for name in names)}}}"


def _conversation(column: str) -> Callable[[Fields], Fields]:
    def convert(record: Fields) -> Fields:
        if KTO_TAG in record:
            check_label(record, KTO_TAG)
        check_avoided(record, "label")
        messages = read_messages(record[column], column)
        fields = {"messages": _with_system(record, messages)}
        tools = _tools(record)
        if tools is not None:
            fields["tools"] = tools
        return fields

    return convert


def _with_system(record: Fields, messages: Any) -> Any:
    """Return messages that begin with the column `system`, if the record has a text there."""
    system = record.get("system")
    if system is None or not isinstance(messages, list):
        return messages
    text = text_of(record, "system")
    if not text.strip():
        return messages
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        if first.get("content") == text:
            return messages
        raise InvalidRecord(
            "has a column system and also a message of the role system: keep one of them"
        )
    return [{"role": "system", "content": text}, *messages]


def _tools(record: Fields) -> Any:
    """Return the column `tools`, or OpenAI's earlier column `functions` in the form of tools."""
    functions = record.get("functions")
    if isinstance(functions, str):
        functions = parsed_json(functions, "functions") if functions.strip() else None
    if not functions:
        return record.get("tools")
    if record.get("tools"):
        raise InvalidRecord("has tools and also functions: keep one of them")
    if not isinstance(functions, list):
        raise InvalidRecord(
            f"functions must be a list of function schemas, it is {kind_of(functions)}"
        )
    return [{"type": "function", "function": function} for function in functions]


def _completion(record: Fields) -> Fields:
    """Return prompt and completion, or for two lists of messages a conversation whose completion is learned."""
    prompt = record["prompt"]
    completion = record["completion"]
    _check_is_a_record(prompt, completion)
    if "label" in record:
        check_label(record, "label")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        if record.get("tools"):
            raise InvalidRecord(
                "tools beside a prompt that is no list of messages: nothing renders them"
            )
        return {"prompt": prompt, "completion": completion}
    if not isinstance(completion, list):
        raise InvalidRecord(
            f"prompt is a list of messages and completion is {kind_of(completion)}: "
            'write completion as [{"role": "assistant", "content": …}]'
        )
    if not isinstance(prompt, list):
        raise InvalidRecord(
            f"completion is a list of messages and prompt is {kind_of(prompt)}: "
            'write prompt as [{"role": "user", "content": …}]'
        )
    learned = read_messages(completion, "completion")
    if not any(_is_assistants(message) for message in learned):
        raise InvalidRecord("no message of completion has the role assistant")
    given = [_not_learned(message) for message in read_messages(prompt, "prompt")]
    fields: Fields = {"messages": given + learned}
    if record.get("tools") is not None:
        fields["tools"] = record["tools"]
    return fields


def _check_is_a_record(prompt: object, completion: object) -> None:
    """Raise InvalidRecord if both are lists of texts: a file of columns, and not of records."""
    if _are_texts(prompt) and _are_texts(completion):
        raise InvalidRecord("prompt and completion are lists: write a record for each")


def _are_texts(value: object) -> bool:
    texts = value if isinstance(value, list) else [None]
    return all(isinstance(text, str) for text in texts)


def _is_assistants(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _not_learned(message: Any) -> Any:
    return message | {"weight": 0} if _is_assistants(message) else message


def _text(record: Fields) -> Fields:
    return {"text": record["text"]}


def _instruction(record: Fields) -> str:
    """Return the question of an Alpaca record: the instruction, and its input after a blank line."""
    texts = [text_of(record, "instruction")]
    if record.get("input") is not None:
        texts.append(text_of(record, "input"))
    question = INPUT_SEPARATOR.join(text for text in texts if text.strip())
    check_not_blank(question, "instruction")
    return question


def _alpaca(record: Fields) -> Fields:
    """Return the conversation of an Alpaca record: its history, its instruction and its output."""
    check_label(record, "label")
    check_label(record, KTO_TAG)
    output = text_of(record, "output")
    check_not_blank(output, "output")
    turns = [*_history(record.get("history")), (_instruction(record), output)]
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": _with_system(record, messages)}


def _history(value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        value = parsed_json(value, "history") if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRecord(
            f"history must be a list of [question, answer], it is {kind_of(value)}"
        )
    turns = []
    for index, turn in enumerate(value):
        match turn:
            case [str() as question, str() as answer]:
                turns.append((question, answer))
            case _:
                raise InvalidRecord(
                    f"history[{index}] must be [question, answer], two texts"
                )
    return turns


def _pair(record: Fields) -> Fields:
    """Return the fields of a pair, with messages in the usual form."""
    fields = {
        name: _side(record[name], name)
        for name in ("prompt", "chosen", "rejected")
        if record.get(name) is not None
    }
    if record.get("tools") is not None:
        fields["tools"] = record["tools"]
    return fields


def _side(value: object, name: str) -> object:
    """Return the messages of a prompt or completion; a text stays a text."""
    if isinstance(value, dict):
        # A completion may be a single message.
        value = [value]
    return read_messages(value, name) if isinstance(value, list) else value


def _sharegpt_pair(record: Fields) -> Fields:
    prompt = read_messages(record["conversations"], "conversations")
    fields = _pair(record | {"prompt": None})
    return {**fields, "prompt": _with_system(record, prompt)}


def _alpaca_pair(record: Fields) -> Fields:
    question = [{"role": "user", "content": _instruction(record)}]
    return {
        "prompt": _with_system(record, question),
        **{
            name: [{"role": "assistant", "content": text_of(record, name)}]
            for name in ("chosen", "rejected")
        },
    }


def _openai_pair(record: Fields) -> Fields:
    given = record["input"]
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise InvalidRecord(
            f"input must be an object with messages, it is {kind_of(given)}"
        )
    unknown = given.keys() - {"messages", "tools", "parallel_tool_calls"}
    if unknown:
        raise InvalidRecord(
            f"input has also {min(unknown)}, which is not used: remove it"
        )
    fields = {
        "prompt": read_messages(given["messages"], "input.messages"),
        "chosen": _side(record["preferred_output"], "preferred_output"),
        "rejected": _side(record["non_preferred_output"], "non_preferred_output"),
    }
    if given.get("tools") is not None:
        fields["tools"] = given["tools"]
    return fields


_WITH_MESSAGES = ("tools", "functions", "system", KTO_TAG)
_PAIR = ("chosen", "rejected")
_ALPACA = ("input", "system", "history", "label", KTO_TAG)

FORMS: dict[Objective, tuple[Form, ...]] = {
    "SFT": (
        *(
            Form(
                words=column,
                required=(column,),
                optional=_WITH_MESSAGES,
                convert=_conversation(column),
            )
            for column in CONVERSATION_COLUMNS
        ),
        Form(
            "prompt and completion",
            ("prompt", "completion"),
            ("tools", "label"),
            _completion,
        ),
        Form("text", ("text",), (), _text),
        Form(
            "instruction and output",
            ("instruction", "output"),
            _ALPACA,
            _alpaca,
            is_foreign=True,
        ),
    ),
    "DPO": (
        Form("chosen and rejected", _PAIR, ("prompt", "tools"), _pair),
        Form(
            "conversations, chosen and rejected",
            ("conversations", *_PAIR),
            ("tools", "system"),
            _sharegpt_pair,
            is_foreign=True,
        ),
        Form(
            "instruction, chosen and rejected",
            ("instruction", *_PAIR),
            ("input", "system"),
            _alpaca_pair,
            is_foreign=True,
        ),
        Form(
            "preferred_output and non_preferred_output",
            ("input", "preferred_output", "non_preferred_output"),
            (),
            _openai_pair,
            is_foreign=True,
        ),
    ),
}
"""The forms of records for each objective."""


def form_of(names: Collection[str], objective: Objective) -> Form | None:
    """Return the form of a record that has values in these columns, or None if it has no known form.

    Raise InvalidRecord if it has several.
    """
    present = set(names)
    forms = [form for form in FORMS[objective] if present.issuperset(form.required)]
    if objective == "DPO" and forms:
        # The other forms of pairs say where the prompt is; a column with this name comes first.
        return forms[0] if "prompt" in present else forms[-1]
    if len(forms) > 1:
        shown = " and also ".join(form.words for form in forms)
        choices = " or ".join(form.choice for form in forms)
        raise InvalidRecord(
            f"has {shown}: choose with {choices} in the data set of the manifest"
        )
    return forms[0] if forms else None


def is_plain(record: Fields) -> bool:
    """Return whether a record consists of the fields of a shape of SFT, so that nothing is to be converted.

    Most records do: this saves them the search for their form.
    """
    match len(record):
        case 1:
            if "messages" in record:
                messages = record["messages"]
                return type(messages) is list and are_usual(messages)
            return type(record.get("text")) is str
        case 2:
            is_prompt = type(record.get("prompt")) is str
            return is_prompt and type(record.get("completion")) is str
        case _:
            return False


def columns_for(objective: Objective) -> frozenset[str]:
    """Return the names of all columns that a form of an objective reads."""
    return frozenset[str]().union(*(form.reads for form in FORMS[objective]))


def description(form: Form, record: Fields) -> str:
    """Return the form of a record for the log, or an empty text for the trainer's own forms."""
    if form.is_foreign:
        return _FOREIGN.get(form.required, form.words)
    for column in (*CONVERSATION_COLUMNS, "chosen"):
        value = record.get(column)
        if column in form.required and isinstance(value, list) and value:
            return _description_of_messages(column, value[0])
    if "completion" in form.required and isinstance(record["completion"], list):
        return "prompts and completions of messages, of which the completion is learned"
    return ""


_FOREIGN: dict[tuple[str, ...], str] = {
    ("instruction", "output"): "Alpaca records, each a conversation",
    ("conversations", *_PAIR): "ShareGPT pairs",
    ("instruction", *_PAIR): "Alpaca pairs",
    (
        "input",
        "preferred_output",
        "non_preferred_output",
    ): "OpenAI's preference records",
}


def _description_of_messages(column: str, first: object) -> str:
    if isinstance(first, dict) and first.get("from") is not None:
        return "ShareGPT conversations"
    if column in ("conversations", "conversation"):
        return f"conversations in the column {column}"
    return ""
