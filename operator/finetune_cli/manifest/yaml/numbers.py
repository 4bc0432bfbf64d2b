"""Numbers of YAML, as the Go library behind kubectl reads them."""

import re

# Kubernetes reads an integer in JSON as an int64; a larger integer becomes a float without its last digits.
INTEGER_BITS = 64


def _refuse_leading_zero(digits: str) -> None:
    """Raise ValueError for a number such as 016, which is meant in decimals."""
    # 0o17 is not ambiguous, and neither is 07: seven in both systems.
    if not digits.lstrip("+-").isdecimal():
        return
    if int(digits) == int(digits, 8):
        return
    fix = f'write {int(digits)}, or "{digits}" for a text'
    raise ValueError(
        f"would be {int(digits, 8)}: a leading 0 begins an octal number; {fix}"
    )


def read_int(value: str) -> int:
    """Return an integer of YAML 1.1 or 1.2; raises ValueError with the fix."""
    digits = value.replace("_", "").lower()
    base = 0
    # YAML 1.1 writes octal numbers as 010, YAML 1.2 as 0o10; the Go library reads both.
    octal = re.fullmatch(r"([-+]?)0o?([0-7]+)", digits)
    if octal:
        _refuse_leading_zero(digits)
        base = 8
        digits = octal[1] + octal[2]
    try:
        # Base 0 reads the prefixes 0x and 0b.
        number = int(digits, base)
    except ValueError:
        raise ValueError("must be an integer") from None
    if number.bit_length() >= INTEGER_BITS:
        raise ValueError(f"must fit into a signed {INTEGER_BITS}-bit integer")
    return number


def read_float(value: str) -> float:
    """Return a number that JSON can hold; raises ValueError for any other."""
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        number = float("inf")
    if not abs(number) < float("inf"):
        raise ValueError("must be a finite number")
    return number
