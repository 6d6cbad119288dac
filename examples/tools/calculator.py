"""A calculator for a model."""

import ast
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Number = Fraction | float  # a root or a power may be a float; other results are exact

_LONGEST = 1000  # characters of an expression
_BITS = 10_000  # of a number's numerator and denominator together: 3,000 digits
_PLACES = 30  # the most decimals of an exact result; longer ones are rounded
_TOO_LARGE, _NOT_REAL = "a number is too large", "the root of a negative number is not real"
_PROBLEMS: dict[type, str] = {ZeroDivisionError: "division by zero", OverflowError: _TOO_LARGE}


def calculator(expression: str) -> str:
    """Compute an expression with exact numbers, such as (0.1 + 2/3) * sqrt(16) or 2**64 % 1000.

    It has + - * / // % **, parentheses, abs, max, min, round and sqrt.

    Args:
        expression: the expression, in Python's notation.
    """
    size = len(expression)
    if size > _LONGEST:
        raise ValueError(f"the expression has {size} characters, more than {_LONGEST}")
    source = expression.strip()
    try:
        return _text(_value(ast.parse(source, mode="eval").body, source))
    except (
        ZeroDivisionError,
        OverflowError,
        SyntaxError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(
            _PROBLEMS.get(type(error), "this is not an expression of numbers")
        ) from error


def _value(node: ast.expr, source: str) -> Number:
    """Compute a node of ``source``."""
    hint = ""
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return _small(value)
        case ast.Constant(value=value) if type(value) is float:
            return _small(_decimal(ast.get_source_segment(source, node)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, source))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            compute = _BINARY[type(op)]
            return _small(compute(_value(left, source), _value(right, source)))
        case ast.BinOp(op=ast.BitXor()):
            hint = "; write ** for powers"
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if (
            name in _FUNCTIONS
        ):
            if not arguments or keywords:
                raise ValueError(f"{name} takes numbers in parentheses")
            values = [_value(argument, source) for argument in arguments]
            return _small(_FUNCTIONS[name](*values))
    raise ValueError(f"{ast.get_source_segment(source, node)!r} is not known here{hint}")


def _decimal(text: Any) -> Number:
    exponent = text.lower().partition("e")[2]
    if len(exponent) >= 8:
        return math.inf  # which is too large
    number = Decimal(text)
    if not number.is_finite() or abs(number.adjusted()) > _BITS:
        return math.inf
    return Fraction(number)  # exact, where a float would round


def _small(value: complex | Number) -> Number:
    """Return a number, an int as a fraction; raises ValueError if it is complex, or too large to compute with."""
    if isinstance(value, complex):
        raise ValueError(_NOT_REAL)
    if not isinstance(value, float):
        value = Fraction(value)
        if _bits(value) <= _BITS:
            return value
    elif math.isfinite(value):
        return value
    raise ValueError(_TOO_LARGE)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator > 1:
        return float(base) ** float(exponent)
    bits = _bits(base) * abs(exponent.numerator)  # checked before a computation that takes forever
    if bits > 2 * _BITS and base not in (-1, 0, 1):
        return math.inf  # which is too large
    return base**exponent.numerator


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError(_NOT_REAL)
    if isinstance(value, Fraction):
        exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if exact**2 == value:
            return exact
    return math.sqrt(value)


def _round(value: Any, places: Any = 0) -> Number:
    if not (places == int(places) and abs(places) <= _PLACES):
        raise ValueError(f"round takes from {-_PLACES} to {_PLACES} decimals")
    return round(value, int(places))  # a half goes to the even neighbour, as in Python


def _text(value: Number) -> str:
    """Write a number: exactly if it has few decimals, else as a fraction with its rounded value."""
    if isinstance(value, float):
        return f"about {value:.15g}"
    for places in range(_PLACES + 1):
        if 10**places % value.denominator == 0:
            break
    else:
        return f"{value}, about {Decimal(value.numerator) / Decimal(value.denominator):.15g}"
    sign = "-" if value < 0 else ""
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}}"
    if places == 0:
        return sign + digits
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


_BINARY: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": _root,
}
