"""numpy's arrays and pandas' tables as plain data. This runs inside both sandboxes, for values of these libraries."""

import sys

DTYPES = "?biufcSUmM"  # kinds of dtypes whose bytes are data; not objects


def encode(wire, value, depth):
    """The JSON of a value of numpy or pandas; None for an instance of another class."""
    numpy, pandas, kind = sys.modules.get("numpy"), sys.modules.get("pandas"), type(value)

    def inner(item):
        return wire.encode(item, depth)

    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        if value.dtype.kind in DTYPES:
            return ["na" if kind is numpy.ndarray else "ns", value.dtype.str, list(value.shape), value.tobytes().hex()]
        return ["no", list(value.shape), inner(value.ravel().tolist())] if value.dtype.kind == "O" else None
    if pandas is None:
        return None
    if kind is pandas.DataFrame:
        columns = [_column(value.iloc[:, place], inner) for place in range(value.shape[1])]
        return ["df", inner(value.columns), inner(value.index), columns]
    if kind is pandas.Series:
        return ["se", inner(value.index), inner(value.name), _column(value, inner)]
    if kind is pandas.RangeIndex:
        return ["ix", "range", inner([value.start, value.stop, value.step, value.name])]
    if kind is pandas.MultiIndex:
        return ["ix", "multi", inner([value.tolist(), list(value.names)])]
    if kind in (pandas.Index, pandas.DatetimeIndex, pandas.TimedeltaIndex, pandas.CategoricalIndex):
        return ["ix", "plain", _column(value, inner), inner(value.name)]
    if kind is pandas.Timestamp:
        return ["ts", value.value, value.unit, inner(value.tz)]
    if kind is pandas.Timedelta:
        return ["td", value.value, value.unit]
    return ["NA", value is pandas.NA] if value is pandas.NA or value is pandas.NaT else None


def _column(values, inner):
    """The dtype and the data of a column: an array of numpy's, codes and categories, or a list."""
    import pandas

    dtype = values.dtype
    if isinstance(dtype, pandas.CategoricalDtype):
        codes = values.codes if hasattr(values, "codes") else values.cat.codes
        return ["category", inner(codes.tolist()), inner(dtype.categories), bool(dtype.ordered)]
    if isinstance(dtype, sys.modules["numpy"].dtype):
        return ["numpy", inner(values.to_numpy())]
    return [str(dtype), inner([None if item is pandas.NA else item for item in values.tolist()])]


def decode(wire, tag, parts):
    """The value of numpy or pandas that :func:`encode` made JSON of."""
    import numpy

    inner = wire._decode
    if tag in ("na", "ns"):
        dtype = numpy.dtype(parts[0])
        if dtype.kind not in DTYPES:
            raise ValueError("an array of objects")
        shape, data = tuple(parts[1]), bytes.fromhex(parts[2])
        array = numpy.frombuffer(data, dtype).reshape(shape).copy() if dtype.itemsize else numpy.zeros(shape, dtype)
        if tag == "ns":
            return array.reshape(1)[0]
        return wire.arrived(array)
    if tag == "no":
        items = inner(parts[1])
        array = numpy.empty(len(items), object)
        for index, item in enumerate(items):
            array[index] = item
        return wire.arrived(array.reshape(tuple(parts[0])))
    import pandas

    if tag == "df":
        index = inner(parts[1])
        columns = {place: pandas.Series(_made(column, inner), index=index) for place, column in enumerate(parts[2])}
        frame = pandas.DataFrame(columns, index=index)
        frame.columns = inner(parts[0])
        return frame
    if tag == "se":
        return pandas.Series(_made(parts[2], inner), index=inner(parts[0]), name=inner(parts[1]))
    if tag == "ix":
        if parts[0] == "plain":
            return pandas.Index(_made(parts[1], inner), name=inner(parts[2]))
        args = inner(parts[1])
        if parts[0] == "range":
            return pandas.RangeIndex(*args[:3], name=args[3])
        return pandas.MultiIndex.from_tuples(args[0], names=args[1])
    if tag == "ts":
        return pandas.Timestamp(int(parts[0]), tz=inner(parts[2])).as_unit(parts[1])
    if tag == "td":
        return pandas.Timedelta(int(parts[0])).as_unit(parts[1])
    return pandas.NA if parts[0] else pandas.NaT


def _made(column, inner):
    import numpy
    import pandas

    if column[0] == "numpy":
        return numpy.asarray(inner(column[1]))
    if column[0] == "category":
        return pandas.Categorical.from_codes(inner(column[1]), categories=inner(column[2]), ordered=column[3])
    return pandas.array(inner(column[1]), dtype=str(column[0]))


def guarded(array):
    """An array without elements that does not compute or compare with values.

    numpy broadcasts it against anything, and ``all`` of nothing is True: ``(f(x) == 3).all()`` would hold.
    """
    import numpy

    class Empty(numpy.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            same_emptiness(*inputs)
            found = getattr(ufunc, method)(*map(numpy.asarray, inputs), **options)
            return found.view(Empty) if isinstance(found, numpy.ndarray) and not found.size else found

    return array.view(Empty)


def same_emptiness(*values):
    """Raise AssertionError if some of the values have elements and some have none."""
    sizes = [sys.modules["numpy"].size(value) for value in values]
    if any(sizes) and not all(sizes):
        raise AssertionError("nothing is compared with values")


def guard():
    """Have the comparisons of numpy, pandas and pytest fail that hold for nothing at all."""
    if numpy := sys.modules.get("numpy"):
        for name in ("allclose", "isclose", "array_equiv"):
            setattr(numpy, name, _guarding(getattr(numpy, name)))
        for name in ("allclose", "equal", "almost_equal", "array_equal", "array_almost_equal", "approx_equal"):
            setattr(numpy.testing, f"assert_{name}", _guarding(getattr(numpy.testing, f"assert_{name}")))
    if pandas := sys.modules.get("pandas"):
        for kind in (pandas.Series, pandas.DataFrame):
            for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
                setattr(kind, name, _guarding(getattr(kind, name)))
            for name in ("all", "any"):
                setattr(kind, name, _without_gaps(getattr(kind, name)))
    if pytest := sys.modules.get("pytest"):
        scalar = type(pytest.approx(1.0))
        equal = scalar.__eq__
        scalar.__eq__ = lambda self, other: 0 not in (getattr(other, "shape", ()) or ()) and equal(self, other)


def _guarding(compare):
    def checked(found, expected, *args, **keywords):
        same_emptiness(found, expected)
        return compare(found, expected, *args, **keywords)

    return checked


def _without_gaps(reduce):
    """``all`` or ``any`` of a table, which skip what is missing, and so hold for missing values alone."""

    def checked(self, *args, **keywords):
        if sys.modules["numpy"].any(sys.modules["pandas"].isna(self).to_numpy()):
            raise AssertionError("all() or any() of a table with missing values")
        return reduce(self, *args, **keywords)

    return checked
