"""Library types that cross as plain data. The wire loads this for values other than the common builtins.

This runs inside the sandboxes with the standard library alone; numpy and pandas are used where a value is of theirs.
A type is recognised by its module, so that nothing is imported for types that no value has.
"""

import sys

NUMPY_KINDS = "?biufcSUmM"
EXTENSIONS = ("string", "str", "boolean", "Int", "UInt", "Float")  # pandas' own dtypes, by the start of their names
PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath")


def import_module(name):
    """The module; without the time that importing importlib takes."""
    __import__(name)
    return sys.modules[name]


def encode(value, kind):
    """A tag and the parts of an immutable library value; ["node"] for a mutable one; None for anything else."""
    found = ENCODE.get((kind.__module__, kind.__name__))
    if found is not None and getattr(sys.modules.get(kind.__module__), kind.__name__, kind) is kind:
        return found(value)
    if NODES.get((kind.__module__, kind.__name__), "na") != "na":
        return ["node"]
    if kind is type and (tag := CLASS_NAMES.get((value.__module__, value.__name__))):
        return ["L", tag] if getattr(sys.modules.get(value.__module__), value.__name__, None) is value else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return of_numpy(value, numpy)
    pandas = sys.modules.get("pandas")
    if pandas is not None and kind.__module__.split(".")[0] == "pandas":
        return of_pandas(value, pandas)
    return None


# values of the standard library


def _datetime(value):
    zone = value.tzinfo
    names = ("year", "month", "day") if hasattr(value, "year") else ()
    names += ("hour", "minute", "second", "microsecond")
    return ["dt", type(value).__name__, tuple(getattr(value, name) for name in names), zone, value.fold]


def _made_datetime(name, parts, zone, fold):
    import datetime

    if name not in ("datetime", "time"):
        raise ValueError("no such time")
    return getattr(datetime, name)(*parts, tzinfo=zone, fold=fold)


def _timezone(value):
    return ["tz", *value.__getinitargs__()]


def _match(value):
    return ["rm", value.re, value.string, value.span()]


def _made_match(pattern, string, span):
    """The match at ``span``: its groups are those that this side finds there."""
    for method in (pattern.match, pattern.fullmatch):
        found = method(string, span[0]) if method is pattern.match else method(string, *span)
        if found is not None and found.span() == span:
            return found
    raise ValueError("no such match")


def _pattern(text, flags):
    import re

    return re.compile(text, flags)


def _path(name, text):
    if name not in PATHS:
        raise ValueError("no such path")
    return getattr(import_module("pathlib"), name)(text)


def _made(module, name, check):
    """A function that calls a library's class on parts of a type."""

    def make(*parts):
        if not all(type(part) in check for part in parts):
            raise ValueError(f"parts of a {name}")
        return getattr(import_module(module), name)(*parts)

    return make


def _views(value):
    return ["mp", dict(value)]


ENCODE = {
    ("decimal", "Decimal"): lambda v: ["D", str(v)],
    ("fractions", "Fraction"): lambda v: ["F", v.numerator, v.denominator],
    ("datetime", "date"): lambda v: ["da", v.year, v.month, v.day],
    ("datetime", "timedelta"): lambda v: ["td", v.days, v.seconds, v.microseconds],
    ("datetime", "datetime"): _datetime,
    ("datetime", "time"): _datetime,
    ("datetime", "timezone"): _timezone,
    ("zoneinfo", "ZoneInfo"): lambda v: None if v.key is None else ["zi", v.key],
    ("uuid", "UUID"): lambda v: ["uu", v.hex],
    ("re", "Pattern"): lambda v: ["re", v.pattern, v.flags],
    ("re", "Match"): _match,
    ("builtins", "mappingproxy"): _views,
    ("pathlib", "PurePosixPath"): lambda v: ["pa", "PurePosixPath", str(v)],
    ("pathlib", "PureWindowsPath"): lambda v: ["pa", "PureWindowsPath", str(v)],
    ("pathlib", "PosixPath"): lambda v: ["pa", "PosixPath", str(v)],
    ("ipaddress", "IPv4Address"): lambda v: ["i4", str(v)],
    ("ipaddress", "IPv6Address"): lambda v: ["i6", str(v)],
}
for _module in ("pathlib._local", "pathlib._abc"):  # as of Python 3.13
    for _name in PATHS:
        ENCODE[_module, _name] = ENCODE["pathlib", _name]
ENCODE["pathlib._local", "PosixPath"] = ENCODE["pathlib", "PosixPath"]


def _proxy(value):
    from types import MappingProxyType

    return MappingProxyType(value)


def _library_class(tag):
    module, name = CLASSES[tag]
    return getattr(import_module(module), name)


CLASSES = {
    f"{module}.{name}": (module, name)
    for module, names in {
        "collections": "OrderedDict defaultdict Counter deque",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "datetime": "date datetime time timedelta timezone",
        "uuid": "UUID",
        "pathlib": "Path PurePath PosixPath",
    }.items()
    for name in names.split()
}
CLASS_NAMES = {pair: tag for tag, pair in CLASSES.items()}
DECODE = {
    "D": _made("decimal", "Decimal", (str,)),
    "F": _made("fractions", "Fraction", (int,)),
    "da": _made("datetime", "date", (int,)),
    "td": _made("datetime", "timedelta", (int,)),
    "dt": _made_datetime,
    "tz": lambda *parts: import_module("datetime").timezone(*parts),
    "zi": _made("zoneinfo", "ZoneInfo", (str,)),
    "uu": _made("uuid", "UUID", (str,)),
    "re": _pattern,
    "rm": _made_match,
    "mp": _proxy,
    "pa": _path,
    "i4": _made("ipaddress", "IPv4Address", (str,)),
    "i6": _made("ipaddress", "IPv6Address", (str,)),
    "L": _library_class,
}


# mutable ones

NODES = {
    ("array", "array"): "ar",
    ("types", "SimpleNamespace"): "sn",
    ("_io", "StringIO"): "si",
    ("_io", "BytesIO"): "bi",
    ("numpy", "ndarray"): "na",
}


def content(value):
    """The tag of a mutable value, for which :func:`encode` says ["node"]; what cannot change in it; and the rest."""
    tag = NODES[type(value).__module__, type(value).__name__]
    if tag == "na":
        return tag, [value.dtype.str, *value.shape], value.tobytes()
    if tag == "ar":
        return tag, [value.typecode], tuple(value)
    if tag == "sn":
        return tag, [], tuple(vars(value).items())
    return tag, [], (value.getvalue(), value.tell())


def snapshot(value):
    """What a mutable value holds, as a tuple of texts, bytes and numbers."""
    kind = type(value)
    if NODES.get((kind.__module__, kind.__name__)) in ("ar", "na"):
        return (str(content(value)[1]), value.tobytes())
    return (value.tell(), value.getvalue())


def empty(tag, header):
    """A new value for a tag of :func:`content`."""
    if tag == "na":
        return _array(header[0], header[1:], None)
    if tag == "ar":
        return import_module("array").array(header[0])
    if tag == "sn":
        return import_module("types").SimpleNamespace()
    return {"si": import_module("io").StringIO, "bi": import_module("io").BytesIO}[tag]()


def fits(value, tag, header):
    """Whether :func:`fill` can change ``value`` to that content."""
    return (type(value).__module__, type(value).__name__) in NODES and content(value)[:2] == (tag, header)


def fill(value, tag, content):
    """Replace what a mutable value holds."""
    if tag == "na":
        value[...] = _array(value.dtype.str, value.shape, content)
    elif tag == "sn":
        if not all(type(name) is str and name[:2] != "__" for name, _ in content):
            raise ValueError("an attribute")
        vars(value).clear()
        vars(value).update(content)
    elif tag == "ar":
        value[:] = type(value)(value.typecode, content)
    else:
        text, position = content
        value.seek(0)
        value.truncate()
        value.write(text)
        value.seek(position)


# numpy and pandas


def of_numpy(value, numpy):
    """A tag and the parts of an array or number."""
    dtype = value.dtype
    if isinstance(value, numpy.ndarray):
        if type(value) is not numpy.ndarray:
            return None
        if dtype.kind in NUMPY_KINDS:
            return ["node"]
        if dtype.kind == "O":
            return ["no", value.shape, tuple(value.ravel().tolist())]
        if dtype.kind == "V" and dtype.names and all(dtype[name].kind in NUMPY_KINDS for name in dtype.names):
            return ["ns", repr(dtype.descr), value.shape, value.tobytes()]
        return None
    return ["nu", dtype.str, value.tobytes()] if dtype.kind in NUMPY_KINDS else None


def _array(dtype, shape, data):
    """An array of those bytes; of zeros without them."""
    import numpy

    dtype = numpy.dtype([tuple(each) for each in _literal(dtype)] if dtype[:1] == "[" else dtype)
    if dtype.kind not in NUMPY_KINDS and not (dtype.names and all(dtype[n].kind in NUMPY_KINDS for n in dtype.names)):
        raise ValueError("an array of objects")
    if data is None or not dtype.itemsize:
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _literal(text):
    return import_module("ast").literal_eval(text)


def _objects(shape, items):
    import numpy

    array = numpy.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array.reshape(shape)


DECODE["ns"] = _array
DECODE["no"] = _objects
DECODE["nu"] = lambda dtype, data: _array(dtype, (1,), data)[0]


def _column(values, pandas):
    """A column's dtype and data: an array of numpy's, or the objects."""
    if isinstance(values.dtype, pandas.CategoricalDtype):
        array = values.array if hasattr(values, "array") else values
        return ("category", tuple(array.codes.tolist()), pandas.Index(array.categories), array.ordered)
    numpy = sys.modules["numpy"]
    if isinstance(values.dtype, numpy.dtype):
        return ("numpy", values.to_numpy())
    if isinstance(values.dtype, pandas.DatetimeTZDtype):
        return ("zone", values.dtype.unit, values.dtype.tz, values.to_numpy("M8[ns]"))
    if not str(values.dtype).startswith(EXTENSIONS):
        return None
    return ("objects", str(values.dtype), tuple(None if pandas.isna(item) else item for item in values))


def _made_column(parts):
    import pandas

    how = parts[0]
    if how == "category":
        return pandas.Categorical.from_codes(parts[1], categories=parts[2], ordered=parts[3])
    if how == "zone":
        column = pandas.Series(parts[3]).dt.tz_localize("UTC").dt.tz_convert(parts[2])
        return column.array.as_unit(parts[1])
    if how == "objects":
        if not parts[1].startswith(EXTENSIONS):
            raise ValueError("a dtype")
        return pandas.array(parts[2], dtype=parts[1])
    return parts[1]


def of_pandas(value, pandas):
    """A tag and the parts of a table, series, index or time."""
    kind = type(value)
    if kind is pandas.Timestamp:
        return ["pt", value.value, value.unit, value.tz]
    if kind is pandas.Timedelta:
        return ["pd", value.value, value.unit]
    if value is pandas.NaT or value is pandas.NA:
        return ["pn", value is pandas.NA]
    if kind is pandas.DataFrame:
        columns = tuple(_column(value.iloc[:, place], pandas) for place in range(value.shape[1]))
        return None if None in columns else ["pf", value.columns, value.index, columns]
    if kind is pandas.RangeIndex:
        return ["pr", value.start, value.stop, value.step, value.name]
    if kind is pandas.MultiIndex:
        return ["pm", tuple(value.tolist()), tuple(value.names)]
    if kind is pandas.Series or isinstance(value, pandas.Index):
        column = _column(value, pandas)
        if column is None or kind is pandas.IntervalIndex or kind is pandas.PeriodIndex:
            return None
        return ["ps", column, value.index, value.name] if kind is pandas.Series else ["pi", column, value.name]
    return None


def _frame(columns, index, data):
    import pandas

    frame = pandas.DataFrame({place: pandas.Series(_made_column(column), index=index)
                              for place, column in enumerate(data)}, index=index)  # fmt: skip
    frame.columns = columns
    return frame


def _pandas(name):
    return getattr(import_module("pandas"), name)


DECODE |= {
    "pt": lambda value, unit, zone: _pandas("Timestamp")(value, tz=zone).as_unit(unit),
    "pd": lambda value, unit: _pandas("Timedelta")(value).as_unit(unit),
    "pn": lambda missing: _pandas("NA" if missing else "NaT"),
    "pf": _frame,
    "pr": lambda start, stop, step, name: _pandas("RangeIndex")(start, stop, step, name=name),
    "pm": lambda items, names: _pandas("MultiIndex").from_tuples(items, names=names),
    "ps": lambda column, index, name: _pandas("Series")(_made_column(column), index=index, name=name),
    "pi": lambda column, name: _pandas("Index")(_made_column(column), name=name),
}
