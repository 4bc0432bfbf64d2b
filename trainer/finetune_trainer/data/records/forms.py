"""The table of forms: how a record is recognised by its columns, and converted to the fields of a shape.

A new form is a line in FORMS, and a function in `converting`. Forms are tried by the names of columns with a value. A
record that has several forms is refused: only the user knows which of them is meant.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from finetune_trainer.contract import Objective
from finetune_trainer.data.records.converting.alpaca import alpaca
from finetune_trainer.data.records.converting.completions import (
    completion_record,
    text_record,
)
from finetune_trainer.data.records.converting.conversations import (
    KTO_TAG,
    conversation,
)
from finetune_trainer.data.records.converting.pairs import (
    alpaca_pair,
    openai_pair,
    pair,
    sharegpt_pair,
)
from finetune_trainer.data.records.message_forms import are_usual
from finetune_trainer.data.records.records import Fields, InvalidRecord

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
"""Names of the column that holds a conversation."""


@dataclass(frozen=True)
class Form:
    """A form of records: the columns that it reads, and how they become fields."""

    words: str
    """Its name in messages."""
    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Fields], Fields]
    """Returns the fields of a shape; raises InvalidRecord."""
    named: tuple[str, ...] | None = None
    """The optional fields for which a manifest may name columns, beside all required fields. None: it names none."""
    log_words: str = ""
    """Its name in the log, if its columns are not the trainer's."""

    @property
    def reads(self) -> frozenset[str]:
        """The names of all columns that it reads."""
        return frozenset(self.required + self.optional)

    @property
    def labels(self) -> frozenset[str]:
        """The names of its columns with a label of KTO."""
        return self.reads & {"label", KTO_TAG}

    @property
    def choice(self) -> str:
        """The line of the manifest that chooses this form of a record that has several."""
        names = list(self.required)
        if names[0] in CONVERSATION_COLUMNS:
            return f"columns: {{messages: {names[0]}}}"
        return f"columns: {{{', '.join(f'{name}: {name}' for name in names)}}}"


_WITH_MESSAGES = ("tools", "functions", "system", KTO_TAG)
_ALPACA = ("input", "system", "history", "label", KTO_TAG)
_PAIR = ("chosen", "rejected")
_PAIR_OF_OPENAI = ("input", "preferred_output", "non_preferred_output")

# fmt: off
FORMS: dict[Objective, tuple[Form, ...]] = {
    "SFT": (
        Form("messages", ("messages",), _WITH_MESSAGES, conversation("messages"), named=("tools", "system")),
        Form("conversations", ("conversations",), _WITH_MESSAGES, conversation("conversations")),
        Form("conversation", ("conversation",), _WITH_MESSAGES, conversation("conversation")),
        Form("prompt and completion", ("prompt", "completion"), ("tools", "label"), completion_record, named=()),
        Form("text", ("text",), (), text_record, named=()),
        Form("instruction and output", ("instruction", "output"), _ALPACA, alpaca, named=("input", "system"),
             log_words="Alpaca records, each a conversation"),
    ),
    "DPO": (
        Form("chosen and rejected", _PAIR, ("prompt", "tools"), pair, named=("prompt", "tools")),
        Form("conversations, chosen and rejected", ("conversations", *_PAIR), ("tools", "system"), sharegpt_pair,
             log_words="ShareGPT pairs"),
        Form("instruction, chosen and rejected", ("instruction", *_PAIR), ("input", "system"), alpaca_pair,
             log_words="Alpaca pairs"),
        Form("preferred_output and non_preferred_output", _PAIR_OF_OPENAI, (), openai_pair,
             log_words="OpenAI's preference records"),
    ),
}
# fmt: on
"""The forms of records for each objective, a form a line."""


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
    if form.log_words:
        return form.log_words
    for column in (*CONVERSATION_COLUMNS, "chosen"):
        value = record.get(column)
        if column in form.required and isinstance(value, list) and value:
            return _description_of_messages(column, value[0])
    if "completion" in form.required and isinstance(record["completion"], list):
        return "prompts and completions of messages, of which the completion is learned"
    return ""


def _description_of_messages(column: str, first: object) -> str:
    if isinstance(first, dict) and first.get("from") is not None:
        return "ShareGPT conversations"
    if column in ("conversations", "conversation"):
        return f"conversations in the column {column}"
    return ""
