"""Jinja's sandbox with a bound on the work of one rendering.

Templates come from model hubs. The sandbox keeps their code from everything outside the rendering,
but not from rendering for ever, or into all memory. Here each step takes from an allowance before
it is done: a turn of a loop, a call of a macro, and anything that makes or reads a large value, by
its size. So the work is the same on any machine, and a refused template is refused each time.

Most of what usual templates do costs nothing extra: writing a string outside of macros, comparing
with a constant. Attributes of dictionaries, loops and namespaces, sums of strings, and calls of
plain methods and macros take a shorter way than Jinja's own sandbox, to the same result: a usual
template renders faster here than there.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

_STEP = 64
_ALL_TURNS = "_all_turns"
_NODE = 16
_MAX_INT_BITS = 4096
_MAX_POWER = (2**32, 64)
_SCALARS = frozenset((bool, int, float, type(None)))

# What is looked up in nearly every line of a template, and takes a tenth of Jinja's own time here:
# Jinja tries the attribute first, checks whether it is safe, and then whether the call is.
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(
    ("index", "index0", "first", "last", "length", "revindex", "revindex0", "depth", "depth0")
)
_PLAIN_VALUES = frozenset((str, bool, int, float, type(None), list, dict))
_PLAIN_METHODS = frozenset(
    (
        *("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines"),
        *("lower", "upper", "title", "capitalize", "isdigit", "removeprefix", "removesuffix"),
        *("get", "items", "keys", "values"),
    )
)
_MISSING = object()
_ONLY_TEXT = {str}
_STRIPPING = frozenset(("strip", "lstrip", "rstrip", "trim"))
_SPLITTING = frozenset(("split", "rsplit", "splitlines"))

_FREE_FILTERS = frozenset(
    ("length", "count", "first", "last", "default", "d", "attr", "abs", "int", "float", "random")
)
_WIDENING_FILTERS = frozenset(("center", "indent", "batch", "slice", "wordwrap", "truncate"))
_SLOW_FILTERS = frozenset(("urlize", "wordwrap", "striptags", "xmlattr", "pprint", "sum"))
_SHALLOW_FILTERS = frozenset(
    (
        *("list", "map", "select", "reject", "selectattr", "rejectattr", "items", "reverse"),
        *("batch", "slice", "min", "max", "dictsort"),
    )
)
_COMPARING_TESTS = frozenset(
    (
        *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<="),
        *("gt", "greaterthan", ">", "ge", ">=", "in", "lower", "upper"),
    )
)
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))
_FORMATTING_METHODS = frozenset(("format", "format_map"))
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(?:[0-9]{5}|\*)")
_WIDE_BRACES = re.compile(r"\{[^}]*[0-9]{5}")
_WIDE_DATE = re.compile(r"%[^%a-zA-Z]*[0-9]{3}")


class TooMuchWork(SecurityError):
    """A rendering has used up its allowance."""


class _Allowance(threading.local):
    """Holds what is left of the allowance in this thread."""

    def __init__(self, units: int) -> None:
        self.left = units


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox; call `allow` before each rendering.

    Args:
        units: The allowance: about one for each character made or read.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.code_generator_class = _BoundedCode
        self._units = units
        self._allowance = _Allowance(units)
        self.globals.pop("lipsum", None)
        self.filters = {name: self._bounded(name, each) for name, each in self.filters.items()}
        self.filters[_ALL_TURNS] = self._all_turns
        self.tests = {
            name: self._bounded("", each) if name in _COMPARING_TESTS else each
            for name, each in self.tests.items()
        }

    def allow(self) -> None:
        self._allowance.left = self._units

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Replace a filter by another, within the bounds."""
        self.filters[name] = self._bounded(name, function)

    def charge(self, units: int) -> None:
        """Take from the allowance. Raises `TooMuchWork`."""
        allowance = self._allowance
        allowance.left = left = allowance.left - units
        if left < 0:
            raise TooMuchWork("the template does too much")

    # --- what the generated code calls ------------------------------------------------------------

    def tick(self) -> None:
        """Charge one turn of a loop, or one call of a macro."""
        allowance = self._allowance
        allowance.left = left = allowance.left - _STEP
        if left < 0:
            raise TooMuchWork("the template does too much")

    def text(self, value: Any) -> str:
        """Return written output as text."""
        self.charge(self._weight(value))
        return str(value)

    def read(self, value: Any) -> Any:
        """Charge for *value*, whose elements or characters will be read or copied once."""
        if isinstance(value, (str, bytes, list, tuple, dict, range)):
            self.charge(len(value) // 8 + 1)
        return value

    def compared(self, value: Any) -> Any:
        """Charge for *value*, which will be compared to its full depth."""
        if type(value) not in _SCALARS:
            self.charge(self._weight(value) // 8 + 1)
        return value

    def added(self, *values: Any) -> Any:
        """Return the sum of values, from the left."""
        if set(map(type, values)) == _ONLY_TEXT:
            self.charge(sum(map(len, values)))
            return "".join(values)
        return functools.reduce(self._sum, values)

    def method(self, context: Context, owner: Any, name: str, *arguments: Any) -> Any:
        """Call one of `_PLAIN_METHODS`.

        Args:
            owner: Whose method it is, usually a string or a dictionary.
            arguments: Without names.
        """
        if type(owner) is str and name not in _DICT_NAMES:
            if name in _STRIPPING or name in _SPLITTING:
                self._charge_pieces(owner, name, arguments)
            self.charge(len(owner) + _NODE)
            return getattr(owner, name)(*arguments)
        if type(owner) is dict and name in _DICT_NAMES:
            if not arguments:
                self.charge(len(owner) + 1)
                return getattr(owner, name)()
            if name == "get" and type(arguments[0]) is str:
                self.charge(_NODE)
                return owner.get(*arguments)
        return self.call(context, self.getattr(owner, name), *arguments)

    # --- what Jinja calls -------------------------------------------------------------------------

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_NAMES:
                return getattr(obj, attribute)
        elif kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, _MISSING)
            if type(value) in _PLAIN_VALUES:
                return value
        return super().getattr(obj, attribute)

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_POWER[0] and abs(right) <= _MAX_POWER[1]):
            raise SecurityError("power too large")
        if operator == "*":
            self.charge(_repeats(left, right) + _repeats(right, left))
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._charge_format(str(left), "%", right, _WIDE_PERCENT)
        result = super().call_binop(context, operator, left, right)
        return self._checked_int(result) if isinstance(result, int) else result

    @override
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is Macro:  # it pays for itself
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            __self._charge_method(owner, getattr(method, "__name__", ""), args, kwargs)
        elif isinstance(owner, (list, tuple, dict)):
            __self.charge(__self._weight(owner) if args else len(owner) + 1)
        return super().call(__context, __obj, *args, **kwargs)

    # --- steps ------------------------------------------------------------------------------------

    def _sum(self, left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes, list, tuple)) and type(left) is type(right):
            self.charge(len(left) + len(right))
        result = left + right
        return self._checked_int(result) if isinstance(result, int) else result

    def _charge_pieces(self, text: Any, name: str, arguments: Sequence[Any]) -> None:
        """Charge for looking each character up among many, or for many small strings."""
        mark = arguments[0] if arguments and type(arguments[0]) is type(text) else None
        if name in _SPLITTING:
            self.charge((text.count(mark) if mark else len(text) // 2) * _NODE)
        elif mark is not None:
            self.charge(len(text) * (len(mark) // 8))

    def _weight(self, value: Any) -> int:
        """Return the approximate length of *value* as text; the look stops where the allowance
        ends."""
        return _weight(value, self._allowance.left)

    def _all_turns(self, value: Any) -> Any:
        self.charge(_STEP * (len(value) if hasattr(value, "__len__") else 1))
        return value

    def _bounded(self, name: str, function: Any) -> Callable[..., Any]:
        """Wrap a filter or a test so that it charges before it works."""
        kept: Callable[..., Any] = function
        if name in _FREE_FILTERS:
            return kept

        is_slow = name in _SLOW_FILTERS

        @functools.wraps(function)
        def paying(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and type(args[0]) is str and not is_slow:
                self.charge(len(args[0]) + _NODE)  # nearly all of them
                return function(args[0])
            values = [
                each for each in args if not isinstance(each, (Context, EvalContext, Environment))
            ]
            self._charge_filter(name, values, kwargs)
            return function(*args, **kwargs)

        return paying

    def _charge_filter(self, name: str, values: list[Any], options: Mapping[str, Any]) -> None:
        value, others = values[0], [*values[1:], *options.values()]
        if name in _SHALLOW_FILTERS:
            self.read(value)
            units = _NODE + 8 * (len(value) if hasattr(value, "__len__") else 0)
        else:
            units = self._weight(value)
        units += self._weight(others) if others else 0
        widest = max((abs(each) for each in others if isinstance(each, int)), default=0)
        if name == "tojson" and widest:
            units += units // _NODE * widest * (_depth(value) + 1)
        elif name in _WIDENING_FILTERS:
            units += widest * (units if name == "indent" else _NODE)
        elif name == "format":
            self._charge_format(str(value), "%", others, _WIDE_PERCENT)
        elif name == "replace" and len(values) > 2:
            units += _replaced(str(value), str(values[1]), str(values[2]))
        elif name in _STRIPPING:
            self._charge_pieces(str(value), name, others)
        elif name == "join" and others and hasattr(value, "__len__"):
            units += len(value) * len(str(others[0]))
        elif name in _SLOW_FILTERS:
            units *= _STEP
        self.charge(units)

    def _charge_method(
        self, owner: str | bytes, name: str, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        """Charge for a method of a string: for the string, and for its result."""
        units = len(owner) + _NODE
        given = [*args, *options.values()]
        widest = max((abs(each) for each in given if isinstance(each, int)), default=0)
        if name in _PADDING_METHODS:
            units += widest
        elif name == "expandtabs":
            units *= widest + 8
        elif name == "replace" and len(args) > 1 and isinstance(owner, str):
            units += _replaced(owner, str(args[0]), str(args[1]))
        elif name == "join" and args:
            self.read(args[0])
            units += self._weight(args[0]) * (len(owner) + 1)
        elif name == "translate":
            units *= self._weight(given)
        elif name in _STRIPPING or name in _SPLITTING:
            self._charge_pieces(owner, name, given)
        elif name in _FORMATTING_METHODS:
            self._charge_format(str(owner), "{", [args, options], _WIDE_BRACES, widest)
        self.charge(units)

    def _charge_format(
        self, pattern: str, mark: str, values: Any, too_wide: re.Pattern[str], widest: int = 0
    ) -> None:
        if too_wide.search(pattern):
            raise SecurityError("format too wide")
        self.charge(len(pattern) + pattern.count(mark) * (self._weight(values) + widest))

    def _checked_int(self, value: int) -> int:
        if value.bit_length() > _MAX_INT_BITS:
            raise SecurityError("number too large")
        return value

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's step from the syntax tree to Python."""
        kinds = (nodes.For, nodes.Macro, nodes.CallBlock)
        blocks: list[Any] = list(source.find_all(kinds))
        for block in blocks:
            step = nodes.ExprStmt(nodes.EnvironmentAttribute("tick()"), lineno=block.lineno)
            block.body = [step, *block.body]
            if isinstance(block, nodes.For) and block.test is not None:
                # Items that the condition leaves out take no turn.
                block.iter = nodes.Filter(
                    block.iter, _ALL_TURNS, [], [], None, None, lineno=block.lineno
                )
        return super()._generate(source, *args, **kwargs)


class _BoundedCode(CodeGenerator):
    """Generates Python that charges for its work by calling the environment."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if self._is_plain(frame):
            # Written and forgotten: the pieces are counted when they are joined.
            self.write("(t_out if type(t_out := ")
        else:
            super()._output_child_pre(node, frame, finalize)
            self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if self._is_plain(frame):
            self.write(") is str else environment.text(t_out))")
        else:
            self.write(")")
            super()._output_child_post(node, frame, finalize)

    @staticmethod
    def _is_plain(frame: Frame) -> bool:
        context = frame.eval_ctx
        return frame.buffer is None and not context.volatile and not context.autoescape

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`~`."""
        self.write("''.join((")
        for each in node.nodes:
            self.write("environment.text(")
            self.visit(each, frame)
            self.write("), ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """`+`, as many as there are in a row."""
        summands = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            summands.insert(0, node.right)
        self._call("added", frame, node.left, *summands)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """Attributes, of which those of dictionaries cost no call."""
        if node.attr in _DICT_NAMES:
            super().visit_Getattr(node, frame)
            return
        self.write(f"(t_of[{node.attr!r}] if type(t_of := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {node.attr!r} in t_of")
        self.write(f" else environment.getattr(t_of, {node.attr!r}))")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """Calls, of which those of the usual methods take a short cut."""
        callee = node.node
        has_options = node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller
        if not has_options and isinstance(callee, nodes.Getattr) and callee.attr in _PLAIN_METHODS:
            self.write("environment.method(context, ")
            self.visit(callee.node, frame)
            self.write(f", {callee.attr!r}")
            for argument in node.args:
                self.write(", ")
                self.visit(argument, frame)
            self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Comparisons, of which those with a constant are as fast as ever."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        by_value = not any(isinstance(side, nodes.Const) for side in sides)
        self.write("(")
        self._side(node.expr, frame, "compared" if by_value else None)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            self.write(f" {_OPERATORS[operand.op]} ")
            self._side(operand.expr, frame, _way(by_value, is_search))
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Items, and slices, which copy."""
        if isinstance(node.arg, nodes.Slice):
            self._call("read", frame, node.node)
            self.write("[")
            self.visit(node.arg, frame)
            self.write("]")
        else:
            super().visit_Getitem(node, frame)

    def _side(self, node: nodes.Expr, frame: Frame, way: str | None) -> None:
        if way is None or isinstance(node, (nodes.Const, nodes.List, nodes.Tuple)):
            self.visit(node, frame)
        else:
            self._call(way, frame, node)

    def _call(self, name: str, frame: Frame, *arguments: nodes.Expr) -> None:
        self.write(f"environment.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


_OPERATORS = {
    **{"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<="},
    **{"in": "in", "notin": "not in"},
}


def _way(by_value: bool, is_search: bool) -> str | None:
    if by_value:
        return "compared"
    return "read" if is_search else None


def _weight(value: Any, room: int) -> int:
    if type(value) is str:
        return len(value) + _NODE
    weight = _NODE
    if isinstance(value, dict):
        for name, item in value.items():
            weight += (len(name) if type(name) is str else _weight(name, room)) + _NODE
            weight += len(item) if type(item) is str else _weight(item, room - weight)
            if weight > room:
                raise TooMuchWork("the template does too much")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            weight += _weight(item, room - weight)
            if weight > room:
                raise TooMuchWork("the template does too much")
    elif isinstance(value, (bytes, range)):
        weight += len(value)
    return weight


def _depth(value: Any) -> int:
    """Return how deep *value* is nested; its weight has been charged."""
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, (dict, list, tuple))
    return 1 + max(map(_depth, items), default=0) if nested else 0


def _repeats(sequence: object, times: object) -> int:
    """Return the length of `sequence * times`; 0 unless it repeats a sequence."""
    if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
        return len(sequence) * max(times, 0)
    return 0


def _replaced(text: str, old: str, new: str) -> int:
    """Return the greatest length of the text when *old* is replaced."""
    return len(text) + text.count(old) * len(new)


def checked_date_pattern(pattern: str) -> str:
    """A pattern for `strftime` that asks for no wide fields. Raises `SecurityError`."""
    if len(pattern) > 256 or _WIDE_DATE.search(pattern):
        raise SecurityError("date pattern too wide")
    return pattern
