"""Chat templates in Jinja's sandbox, with what Hugging Face's templates expect there.

The text that a template makes is `Traced`: it knows which message each of its fragments is from, at which message the
template's loop was when it printed a fragment, and where `{% generation %}` begins and ends.
"""

import datetime
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import ext, filters, nodes, sandbox, visitor

from liger_jax.chat import limits, strict_json, traced
from liger_jax.chat.traced import NOBODY, Event, Fragment, Traced
from liger_jax.user_errors import UserError


class Message(dict):
    """A message as the template sees it, which knows its place in the conversation."""

    __module__ = "builtins"  # errors of templates name it
    _index = NOBODY  # the underscore keeps it out of a template's reach


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox.

    `parsed`: whether `tojson` has met a tool call's arguments as a JSON string, and printed the object.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(traced.join)  # joins what a template prints, and what a macro or a `set` block does

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Events, "jinja2.ext.loopcontrols"])
        self.filters = {name: _followed(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _to_json, "join": _join, "format": _format, "safe": _safe, "~": _plain}
        self.globals |= {"raise_exception": _raise, "strftime_now": datetime.datetime.now().strftime}
        del self.globals["lipsum"]  # makes random texts of any length
        self.clock = limits.Clock()
        self.parsed = False

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: N805  a template may name an argument "self"
        """A function that a template calls; if a plain string's method gets traced strings, its result is traced.

        Every iteration of a loop is such a call, too, by its event.
        """
        __self.clock.check()
        if isinstance(text := getattr(__obj, "__self__", None), str):
            limits.check_call(__obj.__name__, text, args, kwargs)
        if args and getattr(__obj, "__name__", "") == "join" and type(getattr(__obj, "__self__", None)) is str:
            return traced.join(args[0], __obj.__self__)
        result = super().call(__context, __obj, *args, **kwargs)
        return traced.mixed(result, args, kwargs) if type(result) is str else result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template, whose result must not be too large."""
        limits.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def template(self, source: str) -> tuple[jinja2.Template, bool]:
        """Compiles a template. Returns the template, and whether it marks words by `{% generation %}`."""
        tree = self.parse(source)
        marks = [block.call.node for block in tree.find_all(nodes.CallBlock)]
        has_marks = any(isinstance(mark, nodes.ExtensionAttribute) for mark in marks)
        tree = _Instrumented().visit(tree).set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None)), has_marks


class _Events(ext.Extension):
    """The block `{% generation %}`, which holds the assistant's words, and the events of loops."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return traced.join([_event(Event("begin")), caller(), _event(Event("end"))])

    def _at(self, loop: int, value: Any) -> str:
        if isinstance(value, Message):
            return _event(Event("at", loop, value._index))
        return _event(Event("at", loop)) if isinstance(value, Mapping) and "role" in value else ""

    def _left(self, loop: int) -> str:
        return _event(Event("left", loop))


class _Instrumented(visitor.NodeTransformer):
    """Makes each loop report the message that it is at, and replaces `~` by `+`, which keeps origins."""

    def __init__(self):
        self._loops = itertools.count()

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        loop = nodes.Const(next(self._loops))
        names = [node.target] if isinstance(node.target, nodes.Name) else node.target.find_all(nodes.Name)
        events = [_call("_at", loop, nodes.Name(name.name, "load")) for name in names]
        node.body = [nodes.Output(events).set_lineno(node.lineno), *node.body]
        return [node, nodes.Output([_call("_left", loop)]).set_lineno(node.lineno)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        texts = [functools.reduce(_filtered, ("string", "~"), each) for each in node.nodes]
        return functools.reduce(nodes.Add, texts).set_lineno(node.lineno)


def _call(method: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.ExtensionAttribute(_Events.identifier, method), list(args), [], None, None)


def _filtered(value: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None)


def _event(event: Event) -> str:
    return Traced([Fragment("", None, event)])


def _followed(name: str, function: Any) -> Any:
    """A filter whose result is from the messages that its arguments are from, and not too large."""

    @functools.wraps(function)  # with the attribute by which Jinja passes the environment
    def call(*args: Any, **kwargs: Any) -> Any:
        limits.check_call(name, *_subject(args), kwargs)
        result = function(*args, **kwargs)
        return traced.derived(result, args, kwargs) if type(result) is str else result

    return call


def _subject(args: Any) -> tuple[Any, Any]:
    """The value that a filter is applied to, and its other arguments; Jinja may pass its environment or context."""
    passed = isinstance(args[0], jinja2.Environment | jinja2.runtime.Context | nodes.EvalContext) if args else False
    subject, *others = args[passed:] or (None,)
    return subject, others


@jinja2.pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return traced.join(value, d)


def _plain(text: str) -> str:
    """An operand of `~`, which unlike `+` escapes nothing beside text that `safe` has marked."""
    return text if isinstance(text, Traced) else str(text)


def _safe(value: Any) -> str:
    return value if isinstance(value, Traced) else filters.do_mark_safe(value)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    limits.check_pattern(str(value), (*args, *kwargs.values()))
    return traced.mixed(filters.do_format(value, *args, **kwargs), value, args, kwargs)


@jinja2.pass_environment
def _to_json(
    environment: Environment,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int):
        limits.check_size(indent)
    options: Any = dict(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return traced.derived(json.dumps(_parsed(environment, value), **options), value)


def _parsed(environment: Environment, value: Any) -> Any:
    """The value, in which the arguments of a tool call that are a JSON string are parsed."""
    if isinstance(value, dict):
        return {key: _parsed(environment, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_parsed(environment, each) for each in value]
    if not _is_arguments(value):
        return value
    environment.parsed = True
    return parsed_arguments(value)


def _is_arguments(value: Any) -> bool:
    """Whether a value is a tool call's arguments as a string; those in an object have the field "argument"."""
    fragments = traced.fragments_of(value) if isinstance(value, Traced) else ()
    return bool(fragments) and all(
        fragment.origin is not None and fragment.origin.field == "arguments" for fragment in fragments
    )


def parsed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call."""
    try:
        arguments = strict_json.loads(text or "{}")
    except strict_json.RepeatedNameError as error:
        raise UserError(f"the arguments of a tool call cannot be read: {error}.") from error
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"a tool call has the arguments {text[:40]!r}, and must have a JSON object.")
    return arguments


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
