"""Amounts of money in the API: texts in JSON, because a binary fraction cannot hold a cent."""

from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

# Together the 18 digits that max_digits allows below.
AMOUNT = r"^[0-9]{1,12}([.][0-9]{1,6})?$"
SIGNED_AMOUNT = r"^-?[0-9]{1,12}([.][0-9]{1,6})?$"


def _fixed_point(value: Decimal) -> Decimal:
    """Return the same number written without an exponent, as the pattern wants it: 80 for 8E+1."""
    return Decimal(f"{value:f}")


Amount = Annotated[
    Decimal,
    AfterValidator(_fixed_point),
    Field(ge=0, max_digits=18, decimal_places=6),
    WithJsonSchema({"type": "string", "pattern": AMOUNT}),
]
"""An amount of money."""
SignedAmount = Annotated[
    Decimal,
    Field(max_digits=18, decimal_places=6),
    WithJsonSchema({"type": "string", "pattern": SIGNED_AMOUNT}),
]
"""An amount of money that may be negative."""
