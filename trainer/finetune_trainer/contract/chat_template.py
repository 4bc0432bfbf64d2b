"""The chat template in a manifest: Jinja text or the URI of a file, and the arguments that it has by default."""

import keyword
import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.uris import (
    FORMS,
    TASK_FILE,
    check_inside_claim,
    description_of,
)

# The config is an environment variable of the pod. Linux refuses a variable of more than 131,072 bytes.
MAX_TEMPLATE_CHARACTERS = 24_576
"""Limit of a template in the manifest; a longer template is in a file."""
MAX_ARGUMENTS = 16
MAX_ARGUMENT_CHARACTERS = 1024
MAX_ARGUMENT_NUMBER = 10**15
"""Limit of every number, as in results: the API server stores it unchanged."""
_JINJA = r"[\s\S]*[{][{%][\s\S]*"
"""Matches a text with the beginning of an expression or of a statement, which no URI has."""
TEMPLATE_PATTERN = (
    f"^({'|'.join([*(FORMS[store][0] for store in TASK_FILE), _JINJA])})$"
)
TEMPLATE_DESCRIPTION = (
    "must be Jinja text, which has {{ or {%, or a file: "
    + description_of(*TASK_FILE).removeprefix("must be ")
)

RESERVED_ARGUMENTS = frozenset(
    {
        "messages", "tools", "documents", "conversation", "add_generation_prompt", "continue_final_message",
        "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
        "additional_special_tokens",
    }
)  # fmt: skip
"""Names that each rendering sets itself."""

ChatTemplateOrigin = Literal["BaseModel", "Manifest", "Default"]
"""Where a chat template is from; Default is the template for base models that have none."""


def is_jinja(value: str) -> bool:
    """Return whether a value of prepare.chatTemplate is Jinja text, and not the URI of a file."""
    return "{{" in value or "{%" in value


def _check_template(value: str) -> str:
    if is_jinja(value):
        return value
    return check_inside_claim(value)


def _check_name(name: str) -> str:
    """Raise ValueError for a name that is no variable of a template, or that each rendering sets itself."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(
            "must be the name of a variable: letters, digits and _, with no digit first"
        )
    if name in RESERVED_ARGUMENTS:
        raise ValueError("is set by each conversation: remove it")
    return name


def _check_value(value: Any) -> Any:
    match value:
        case bool():
            return value
        case str():
            if len(value) > MAX_ARGUMENT_CHARACTERS:
                raise ValueError(
                    f"must have at most {MAX_ARGUMENT_CHARACTERS:,} characters"
                )
            return value
        case int() | float():
            # The comparison is False for NaN, too.
            if math.isinf(value) or not abs(value) <= MAX_ARGUMENT_NUMBER:
                raise ValueError(
                    f"must be between -{MAX_ARGUMENT_NUMBER:,} and {MAX_ARGUMENT_NUMBER:,}"
                )
            return value
        case _:
            raise ValueError("must be true, false, a number or a text")


ChatTemplateText = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=MAX_TEMPLATE_CHARACTERS, pattern=TEMPLATE_PATTERN
    ),
    AfterValidator(_check_template),
]
ArgumentName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64),
    AfterValidator(_check_name),
]
ArgumentValue = Annotated[bool | int | float | str, PlainValidator(_check_value)]

# A structural schema has no union of types. A value without a type may be anything, so the bounds that contradict each
# other refuse objects and lists.
_ANY_SCALAR = {
    "x-kubernetes-preserve-unknown-fields": True,
    "maxLength": MAX_ARGUMENT_CHARACTERS,
    "minimum": -MAX_ARGUMENT_NUMBER,
    "maximum": MAX_ARGUMENT_NUMBER,
    "minItems": 1,
    "maxItems": 0,
    "minProperties": 1,
    "maxProperties": 0,
}
ChatTemplateArguments = Annotated[
    dict[ArgumentName, ArgumentValue],
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_ARGUMENTS,
            "additionalProperties": _ANY_SCALAR,
        }
    ),
]


class ChatTemplateRecipe(ContractModel):
    """The chat template of the manifest."""

    chat_template: ChatTemplateText | None = None
    """Chat template for conversations in training, samples, evaluate and the published model, in place of the base
    model's templates default and tool_use. Jinja text, or the URI of a file with it: pvc://CLAIM/PATH; in a local run
    also file:///PATH or a path relative to the manifest. Absent: the base model's; if it has none, `role: content`."""

    chat_template_arguments: ChatTemplateArguments = Field(
        default={}, max_length=MAX_ARGUMENTS
    )
    """Values of variables that the chat template reads, such as enable_thinking: false. They become defaults in the
    published template, so that a server renders what was trained. A request may set others."""

    @property
    def chat_template_uri(self) -> str | None:
        """The URI of the file with the chat template; None if the manifest has the text or no template."""
        if self.chat_template is None or is_jinja(self.chat_template):
            return None
        return self.chat_template
