"""Renders a short conversation, to find a chat template that never ends or leaves its sandbox before any record."""

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.runtime.errors import short_reason
from finetune_trainer.template_syntax import TemplateInvalid, depth_limit

# The slowest known template takes milliseconds, also on a machine that runs much else.
MAX_SECONDS = 20.0
"""Longest time for a conversation of two messages."""
ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
"""How Python writes an object without a text of its own, such as a method that is not called."""
CONVERSATION = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
]


def check_rendering(template: str, special_tokens: Mapping[str, Any]) -> None:
    """Raise TemplateInvalid if rendering takes too long, calls itself without end, or needs what the sandbox refuses.

    A template may refuse this conversation: records are judged on their own.
    """
    try:
        with _time_limit(), depth_limit():
            [text], _ = render_jinja_template(
                [CONVERSATION], chat_template=template, **special_tokens
            )
    except SecurityError as error:
        raise TemplateInvalid(f"its sandbox refuses it: {error}") from None
    except OverflowError as error:
        raise TemplateInvalid(f"a number in it is too large: {error}") from None
    except RecursionError:
        raise TemplateInvalid("a macro calls itself without end") from None
    except TimeoutError:
        raise TemplateInvalid(
            f"a conversation of two messages takes more than {MAX_SECONDS:.0f} s: it may loop"
        ) from None
    except (TemplateError, TypeError, ValueError):
        # It may be meant: templates raise errors for conversations that they do not support.
        pass
    except (LookupError, ArithmeticError) as error:
        raise TemplateInvalid(f"it fails: {short_reason(error)}") from None
    else:
        _check_addresses(text)


def _check_addresses(text: str) -> None:
    """Raise TemplateInvalid if a text has an address in memory, which differs in every process."""
    address = ADDRESS.search(text)
    if address:
        raise TemplateInvalid(
            f"it writes {address[0]}, which differs each time: call the method with (), or write its text"
        )


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in the block if it takes more than MAX_SECONDS."""
    # Only the main thread gets signals. A stage runs in it.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
